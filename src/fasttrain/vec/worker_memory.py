"""Shared memory of a vector env: one anonymous block, and the arrays that trainer and workers see in it.

The block has no name in the file system, so that nothing is left behind however the processes end: a named segment
outlives a process group that is killed at once (Python's resource tracker dies with it).
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, Observations
from fasttrain.errors import EnvSpecError

ALIGNMENT = 64  # bytes of a cache line: two workers never write the same one in the control words
CONTROL_WORDS = 16  # int64 words per worker, two cache lines

# Meaning of a worker's control words. The trainer writes the first group, the worker the second.
REQUEST, COMMAND, BUFFER, NOTIFY = range(4)
REPLY, MAIL, STEP_NS, BUSY_NS, OPPONENTS_NS, ROW = range(8, 14)
NO_ROW = -1  # in ROW: the worker is in no env's step or reset

# How an info value travelled in `info_values`.
ABSENT, FLOAT, INT, BOOL = range(4)

Space = spaces.Space[Any]


class Arrays(NamedTuple):
    """Views into the block: of all N envs, or of the rows of one worker."""

    observations: tuple[Observations, Observations]  # steps write them in turn, so that the state before stays whole
    final_observations: Observations  # row i valid where env i ended in the last step
    actions: NDArray[Any]
    rewards: Float32Array
    terminations: BoolArray
    truncations: BoolArray
    lost: BoolArray  # the episode was cut because its env or worker failed
    action_masks: BoolArray | None
    info_values: Float64Array  # (N, K) numbers under the K info keys asked for
    info_kinds: NDArray[np.uint8]  # (N, K) ABSENT, FLOAT, INT, BOOL


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What lies where. Plain and picklable: both sides compute the same offsets from it."""

    num_envs: int
    num_workers: int
    observation_space: Space
    action_space: Space
    mask_width: int  # 0 without masks
    num_info_keys: int

    @property
    def size_bytes(self) -> int:
        return _Cursor(None).take_all(self)[2]

    def views(self, block: mmap.mmap) -> tuple[Arrays, Int64Array]:
        """The arrays of all envs and the control words (num_workers, CONTROL_WORDS)."""
        arrays, control, _ = _Cursor(block).take_all(self)
        return arrays, control


