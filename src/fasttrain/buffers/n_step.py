"""What a replay buffer is made of: its memory, checked before it is made, its arrays laid open, its n-step windows.

Where a window ends and what it pays; sums and powers are numpy's bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import Float32Array, Int64Array, Observations
from fasttrain.buffers.frames import Place
from fasttrain.errors import ConfigError
from fasttrain.jit import njit
from fasttrain.kernel_cache import KernelCall
from fasttrain.machine import free_memory


class FlatViews(NamedTuple):
    """The arrays of a storage without copying, time and env in one axis: transition i is row i // N of env i % N."""

    observations: Observations  # (size * N, ...)
    next_observations: Observations | None  # None where optimize_memory_usage: observations of row + 1
    actions: NDArray[Any]  # (size * N, K)
    rewards: Float32Array  # (size * N,)
    dones: Float32Array  # (size * N,)
    timeouts: Float32Array  # (size * N,)
    next_masks: NDArray[Any] | None  # (size * N, A) bool, or uint8 (size * N, ceil(A / 8)) as of np.packbits


def bytes_of_ring(sizes: Mapping[str, int], rows: int, num_envs: int) -> int:
    """Bytes of a ring of `rows` × `num_envs` transitions that have parts of these `sizes` in bytes.

    Asked before any array is made: np.zeros takes no memory until a page is written, hours later.

    Raises:
        ConfigError: more than is free; says how many transitions would fit.
    """
    each = sum(sizes.values())
    needed, free = each * rows * num_envs, free_memory()
    if needed <= free:
        return needed
    fits = int(0.9 * free) // each // num_envs * num_envs  # 0.9: what is free changes until the next try
    twice = sizes.get("next_observations", 0)
    hint = f"; optimize_memory_usage=True would save {twice:,} bytes of each" if 3 * twice > each else ""
    raise ConfigError(
        f"a replay buffer of {rows * num_envs:,} transitions of {each:,} bytes needs "
        f"{needed / 1e9:.2f} GB ({needed:,} bytes), but {free / 1e9:.2f} GB ({free:,} bytes) are free: "
        f"buffer_size={fits} would fit{hint}"
    )


MAX_N_STEPS = 128  # numpy sums blocks of 128 in the order that `_sum_as_numpy` repeats


@njit
def _sum_as_numpy(terms: Float32Array) -> np.float32:
    """Sum of up to 128 numbers in the order of numpy's pairwise sum: eight running sums from eight numbers on."""
    count = len(terms)
    total: np.float32 = np.float32(0.0)
    whole = 0
    if count >= 8:
        whole = count - count % 8
        sums = terms[:8].copy()
        for first in range(8, whole, 8):
            for k in range(8):
                sums[k] += terms[first + k]
        total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    for i in range(whole, count):
        total += terms[i]
    return total


@njit
def n_step_kernel(
    rows: Int64Array,  # (B,) where the windows begin
    envs: Int64Array,  # (B,)
    rewards: Float32Array,  # (size, N)
    dones: Float32Array,  # (size, N)
    timeouts: Float32Array,  # (size, N)
    newest: int,  # the row written last: no window goes beyond it
    powers: Float32Array,  # (n + 1,) gamma ** 0 … n, as `powers_of` has them
    last_rows: Int64Array,  # (B,) out: last row of each window
    returns: Float32Array,  # (B,) out: its discounted rewards
    discounts: Float32Array,  # (B,) out: gamma ** length
    ends: Float32Array,  # (B,) out: 1 where its last step ended the episode by the rules
) -> int:
    """Windows of up to n steps that stop at a done, at a timeout and at the newest row, as SB3's NStepReplayBuffer.

    Returns -1, or the place of a row or env that is out of range.
    """
    (size, num_envs), n_steps = rewards.shape, len(powers) - 1
    terms = np.zeros(n_steps, np.float32)
    for i in range(len(rows)):
        row, env, length = rows[i], envs[i], 0
        if not (0 <= row < size and 0 <= env < num_envs):
            return i
        while True:
            terms[length] = rewards[row, env] * powers[length]
            length += 1
            over = dones[row, env] != 0 or timeouts[row, env] != 0
            if over or row == newest or length == n_steps:
                break
            row = row + 1 if row + 1 < size else 0
        terms[length:] = 0
        returns[i] = _sum_as_numpy(terms)
        last_rows[i], discounts[i] = row, powers[length]
        ends[i] = dones[row, env] * (np.float32(1.0) - timeouts[row, env])
    return -1


