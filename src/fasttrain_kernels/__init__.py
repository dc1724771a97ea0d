"""Compiled code on arrays: networks, losses, optimizers, threads. It works without PyTorch and SB3."""
