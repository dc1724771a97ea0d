"""All global random streams as plain values and arrays, and back: Python's, NumPy's, torch's, and those of spaces."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasttrain.batch import load_into
from fasttrain.errors import ConfigError


def random_state() -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The streams of this process as they are now; the arrays are copies."""
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"kind": kind, "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        "cuda_devices": torch.cuda.device_count(),
    }
    arrays: dict[str, NDArray[Any]] = {
        "python": np.array(words, np.int64),
        "numpy": np.array(key, np.uint32),
        "torch": torch.get_rng_state().numpy(),
    }
    for device in range(torch.cuda.device_count()):
        arrays[f"cuda{device}"] = torch.cuda.get_rng_state(device).numpy()
    return state, arrays


def load_random_state(state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Go on with these streams.

    Raises:
        ConfigError: they are none.
    """
    words, key = np.zeros(625, np.int64), np.zeros(624, np.uint32)
    now = torch.get_rng_state().numpy()
    for target, name in ((words, "python"), (key, "numpy"), (now, "torch")):
        load_into(target, arrays, name)
    python, kept = state["python"], state["numpy"]
    try:
        random.setstate((int(python["version"]), tuple(words.tolist()), python["gauss"]))
        cached = int(kept["has_gauss"]), float(kept["cached"])
        np.random.set_state((str(kept["kind"]), key, int(kept["position"]), *cached))
        torch.set_rng_state(torch.from_numpy(now))
        for device in range(min(int(state["cuda_devices"]), torch.cuda.device_count())):
            torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays[f"cuda{device}"])), device)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the checkpoint's random streams cannot be read: {error}") from error


def space_state(space: Any) -> dict[str, Any]:
    """Of the generator that a space samples with; plain values."""
    state: dict[str, Any] = plain(space.np_random.bit_generator.state)
    return state


def load_space_state(space: Any, state: Mapping[str, Any]) -> None:
    """Sample on from there.

    Raises:
        ConfigError: the state is none of that generator.
    """
    try:
        space.np_random.bit_generator.state = dict(state)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint's random stream of the action space cannot be read: {error}") from error


def plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, arrays as lists, inside mappings too."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