def kernel_calls() -> list[KernelCall]:
    """What `windows_of` calls for more than one step: for compiling it ahead."""
    places, numbers, stored = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((1, 1), np.float32)
    outs = places, numbers, numbers, numbers
    return [KernelCall(n_step_kernel, (places, places, stored, stored, stored, 0, numbers, *outs))]


def powers_of(gamma: float, n_steps: int) -> Float32Array:
    """gamma ** 0 … n_steps, (n_steps + 1,) float32: numpy's float32 power, whose last bit is not always libm's."""
    powers: Float32Array = gamma ** np.arange(n_steps + 1, dtype=np.float32)
    return powers


def windows_of(
    rows: Int64Array,  # (B,) where the windows begin
    envs: Int64Array,  # (B,)
    rewards: Float32Array,  # (size, N)
    dones: Float32Array,  # (size, N)
    timeouts: Float32Array,  # (size, N)
    newest: int,
    powers: Float32Array,  # (n + 1,)
) -> tuple[Int64Array, Float32Array, Float32Array, Float32Array]:
    """Last row, return, discount and end (B,) of each window, as `n_step_kernel` has them.

    One step is taken in numpy: that takes as long, and no compiler has to be waited for before the first update.

    Raises:
        IndexError: a row or an env is out of range.
    """
    size, num_envs = rewards.shape
    if len(powers) == 2:
        # As unsigned numbers the negative ones are the largest.
        outside = (rows.view(np.uint64) >= size) | (envs.view(np.uint64) >= num_envs)
        wrong = int(outside.argmax()) if outside.any() else -1
        flat = (rows * num_envs + envs)[: None if wrong < 0 else 0]
        returns, over, cut = (array.reshape(-1).take(flat) for array in (rewards, dones, timeouts))
        last_rows, discounts, ends = rows, np.full(len(flat), powers[1]), over * (np.float32(1.0) - cut)
    else:
        last_rows = np.empty(len(rows), np.int64)
        returns, discounts, ends = np.empty((3, len(rows)), np.float32)
        wrong = n_step_kernel(rows, envs, rewards, dones, timeouts, newest, powers, last_rows, returns, discounts, ends)
    if wrong >= 0:
        raise IndexError(f"row {rows[wrong]} of env {envs[wrong]} is outside of {size} × {num_envs}")
    return last_rows, returns, discounts, ends


NONE = -1  # in `ReplayStorage.under_way`
Envs = Sequence[int]


def end_window(storage: Any, row: int, env: int) -> None:
    """No window of n steps goes beyond that row; what follows it is rated."""
    if not storage.dones[row, env]:
        storage.dones[row, env] = storage.timeouts[row, env] = 1.0


def leave_out(storage: Any, lost: Envs, resting: Envs, waiting: Envs) -> list[Place]:
    """What was stored last is no transition where it came of a fault (`lost`) or was no decision (`resting`): it is
    never drawn, and windows of n steps end before it. While nothing else is stored it stays.

    Args:
        storage: a `ReplayStorage`.
        waiting: envs whose next step is no decision, within an episode. What is stored until they decide again, the
            rewards, the end and the observation after it, is what their last transition led to, which is not drawn
            before; with `optimize_memory_usage` the observation stays the first one.

    Returns:
        the transitions that can be drawn from now on.
    """
    if storage.void is None:
        storage.void = np.zeros(storage.rewards.shape, np.bool_)
    void, under_way, size, none = storage.void, storage.under_way, storage.size(), [*lost, *resting]
    row, before = (storage.pos - 1) % storage.buffer_size, (storage.pos - 2) % storage.buffer_size
    void[row, [*none, *waiting]] = True
    if void[: storage.pos].all() and void[storage.pos + storage._margin() : size].all():
        void[row] = False  # else nothing could be drawn
    whole = []
    for env in none:
        if size > 1 and not void[before, env]:
            end_window(storage, before, env)
        last = int(under_way[env])
        if last != NONE and last != row and env not in lost:  # `row`: a rest as long as the ring
            _lead_on(storage, last, row, env)
            if env in waiting and not storage.dones[row, env]:
                continue
            void[last, env] = False
            whole.append((last, env))
        under_way[env] = NONE
    for env in waiting:
        if env not in none:
            under_way[env] = row
            end_window(storage, row, env)
    return whole


def _lead_on(storage: Any, last: int, row: int, env: int) -> None:
    """What `row` holds is what the transition in the row `last` led to."""
    storage.rewards[last, env] += storage.rewards[row, env]
    if storage.dones[row, env]:
        storage.timeouts[last, env] = storage.timeouts[row, env]
    for array in (*storage._stored_next.values(), *([] if storage.next_masks is None else [storage.next_masks])):
        array[last, env] = array[row, env]
    if storage.frames is not None:
        storage.frames.lead_on(env, last)
