"""Shared memory of a vector env: one anonymous block of memory, and the arrays of trainer and workers in it.

The block has no name in the file system, so the operating system frees it however the processes end. A named segment
would remain when the whole process group is killed, because Python's resource tracker is killed too.
"""

from __future__ import annotations

import math
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
from numpy.typing import DTypeLike, NDArray

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, Observations
from fasttrain.errors import EnvSpecError

ALIGNMENT = 64  # bytes of a cache line: no two workers write control words in the same line
CONTROL_WORDS = 16  # int64 words per worker, two cache lines

# A worker's control words. The trainer writes the words of the first cache line, the worker the rest.
REQUEST, COMMAND, BUFFER, NOTIFY = range(4)
REPLY, MAIL, STEP_NS, BUSY_NS, OPPONENTS_NS, ROW = range(8, 14)
NO_ROW = -1  # in ROW: no env of the worker is in its step or reset

# Values of `info_kinds`: the type of the value in `info_values`.
ABSENT, FLOAT, INT, BOOL = range(4)

Space = spaces.Space[Any]


class Arrays(NamedTuple):
    """Views into the block: of all N envs, or of the rows of one worker."""

    observations: tuple[Observations, Observations]  # steps fill them in turn: one has the state before a step
    final_observations: Observations  # row i is valid if env i ended in the last step
    actions: NDArray[Any]
    rewards: Float32Array
    terminations: BoolArray
    truncations: BoolArray
    lost: BoolArray  # the episode ended because its env or worker failed
    tasks: Int64Array  # number of the next episode's task, which the trainer writes; 0: none
    opponents_turn: BoolArray  # only for games with engines: True where the opponent decides next
    action_masks: BoolArray | None
    info_values: Float64Array  # (N, K) numbers under the K info keys
    info_kinds: NDArray[np.uint8]  # (N, K) ABSENT, FLOAT, INT, BOOL


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes from which trainer and workers compute the same offsets of all arrays in the block."""

    num_envs: int
    num_workers: int
    observation_space: Space
    action_space: Space
    mask_width: int  # 0 without masks
    num_info_keys: int
    reward_dtype: str = "float32"  # SB3's; Gymnasium's is float64

    @property
    def size_bytes(self) -> int:
        return self._arrange(None)[2]

    def views(self, block: mmap.mmap) -> tuple[Arrays, Int64Array]:
        """The arrays of all envs, and the control words (num_workers, CONTROL_WORDS)."""
        arrays, control, _ = self._arrange(block)
        return arrays, control

    def _arrange(self, block: mmap.mmap | None) -> tuple[Arrays, Int64Array, int]:
        """The arrays, laid out one after another in `block`, the control words, the size in bytes. If `block` is None,
        only the size is valid."""
        n, end = self.num_envs, 0

        def take(*shape: int, dtype: DTypeLike) -> NDArray[Any]:
            nonlocal end
            begin, count = end, math.prod(shape)
            size = count * np.dtype(dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
            if block is None or size == 0:
                return np.zeros(shape if block else 0, dtype)
            return np.frombuffer(block, dtype, count, begin).reshape(shape)

        def values_of(space: Space) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: values_of(part) for key, part in space.spaces.items()}
            return take(n, *(space.shape or ()), dtype=np.float32 if space.dtype is None else space.dtype)

        control = take(self.num_workers, CONTROL_WORDS, dtype=np.int64)
        arrays = Arrays(
            observations=(values_of(self.observation_space), values_of(self.observation_space)),
            final_observations=values_of(self.observation_space),
            actions=values_of(self.action_space),
            rewards=take(n, dtype=self.reward_dtype),
            terminations=take(n, dtype=np.bool_),
            truncations=take(n, dtype=np.bool_),
            lost=take(n, dtype=np.bool_),
            tasks=take(n, dtype=np.int64),
            opponents_turn=take(n, dtype=np.bool_),
            action_masks=take(n, self.mask_width, dtype=np.bool_) if self.mask_width else None,
            info_values=take(n, self.num_info_keys, dtype=np.float64),
            info_kinds=take(n, self.num_info_keys, dtype=np.uint8),
        )
        return arrays, control, end


def check_spaces(observation_space: Space, action_space: Space) -> None:
    """Raises EnvSpecError if a space has no fixed shape, or SB3 does not support the space."""
    parts = list(observation_space.spaces.values()) if isinstance(observation_space, spaces.Dict) else []
    for space in (*(parts or [observation_space]), action_space):
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise EnvSpecError(
                f"shared memory needs Box, Discrete, MultiDiscrete or MultiBinary spaces (observations also a Dict of "
                f"them), found {space}; flatten it in the env, or step it in one process (DummyVecEnv)"
            )


class SharedBlock:
    """`size_bytes` of zeroed memory, which other processes can map after `send`."""

    def __init__(self, size_bytes: int) -> None:
        size_bytes = max(size_bytes, mmap.PAGESIZE)
        self.size_bytes = size_bytes
        self._handle: int | str
        if sys.platform == "win32":
            self._handle = f"fasttrain-{uuid4().hex}"  # name of a Windows file mapping
            self.memory = mmap.mmap(-1, size_bytes, tagname=self._handle)
            return
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, which is 64 MB in a container
            self._handle = os.memfd_create("fasttrain", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._handle = os.dup(file.fileno())
        os.ftruncate(self._handle, size_bytes)
        self.memory = mmap.mmap(self._handle, size_bytes)

    def __del__(self) -> None:  # called if a vector env was deleted without close()
        self.close()

    def send(self, connection: Connection) -> None:
        """Send the block to the process at the other end, which calls `receive_block`."""
        if isinstance(self._handle, str):
            connection.send((self._handle, self.size_bytes))
        else:
            connection.send((None, self.size_bytes))
            reduction.send_handle(connection, self._handle, None)

    def close(self) -> None:
        """Close the handle. The memory lives as long as arrays refer to it."""
        handle = getattr(self, "_handle", None)
        if isinstance(handle, int) and handle >= 0:
            self._handle = -1
            os.close(handle)


def receive_block(connection: Connection) -> mmap.mmap:
    """Map the block that the other process sends by `SharedBlock.send`."""
    name, size_bytes = connection.recv()
    if sys.platform == "win32":
        return mmap.mmap(-1, size_bytes, tagname=name)
    handle = reduction.recv_handle(connection)
    try:
        memory = mmap.mmap(handle, size_bytes)
    finally:
        os.close(handle)
    if hasattr(mmap, "MADV_DONTFORK"):  # on Linux: processes that an env forks do not get this memory
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


class ForkGuard:
    """Ends a child process that an env has forked, if the child leaves the env's code and would run the worker's code.

    Otherwise two processes would read the same commands and write the same slots. A child that stays inside the env's
    code may live on, for example in a process pool. `Worker.release_pipes` sets `forked` in every child.
    """

    forked = False

    def check(self, error: BaseException | None = None) -> None:
        """End a forked child, with the exit code of `error` if that is a SystemExit. Return in the worker itself."""
        if self.forked:
            code = error.code if isinstance(error, SystemExit) else 1
            os._exit(code if isinstance(code, int) else int(code is not None))
