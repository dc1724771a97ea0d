"""Measures where the time goes: the clock of phases, utilisation of the machine, and the [PERF] report."""
