"""Accelerators compute parts of an algorithm faster: compiled kernels on the CPU, and torch.compile.

An accelerator owns no weights: between two calls only the stock policy and its optimizer hold them. A contract
(`contract.py`) names what the kernels reproduce. Whatever is overridden, added or unknown is computed by the
algorithm's own methods, and `eligible.py` gives the reason. Algorithms import this room only when it is asked for.
"""
