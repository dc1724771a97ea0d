"""Where the time went: phase clock, utilisation, the [PERF] report."""
