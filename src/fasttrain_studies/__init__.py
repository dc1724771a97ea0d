"""Several runs at once: sweeps, comparisons and searches, with their tables."""
