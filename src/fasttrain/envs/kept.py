"""What a Python env keeps beyond its episodes (curricula, statistics), as digests: repeating its running episode in a
fresh process brings none of it back, and resume has to say so."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import gymnasium
import numpy as np

from fasttrain.spec.plugins import OURS

LIBRARIES = ("gymnasium.", "stable_baselines3.", *(f"{name}." for name in OURS))
MOST_PARTS, MOST_DEPTH = 20_000, 12  # of attributes that are looked at: some 10 ms
NOTED_ELSEWHERE = ("env", "spec", "_np_random", "_np_random_seed")
NO_DATA = (gymnasium.Space, property, staticmethod, classmethod, FunctionType, ModuleType, type)


def kept_things(env: gymnasium.Env[Any, Any]) -> dict[str, str]:
    """A digest of each attribute of the user's env, its class and the user's wrappers, by name.

    Of what is no number, text, array, generator, or made of them, its type counts alone.
    """
    found: dict[str, str] = {}
    layer: Any = env
    while layer is not None:
        inner = layer.env if isinstance(layer, gymnasium.Wrapper) else None
        if not type(layer).__module__.startswith(LIBRARIES):
            whose = "" if inner is None else f"{type(layer).__name__}."
            for name, value in {**_data(vars(type(layer))), **_data(vars(layer))}.items():
                digest = hashlib.sha256()
                with suppress(Exception):  # what cannot be read stays unsaid
                    _take(value, digest, itertools.count())
                found[whose + name] = digest.hexdigest()[:12]
        layer = inner
    return found


def _data(named: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {name for name in named if name in NOTED_ELSEWHERE or name.startswith("__")}
    return {name: one for name, one in named.items() if name not in hidden and not isinstance(one, NO_DATA)}


def _take(value: object, digest: hashlib._Hash, parts: Iterator[int], depth: int = 0) -> None:
    if next(parts) > MOST_PARTS or depth > MOST_DEPTH:
        return
    digest.update(type(value).__name__.encode())
    inside: Iterable[object] = ()
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        digest.update(repr(value).encode("utf-8", "replace"))
    elif isinstance(value, np.memmap):  # its file outlives the process
        return
    elif isinstance(value, np.ndarray):
        seen = value.flat[:: 1 + value.size // MOST_PARTS]  # of a data set a sample: checkpoints must not wait for it
        digest.update(repr((value.shape, value.dtype)).encode() + (b"" if value.dtype.hasobject else seen.tobytes()))
    elif isinstance(value, np.random.Generator):
        inside = [value.bit_generator.state]
    elif isinstance(value, Mapping):
        inside = itertools.chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple, deque)):
        inside = value
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(LIBRARIES):
        inside = [_data(vars(value))]
    for item in inside:
        _take(item, digest, parts, depth + 1)
