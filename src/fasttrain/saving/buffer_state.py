"""Random streams and replay buffers as plain values and arrays, and back.

The streams are Python's, NumPy's, torch's and those of spaces. Of a replay buffer only rows that were written are kept,
and of a sum tree only its leaves, because the sums follow from them. It serves SB3's own buffers too, which have the
same arrays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer

from fasttrain.batch import load_into
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.sum_tree import set_kernel
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


_STORED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "next_masks")


def replay_state(buffer: ReplayBuffer) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Numbers and arrays; the arrays are views of the buffer's first rows, all there are while it is not full."""
    with _held(buffer):
        rows = _rows(buffer, buffer.pos, buffer.full)
        state: dict[str, Any] = {"pos": int(buffer.pos), "full": bool(buffer.full), "rows": rows}
        arrays = {name: array[:rows] for name, array in _arrays(buffer).items()}
        if isinstance(buffer, ReplayStorage):
            state["generation"] = buffer.generation
        if isinstance(buffer, PrioritizedReplayBuffer):
            state |= {"highest": float(buffer._highest), "beta": float(buffer.beta)}
            arrays["priorities"] = buffer.tree.nodes[: rows * buffer.n_envs]
    return state, arrays


def load_replay_state(buffer: ReplayBuffer, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Fill a fresh buffer of the same settings.

    Raises:
        ConfigError: what is given does not fit it.
    """
    pos, full, rows = int(state["pos"]), bool(state["full"]), int(state["rows"])
    if not (0 <= pos < buffer.buffer_size and rows == _rows(buffer, pos, full)):
        raise ConfigError(
            f"the checkpoint's replay buffer has {rows:,} rows (the next is {pos:,}), this run's {buffer.buffer_size:,}"
        )
    with _held(buffer):
        for name, array in _arrays(buffer).items():
            load_into(array[:rows], arrays, name)
        buffer.pos, buffer.full = pos, full
        if isinstance(buffer, ReplayStorage):
            buffer.generation = int(state["generation"])
        if isinstance(buffer, PrioritizedReplayBuffer):
            _load_priorities(buffer, state, arrays, rows * buffer.n_envs)


def _load_priorities(
    buffer: PrioritizedReplayBuffer, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], count: int
) -> None:
    tree = buffer.tree
    leaves = np.zeros(count)
    load_into(leaves, arrays, "priorities")
    tree.clear()
    if set_kernel(tree.nodes, tree.starts, tree.capacity, np.arange(count, dtype=np.int64), leaves) >= 0:
        raise ConfigError("the checkpoint's priorities are not all finite and 0 or more")
    buffer._highest, buffer.beta = float(state["highest"]), float(state["beta"])


def end_last_rows(buffer: ReplayBuffer, envs: list[int]) -> None:
    """The episodes of these envs break off here: no window of n steps may go on beyond what was stored last."""
    if not isinstance(buffer, ReplayStorage) or not buffer.size():
        return
    with buffer.lock:
        row = (buffer.pos - 1) % buffer.buffer_size
        for env in envs:
            if not buffer.dones[row, env]:
                buffer.dones[row, env] = buffer.timeouts[row, env] = 1.0


def _rows(buffer: ReplayBuffer, pos: int, full: bool) -> int:
    """Rows with something in them; without next observations the row to be written next holds those of the last."""
    return buffer.buffer_size if full else min(pos + int(buffer.optimize_memory_usage), buffer.buffer_size)


def _held(buffer: ReplayBuffer) -> Any:
    return buffer.lock if isinstance(buffer, ReplayStorage) else nullcontext()


def _arrays(buffer: Any) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name in _STORED:
        value = getattr(buffer, name, None)
        if isinstance(value, dict):
            found |= {f"{name}/{key}": part for key, part in value.items()}
        elif isinstance(value, np.ndarray):
            found[name] = value
    return found


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's global streams seeded with `seed` inside, as they were before after it."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