def rows_of(arrays: Arrays, first: int, stop: int) -> Arrays:
    """The same arrays, envs `first` to `stop` only."""

    def cut(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        if isinstance(value, dict):
            return {key: part[first:stop] for key, part in value.items()}
        return value[first:stop]

    return Arrays(*(cut(value) for value in arrays))


def copied(arrays: Any) -> Any:
    """A copy of an array, or of all in a tuple or dict; None stays None."""
    if isinstance(arrays, dict):
        return {key: part.copy() for key, part in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(copied(part) for part in arrays)
    return None if arrays is None else arrays.copy()


def overwrite(into: Any, values: Any) -> None:
    """The reverse: `values` of the same form into the arrays."""
    if isinstance(into, dict):
        for key, part in into.items():
            part[...] = values[key]
    elif isinstance(into, tuple):
        for part, value in zip(into, values, strict=True):
            overwrite(part, value)
    elif into is not None:
        into[...] = values


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Refuse spaces that have no fixed shape or that SB3 cannot take.

    Raises:
        EnvSpecError: a Tuple, Text, Graph, Sequence or nested Dict space.
    """
    parts = list(observation_space.spaces.values()) if isinstance(observation_space, spaces.Dict) else []
    for space in (*(parts or [observation_space]), action_space):
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise EnvSpecError(
                f"shared memory needs Box, Discrete, MultiDiscrete or MultiBinary spaces (observations also a Dict of "
                f"them), found {space}; flatten it in the env, or take a DummyVecEnv"
            )


class _Cursor:
    """Lays arrays one after another; without a block it only counts bytes."""

    def __init__(self, block: mmap.mmap | None) -> None:
        self._block = block
        self._offset = 0

    def take_all(self, layout: Layout) -> tuple[Arrays, Int64Array, int]:
        n, actions = layout.num_envs, layout.action_space
        control = self._take((layout.num_workers, CONTROL_WORDS), np.int64)
        arrays = Arrays(
            observations=(self._observations(layout), self._observations(layout)),
            final_observations=self._observations(layout),
            actions=self._take((n, *(actions.shape or ())), actions.dtype or np.dtype(np.int64)),
            rewards=self._take((n,), np.float32),
            terminations=self._take((n,), np.bool_),
            truncations=self._take((n,), np.bool_),
            lost=self._take((n,), np.bool_),
            action_masks=self._take((n, layout.mask_width), np.bool_) if layout.mask_width else None,
            info_values=self._take((n, layout.num_info_keys), np.float64),
            info_kinds=self._take((n, layout.num_info_keys), np.uint8),
        )
        return arrays, control, self._offset

    def _observations(self, layout: Layout) -> Observations:
        space, n = layout.observation_space, layout.num_envs
        if isinstance(space, spaces.Dict):
            return {key: self._take((n, *(sub.shape or ())), _dtype(sub)) for key, sub in space.spaces.items()}
        return self._take((n, *(space.shape or ())), _dtype(space))

    def _take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin = self._offset
        self._offset += -(-size // ALIGNMENT) * ALIGNMENT
        if self._block is None or size == 0:
            return np.zeros(shape if self._block else 0, dtype)
        return np.frombuffer(self._block, dtype, int(np.prod(shape)), begin).reshape(shape)


def _dtype(space: Space) -> Any:
    return space.dtype if space.dtype is not None else np.dtype(np.float32)


class SharedBlock:
    """`size_bytes` of zeroed memory that other processes can map once its handle was sent to them."""

    def __init__(self, size_bytes: int) -> None:
        size_bytes = max(size_bytes, mmap.PAGESIZE)
        self.size_bytes = size_bytes
        self._handle: int | str
        if sys.platform == "win32":
            self._handle = f"fasttrain-{uuid4().hex}"  # a kernel object: gone with its last user
            self.memory = mmap.mmap(-1, size_bytes, tagname=self._handle)
            return
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, 64 MB in a container
            self._handle = os.memfd_create("fasttrain", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._handle = os.dup(file.fileno())
        os.ftruncate(self._handle, size_bytes)
        self.memory = mmap.mmap(self._handle, size_bytes)

    def __del__(self) -> None:  # a vector env that was dropped without close()
        self.close()

    def send(self, connection: Connection) -> None:
        """Give the process at the other end what `receive_block` needs."""
        if isinstance(self._handle, str):
            connection.send((self._handle, self.size_bytes))
        else:
            connection.send((None, self.size_bytes))
            reduction.send_handle(connection, self._handle, None)

    def close(self) -> None:
        """Give the handle back. The memory lives as long as arrays look at it."""
        handle = getattr(self, "_handle", None)
        if isinstance(handle, int) and handle >= 0:
            self._handle = -1
            os.close(handle)


def receive_block(connection: Connection) -> mmap.mmap:
    """The other end of `SharedBlock.send`."""
    name, size_bytes = connection.recv()
    if sys.platform == "win32":
        return mmap.mmap(-1, size_bytes, tagname=name)
    handle = reduction.recv_handle(connection)
    try:
        memory = mmap.mmap(handle, size_bytes)
    finally:
        os.close(handle)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux: what an env forks, by whatever means, has none of it
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


class ForkGuard:
    """What becomes of a child that an env forks when it comes back into the worker that it is a copy of: it ends.

    Two processes that read the same commands and write the same slots would be wrong data. The child of a pool, or one
    that just lives on, is the env's own business; it has neither the worker's pipes (`Worker.disown`) nor its memory.
    One guard a worker; `forked` is set in every child that an env forks from it.
    """

    forked = False

    def check(self, error: BaseException | None = None) -> None:
        """Return in the worker, end in a fork of it; with the exit code of a `sys.exit` that would have ended it."""
        if self.forked:
            code = error.code if isinstance(error, SystemExit) else 1
            os._exit(code if isinstance(code, int) else int(code is not None))
