"""Skull King with numba kernels: rules, bots, the native batch and the Gymnasium environment."""
