"""What computes parts of an algorithm faster: compiled kernels on the CPU, and torch.compile.

An accelerator owns no weights: the stock policy and its optimizer are the only truth between two calls. It names what
it reproduces (`contract.py`); for whatever is overridden, added or unknown `eligible.py` gives a reason, and the
algorithm's own methods compute it. Algorithms know this room by its name alone and train without it.
"""
