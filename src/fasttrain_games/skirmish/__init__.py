"""Skirmish with numba kernels: rules, opponents, the native batch and the Gymnasium environment."""
