"""Many runs: sweeps and comparisons turned into tables."""
