"""Benchmarks of fasttrain: works, a runner that takes turns, a guard between two revisions, dated report pages.

Not part of the wheel. `python -m benchmarks list` shows the works.
"""
