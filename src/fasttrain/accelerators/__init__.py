"""Accelerators compute parts of an algorithm faster: compiled kernels on the CPU, and torch.compile.

An accelerator has no weights: between two calls all weights are in the stock policy and in the optimizer. A contract
(`contract.py`) lists the methods that the kernels reproduce. If anything is overridden, added or unknown, the
algorithm's own methods are used, and `eligible.py` gives the reason. Algorithms import this package only if needed.
"""
