"""Where an update's batches come from: drawn when they are asked for, or one update ahead in a thread.

Both samplers answer two requests: single batches (tensors on the buffer's device) and a block of indices for kernels
that gather for themselves. A block drawn ahead is a copy, so that the ring may be written meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from fasttrain.batch import Float32Array, Int64Array, QBatches, each_array, joined
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.errors import FastTrainError


class Block(NamedTuple):
    """U batches of B transitions from one draw, and what prioritized replay is told of them afterwards."""

    batches: QBatches
    indices: Int64Array | None = None  # (U * B,) for `update_priorities`
    generation: int | None = None  # rows written when this was drawn

    def copied(self) -> Block:
        """The same block with the drawn transitions alone, in order: M = L = U * B. To be made under the lock."""
        batches = self.batches
        order, rows = np.arange(batches.rows.size).reshape(batches.rows.shape), batches.rows.reshape(-1)
        copies = batches._replace(
            observations=batches.observations.take(rows, axis=0),
            next_observations=batches.next_observations.take(batches.next_rows.reshape(-1), axis=0),
            actions=batches.actions.take(rows, axis=0),
            rows=order,
            next_rows=order,
        )
        return self._replace(batches=copies)


def draw_block(
    storage: ReplayStorage, gradient_steps: int, batch_size: int, rng: np.random.Generator | None = None
) -> Block:
    """`gradient_steps` batches in one draw; nothing is copied, except of Dict observations what was drawn.

    Prioritized batches are drawn with the priorities of this moment. Raises ValueError: nothing is stored yet.
    """
    shape, width, indices, generation = (gradient_steps, batch_size), storage.n_envs, None, None
    discounted = storage.n_steps > 1 or isinstance(storage, NStepReplayBuffer)
    none: Float32Array = np.zeros((0, 0), np.float32)
    weights = none
    if isinstance(storage, PrioritizedReplayBuffer):
        indices, each_weight, generation = storage.draw_weighted(batch_size, gradient_steps, rng)
        rows, envs = np.divmod(indices, width)
        weights = each_weight.reshape(shape)
    else:
        rows, envs = storage.draw(gradient_steps * batch_size, rng)
    last_rows, returns, discounts, ends = storage.windows(rows, envs)
    views = storage.flat_views()
    next_rows, following = last_rows * width + envs, views.next_observations
    masks = storage.masks_of(next_rows)
    if following is None:
        next_rows, following = (last_rows + 1) % storage.buffer_size * width + envs, views.observations
    rows, seen, actions = rows * width + envs, views.observations, views.actions
    if isinstance(seen, dict) and isinstance(following, dict):  # their parts side by side, of what was drawn alone
        seen = joined({key: part.take(rows, axis=0) for key, part in seen.items()})
        following = joined({key: part.take(next_rows, axis=0) for key, part in following.items()})
        actions = actions.take(rows, axis=0)
        rows = next_rows = np.arange(len(rows))
    batches = QBatches(
        observations=_rows_of(seen),
        next_observations=_rows_of(following),
        actions=actions,
        rows=rows.reshape(shape),
        next_rows=next_rows.reshape(shape),
        rewards=returns.reshape(shape),
        discounts=discounts.reshape(shape) if discounted else none,
        dones=ends.reshape(shape),
        next_masks=np.zeros((0, 0, 0), np.bool_) if masks is None else masks.reshape(*shape, -1),
        weights=weights,
    )
    return Block(batches, indices, generation)


class Direct:
    """Hands an update its batches, drawn at the moment of the request, from numpy's global stream, as SB3."""

    def batches(
        self, storage: ReplayStorage, gradient_steps: int, batch_size: int, env: VecNormalize | None = None
    ) -> Iterator[ReplayBatch]:
        """`gradient_steps` batches of `batch_size`, one after the other."""
        for _ in range(gradient_steps):  # lazily: each sees the priorities that the update before it has set
            batch = storage.sample(batch_size, env)  # of a subclass of the user's perhaps SB3's samples
            yield batch if isinstance(batch, ReplayBatch) else ReplayBatch(*batch)

    def block(self, storage: ReplayStorage, gradient_steps: int, batch_size: int) -> Block:
        """All of them at once, as rows; good until the next `put`."""
        return draw_block(storage, gradient_steps, batch_size)

    def close(self) -> None:
        """End what runs in the background, here nothing; the next request starts again."""


class Replay(NamedTuple):
    """A replay buffer as an engine asks for it: PyTorch draws and rates batch by batch, as stock; kernels take a block
    and rate it at the end."""

    storage: ReplayStorage
    sampler: Direct
    normalizer: VecNormalize | None = None

    def batches(self, count: int, batch_size: int) -> Iterator[ReplayBatch]:
        """`count` batches, one after the other."""
        return self.sampler.batches(self.storage, count, batch_size, self.normalizer)

    def block(self, count: int, batch_size: int) -> Block:
        """All of them at once."""
        return self.sampler.block(self.storage, count, batch_size)

    def rate(self, indices: Any, errors: NDArray[Any], generation: Any, guarded: bool) -> None:
        """New priorities of prioritized replay, by the TD errors (M,) of the transitions at `indices`.

        Guarded, transitions whose error is not finite keep theirs; else it is an error.
        """
        storage: Any = self.storage
        good = np.isfinite(errors) if guarded else np.ones(1, np.bool_)
        if good.all():
            storage.update_priorities(indices, errors, generation)
            return
        per_row = isinstance(generation, np.ndarray) and len(generation) == len(good)
        storage.update_priorities(np.asarray(indices)[good], errors[good], generation[good] if per_row else generation)


class _Request(NamedTuple):
    """What the thread draws; another buffer or another size is another request, and makes finished blocks stale."""

    storage: ReplayStorage
    gradient_steps: int
    batch_size: int
    flat: bool


