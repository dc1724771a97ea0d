"""Where a run computes."""

from __future__ import annotations

import torch

from fasttrain.errors import ConfigError


def pick_device(requested: str, policy: str) -> str:
    """`auto`: a small MLP is faster on the CPU (SB3 warns of the GPU there), images belong on the GPU.

    Raises:
        ConfigError: a device was asked for that is not there.
    """
    if requested == "auto":
        return "cuda" if policy.startswith("Cnn") and torch.cuda.is_available() else "cpu"
    if requested == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine (or this torch build) has no MPS; take device=cpu")
    kind, _, number = requested.partition(":")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={requested}: this machine (or this torch build) has no CUDA; take device=cpu")
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if number and requested not in there:
            raise ConfigError(f"device={requested}: this machine has {', '.join(there)}")
    return requested
