"""Replay buffers in a checkpoint, SB3's own too: the rows that were written; of a sum tree the leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer

from fasttrain.batch import inside, load_into, under
from fasttrain.buffers.n_step import NONE, end_window
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.sum_tree import set_kernel
from fasttrain.errors import ConfigError

_STORED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "next_masks")


def replay_state(buffer: ReplayBuffer) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Numbers and arrays; the arrays are views of the buffer's first rows, all there are while it is not full."""
    with _held(buffer):
        rows = _rows(buffer, buffer.pos, buffer.full)
        state: dict[str, Any] = {"pos": int(buffer.pos), "full": bool(buffer.full), "rows": rows}
        arrays = {name: array[:rows] for name, array in _arrays(buffer).items()}
        if isinstance(buffer, ReplayStorage):
            state["generation"] = buffer.generation
            if buffer.void is not None:
                arrays["void"], state["under_way"] = buffer.void[:rows], buffer.under_way.tolist()
            if buffer.frames is not None:
                arrays |= under("frames", buffer.frames.state())
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
            if "under_way" in state:
                buffer.void = np.zeros(buffer.rewards.shape, np.bool_)
                load_into(buffer.void[:rows], arrays, "void")
                buffer.under_way[:] = state["under_way"]
            if buffer.frames is not None:
                try:
                    buffer.frames.load(inside(arrays, "frames"))
                except (KeyError, ValueError) as error:
                    raise ConfigError(
                        f"the checkpoint's replay buffer has other frames than this run's: {error}"
                    ) from error
        if isinstance(buffer, PrioritizedReplayBuffer):
            tree, leaves = buffer.tree, np.zeros(rows * buffer.n_envs)
            load_into(leaves, arrays, "priorities")
            tree.clear()
            if set_kernel(tree.nodes, tree.starts, tree.capacity, np.arange(len(leaves), dtype=np.int64), leaves) >= 0:
                raise ConfigError("the checkpoint's priorities are not all finite and 0 or more")
            buffer._highest, buffer.beta = float(state["highest"]), float(state["beta"])


def end_last_rows(buffer: ReplayBuffer, envs: list[int]) -> None:
    """The episodes of these envs break off here: no window of n steps may go on beyond what was stored last."""
    if not isinstance(buffer, ReplayStorage) or not buffer.size():
        return
    with buffer.lock:
        row = (buffer.pos - 1) % buffer.buffer_size
        for env in envs:
            end_window(buffer, row, env)
            buffer.under_way[env] = NONE


def _rows(buffer: ReplayBuffer, pos: int, full: bool) -> int:
    """Rows with something in them; without next observations the row to be written next holds those of the last."""
    return buffer.buffer_size if full else min(pos + int(buffer.optimize_memory_usage), buffer.buffer_size)


def _held(buffer: ReplayBuffer) -> Any:
    return buffer.lock if isinstance(buffer, ReplayStorage) else nullcontext()


def _arrays(buffer: ReplayBuffer) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name in _STORED:
        value = getattr(buffer, name, None)
        if isinstance(value, dict):
            found |= {f"{name}/{key}": part for key, part in value.items()}
        elif isinstance(value, np.ndarray):
            found[name] = value
    return found