class _Drawn(NamedTuple):
    """A finished block, or the error in its place."""

    generation: int  # of the buffer, when it was drawn
    block: Any  # Block or list[ReplayBatch]
    error: BaseException | None = None


class Prefetching(Direct):
    """Draws the blocks of the next updates in a daemon thread, while the trainer acts, steps and updates.

    A block is drawn as soon as the one before it was taken: with `depth` 1 it lacks the transitions collected since
    the last update (one vector step where `train_freq` is 1) and the priorities of that update. The numbers are those
    of a generator of its own, so exploration's stream is untouched; which rows a draw sees depends on timing, so the
    same seed does not give the same run. The thread copies the batches to the device.

    With `VecNormalize` batches are drawn directly: its statistics change while the envs step. So are those of a buffer
    that samples in a way of its own, which need not know of threads.

    Args:
        seed: of the model; None for any.
        depth: blocks ahead at most.
        bound_s: a request that waits longer is an error.

    Attributes:
        hits: requests whose block was ready.
        waits: requests that had to wait, the first among them.
        wait_ns: for how long, all together.
    """

    def __init__(self, seed: int | None = None, depth: int = 1, bound_s: float = 120.0) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1: the blocks drawn ahead")
        self.seed, self.depth, self.bound_s = seed, depth, bound_s
        self.hits = self.waits = self.wait_ns = 0
        # A key of its own: envs and spaces are seeded with `seed` itself and would draw the very same numbers.
        self._rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        self._changed = threading.Condition()  # guards all below
        self._request: _Request | None = None
        self._ready: deque[_Drawn] = deque()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Callable[..., Prefetching], tuple[Any, ...]]:
        """A copy has the settings and begins without a thread."""
        return type(self), (self.seed, self.depth, self.bound_s)

    def batches(
        self, storage: ReplayStorage, gradient_steps: int, batch_size: int, env: VecNormalize | None = None
    ) -> Iterator[ReplayBatch]:
        """As `Direct.batches`. Raises as `block`."""
        if env is not None or _samples_itself(storage):
            yield from super().batches(storage, gradient_steps, batch_size, env)
        else:
            yield from self._take(_Request(storage, gradient_steps, batch_size, flat=False))

    def block(self, storage: ReplayStorage, gradient_steps: int, batch_size: int) -> Block:
        """As `Direct.block`, copied.

        Raises:
            whatever drawing raised in the thread, with the traceback from there.
            FastTrainError: no block within `bound_s`.
        """
        block: Block = self._take(_Request(storage, gradient_steps, batch_size, flat=True))
        return block

    def close(self) -> None:
        with self._changed:
            thread, self._thread, self._request = self._thread, None, None
            self._ready.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(self.bound_s)

    def _take(self, request: _Request) -> Any:
        with self._changed:
            if request != self._request:
                self._request = request
                self._ready.clear()
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fasttrain-prefetch", daemon=True)
                self._thread.start()
            if self._has_fresh(request.storage):
                self.hits += 1
            else:
                self._wait(request.storage)
            drawn = self._ready.popleft()
            self._changed.notify_all()
        if drawn.error is not None:
            raise drawn.error
        return drawn.block

    def _wait(self, storage: ReplayStorage) -> None:
        begun = time.perf_counter_ns()
        in_time = self._changed.wait_for(lambda: self._has_fresh(storage), self.bound_s)
        self.waits += 1
        self.wait_ns += time.perf_counter_ns() - begun
        if not in_time:
            raise FastTrainError(
                f"no replay batch was drawn within {self.bound_s:g} s: another thread holds the buffer's lock, or the "
                "machine is overloaded; prefetch=off draws without a thread"
            )

    def _has_fresh(self, storage: ReplayStorage) -> bool:
        """Drops blocks, and errors, of which the buffer holds nothing any more: it was reset."""
        while self._ready and storage.generation - self._ready[0].generation > storage.buffer_size:
            self._ready.popleft()
            self._changed.notify_all()
        return bool(self._ready)

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is not own or len(self._ready) < self.depth)
                request = self._request
                if self._thread is not own or request is None:
                    return
            drawn = self._draw(request)
            with self._changed:
                if self._thread is own and request == self._request:
                    self._ready.append(drawn)
                    self._changed.notify_all()

    def _draw(self, request: _Request) -> _Drawn:
        storage, gradient_steps, batch_size, flat = request
        generation = storage.generation
        try:
            if flat:
                with storage.lock:
                    return _Drawn(generation, draw_block(storage, gradient_steps, batch_size, self._rng).copied())
            # The lock is held for one batch at a time, so that the trainer's `put` never waits for all.
            batches = [storage.sample(batch_size, None, self._rng, "cpu") for _ in range(gradient_steps)]
            if storage.device.type != "cpu":  # copied without the lock: a copy waits for what the device has to do
                batches = [each_array(lambda part: _on(storage.device, part), batch) for batch in batches]
            return _Drawn(generation, batches)
        except BaseException as error:  # reaches the trainer with its next request
            return _Drawn(generation, None, error=error)


def _samples_itself(storage: ReplayStorage) -> bool:
    sample, get = (getattr(method, "__func__", None) for method in (storage.sample, storage._get_samples))
    return sample not in (ReplayStorage.sample, PrioritizedReplayBuffer.sample) or get is not ReplayStorage._get_samples


def _rows_of(observations: Any) -> NDArray[Any]:  # (M, O), without copying
    rows: NDArray[Any] = observations.reshape(len(observations), -1)
    return rows


def _on(device: torch.device, part: Any) -> Any:
    return part.to(device) if isinstance(part, Tensor) else part
