"""Environments in worker processes that share memory with the trainer, also without PyTorch and Stable-Baselines3.

Public names are imported on first use: a worker process imports this package before it has set up its signals.
"""
