"""The last rows and returns of n-step windows in a replay buffer, and the check that a buffer fits into memory.

Sums and powers equal those of numpy bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import Float32Array, Int64Array, Observations
from fasttrain.buffers.frames import Place
from fasttrain.errors import ConfigError
from fasttrain.machine import free_memory
from fasttrain_kernels.jit import njit
from fasttrain_kernels.kernel_cache import KernelCall


class FlatViews(NamedTuple):
    """Views of a storage's arrays with time and env in one axis: transition i is row i // N of env i % N."""

    observations: Observations  # (size * N, ...)
    next_observations: Observations | None  # None if optimize_memory_usage: use `observations` of row + 1
    actions: NDArray[Any]  # (size * N, K)
    rewards: Float32Array  # (size * N,)
    dones: Float32Array  # (size * N,)
    timeouts: Float32Array  # (size * N,)
    next_masks: NDArray[Any] | None  # (size * N, A) bool, or uint8 (size * N, ceil(A / 8)) from np.packbits


def bytes_of_ring(sizes: Mapping[str, int], rows: int, num_envs: int) -> int:
    """Bytes of a ring of `rows` × `num_envs` transitions. `sizes`: the bytes of each part of a transition.

    Memory is checked now, because np.zeros takes memory only when a page is written, which may be hours later.

    Raises:
        ConfigError: there is too little free memory; the message says how many transitions would fit.
    """
    each = sum(sizes.values())
    needed, free = each * rows * num_envs, free_memory()
    if needed <= free:
        return needed
    fits = int(0.9 * free) // each // num_envs * num_envs  # 0.9: at the next start less memory may be free
    twice = sizes.get("next_observations", 0)
    hint = f"; optimize_memory_usage=True would save {twice:,} bytes per transition" if 3 * twice > each else ""
    raise ConfigError(
        f"a replay buffer of {rows * num_envs:,} transitions of {each:,} bytes needs "
        f"{needed / 1e9:.2f} GB ({needed:,} bytes), but {free / 1e9:.2f} GB ({free:,} bytes) are free: "
        f"buffer_size={fits} would fit{hint}"
    )


MAX_N_STEPS = 128  # `_sum_as_numpy` has numpy's order for up to this number of terms


@njit
def _sum_as_numpy(terms: Float32Array) -> np.float32:
    """The sum of up to 128 numbers in numpy's order: with eight running sums, if there are at least eight numbers."""
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
    rows: Int64Array,  # (B,) first row of each window
    envs: Int64Array,  # (B,)
    rewards: Float32Array,  # (size, N)
    dones: Float32Array,  # (size, N)
    timeouts: Float32Array,  # (size, N)
    newest: int,  # the row written last; every window ends here at the latest
    powers: Float32Array,  # (n + 1,) gamma ** 0 … n, from `powers_of`
    last_rows: Int64Array,  # (B,) out: last row of each window
    returns: Float32Array,  # (B,) out: discounted sum of the window's rewards
    discounts: Float32Array,  # (B,) out: gamma ** length
    ends: Float32Array,  # (B,) out: 1 where the last step terminated the episode (not truncated)
) -> int:
    """Windows of up to n steps, which end at a done, a timeout or the newest row, as in SB3's NStepReplayBuffer.

    Returns -1, or the index of a row or env that is out of range.
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
    """The kernel that `windows_of` calls for more than one step."""
    places, numbers, stored = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((1, 1), np.float32)
    outs = places, numbers, numbers, numbers
    return [KernelCall(n_step_kernel, (places, places, stored, stored, stored, 0, numbers, *outs))]


def powers_of(gamma: float, n_steps: int) -> Float32Array:
    """gamma ** 0 … n_steps, (n_steps + 1,) float32. numpy computes it; libm's last bit can differ."""
    powers: Float32Array = gamma ** np.arange(n_steps + 1, dtype=np.float32)
    return powers


def windows_of(
    rows: Int64Array, envs: Int64Array, rewards: Float32Array, dones: Float32Array, timeouts: Float32Array, newest: int,
    powers: Float32Array,
) -> tuple[Int64Array, Float32Array, Float32Array, Float32Array]:  # fmt: skip
    """Last row, return, discount and done flag (B,) of each window; arguments as in `n_step_kernel`.

    For windows of one step numpy is as fast as the kernel, so the first update waits for no compilation.

    Raises:
        IndexError: a row or an env is out of range.
    """
    size, num_envs = rewards.shape
    if len(powers) == 2:
        # Negative indices are very large when they are read as unsigned numbers.
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


NONE = -1  # "no row" in `ReplayStorage.under_way`
Envs = Sequence[int]


def end_window(storage: Any, row: int, env: int) -> None:
    """End the windows of n steps at this row, as if truncated: they bootstrap from the row's next observation."""
    if not storage.dones[row, env]:
        storage.dones[row, env] = storage.timeouts[row, env] = 1.0


def leave_out(storage: Any, lost: Envs, resting: Envs, waiting: Envs) -> list[Place]:
    """Mark the newest row as no transition of some envs: after a fault (`lost`), or without an action (`resting`).

    Such rows are never drawn, unless nothing else is stored. Windows of n steps end before these rows.

    Args:
        storage: a `ReplayStorage`.
        waiting: envs that do not act in the next step, within an episode. Their last transition is not drawn until
            they act again. Then the rewards, the end and the last observation of the steps without action are added
            to this transition (the observation not with `optimize_memory_usage`).

    Returns:
        the transitions that can be drawn from now on.
    """
    if storage.void is None:
        storage.void = np.zeros(storage.rewards.shape, np.bool_)
    void, under_way, size, left_out = storage.void, storage.under_way, storage.size(), [*lost, *resting]
    row, before = (storage.pos - 1) % storage.buffer_size, (storage.pos - 2) % storage.buffer_size
    void[row, [*left_out, *waiting]] = True
    if void[: storage.pos].all() and void[storage.pos + storage._margin() : size].all():
        void[row] = False  # all rows are void: these may be drawn
    complete = []
    for env in left_out:
        if size > 1 and not void[before, env]:
            end_window(storage, before, env)
        last = int(under_way[env])
        if (
            last != NONE and last != row and env not in lost
        ):  # last == row: the env did not act while the whole ring was overwritten
            _extend(storage, last, row, env)
            if env in waiting and not storage.dones[row, env]:
                continue
            void[last, env] = False
            complete.append((last, env))
        under_way[env] = NONE
    for env in waiting:
        if env not in left_out:
            under_way[env] = row
            end_window(storage, row, env)
    return complete


def _extend(storage: Any, last: int, row: int, env: int) -> None:
    """Give the transition in the row `last` the reward, the end and the next observation that are stored in `row`."""
    storage.rewards[last, env] += storage.rewards[row, env]
    if storage.dones[row, env]:
        storage.timeouts[last, env] = storage.timeouts[row, env]
    for array in (*storage._stored_next.values(), *([] if storage.next_masks is None else [storage.next_masks])):
        array[last, env] = array[row, env]
    if storage.frames is not None:
        storage.frames.extend(env, last)
