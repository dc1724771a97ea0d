"""Vector environments: SB3 `VecEnv`s that also offer the slots (`fasttrain.batch.Slots`).

Classes are imported on first use: a worker process imports this package and must stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {"NativeVecEnv": "fasttrain.vec.native", "SharedMemoryVecEnv": "fasttrain.vec.shared"}

__all__ = ["NativeVecEnv", "SharedMemoryVecEnv"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fasttrain.vec' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
