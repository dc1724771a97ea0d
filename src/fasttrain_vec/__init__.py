"""Environments in worker processes that share memory with the trainer. It works without PyTorch, numba and SB3.

`VectorEnv` is a Gymnasium vector env. `SharedMemoryVecEnv` is the same for Stable-Baselines3, which it imports.

Public names are imported on first use, because a worker process imports this package before it ignores signals.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttrain.errors import EnvError as EnvError
    from fasttrain.errors import EnvSpecError as EnvSpecError
    from fasttrain.errors import ReplaceEnv as ReplaceEnv
    from fasttrain_vec.vector_env import VectorEnv as VectorEnv

_PUBLIC = {
    "EnvError": "fasttrain.errors",
    "EnvSpecError": "fasttrain.errors",
    "ReplaceEnv": "fasttrain.errors",
    "SharedMemoryVecEnv": "fasttrain.vec.shared",
    "VectorEnv": "fasttrain_vec.vector_env",
}

__all__ = ["EnvError", "EnvSpecError", "ReplaceEnv", "SharedMemoryVecEnv", "VectorEnv"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fasttrain_vec' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
