"""Accelerators compute parts of an algorithm faster: compiled kernels on the CPU, and torch.compile.

An accelerator owns no weights: between two calls only the stock policy and its optimizer hold them. A contract
(`contract.py`) names the methods that the kernels reproduce. Whatever is overridden, added or unknown is computed by
the algorithm's own methods, and `eligible.py` gives the reason. Algorithms import this package only if it is used.
"""
