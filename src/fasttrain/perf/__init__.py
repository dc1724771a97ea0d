"""Where the time goes: phase clock, utilisation, the [PERF] report."""
