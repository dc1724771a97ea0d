"""The public base of native games: N games that compiled code steps together, and one game as an environment.

Names are imported on first use, so that a module which only declares a game imports neither numba nor Gymnasium.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "GameBatch": "fasttrain.native.batch",
    "GameSpec": "fasttrain.spec.games",
    "NativeGame": "fasttrain.envs.protocol",
    "SingleGame": "fasttrain.native.batch",
    "bytes_of": "fasttrain.native.batch",
    "load_bytes": "fasttrain.native.batch",
    "random_below": "fasttrain.native.batch",
    "random_bits": "fasttrain.native.batch",
    "random_unit": "fasttrain.native.batch",
    "seed_stream": "fasttrain.native.batch",
}

__all__ = [
    "GameBatch", "GameSpec", "NativeGame", "SingleGame", "bytes_of", "load_bytes", "random_below", "random_bits",
    "random_unit", "seed_stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fasttrain.native' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
