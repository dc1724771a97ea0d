"""The samplers of replay batches: `Direct` draws when an update asks, `Prefetching` draws one update ahead in a thread.

Both give either single batches (tensors on the buffer's device) or a `Block` of indices for kernels. Kernels gather the
transitions themselves. A block drawn ahead has copies of the transitions, so that new rows can be stored meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from fasttrain.batch import Float32Array, Int64Array, QBatches, each_array, flat_rows
from fasttrain.buffers.hindsight import HindsightStorage
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.errors import FastTrainError


class Block(NamedTuple):
    """U batches of B transitions from one draw, with the arguments for `update_priorities`."""

    batches: QBatches
    indices: Int64Array | None = None  # (U * B,) with prioritized replay, else None
    generation: int | None = None  # rows written so far when the block was drawn

    def copied(self) -> Block:
        """This block with copies of the U * B drawn transitions. The caller must hold the buffer's lock."""
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
    """`gradient_steps` batches in one draw, as indices. Transitions with Dict observations are copied.

    Prioritized batches are drawn with the present priorities. Raises ValueError: nothing is stored yet.
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
    following: Any = views.next_observations
    next_rows = last_rows * width + envs
    masks = storage.masks_of(next_rows)
    if following is None:
        next_rows, following = (last_rows + 1) % storage.buffer_size * width + envs, views.observations
    seen: Any = views.observations
    rows, actions = rows * width + envs, views.actions
    if isinstance(seen, dict) and isinstance(following, dict):  # copy the drawn rows of each key
        if isinstance(storage, HindsightStorage):
            virtual = np.tile(storage.virtual(batch_size), gradient_steps)
            seen, following, returns, masks = storage.relabelled(*np.divmod(rows, width), virtual, rng)
        else:
            seen = {key: part.take(rows, axis=0) for key, part in seen.items()}
            following = {key: part.take(next_rows, axis=0) for key, part in following.items()}
        seen, following = flat_rows(seen), flat_rows(following)
        actions = actions.take(rows, axis=0)
        rows = next_rows = np.arange(len(rows))
    batches = QBatches(
        observations=seen.reshape(len(seen), -1),
        next_observations=following.reshape(len(following), -1),
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
    """Draws batches when an update asks for them, from numpy's global random stream, as SB3 does."""

    def batches(
        self, storage: ReplayStorage, gradient_steps: int, batch_size: int, env: VecNormalize | None = None
    ) -> Iterator[ReplayBatch]:
        """`gradient_steps` batches. Each is drawn after the previous update, with the new priorities."""
        for _ in range(gradient_steps):
            batch = storage.sample(batch_size, env)  # a user's buffer class may return SB3's type of batch
            yield batch if isinstance(batch, ReplayBatch) else ReplayBatch(*batch)

    def block(self, storage: ReplayStorage, gradient_steps: int, batch_size: int) -> Block:
        """All batches in one draw, as indices that are valid until the next `put`."""
        return draw_block(storage, gradient_steps, batch_size)

    def close(self) -> None:
        """End the sampler's thread, if it has one. The next request starts a new thread."""


class Replay(NamedTuple):
    """A replay buffer and its sampler. Updates on PyTorch use `batches`, updates by kernels use `block`."""

    storage: ReplayStorage
    sampler: Direct
    normalizer: VecNormalize | None = None

    def batches(self, count: int, batch_size: int) -> Iterator[ReplayBatch]:
        """`count` batches, one after the other."""
        return self.sampler.batches(self.storage, count, batch_size, self.normalizer)

    def block(self, count: int, batch_size: int) -> Block:
        """`count` batches in one draw."""
        return self.sampler.block(self.storage, count, batch_size)

    def rate(self, indices: Any, errors: NDArray[Any], generation: Any, guarded: bool) -> None:
        """Set priorities from TD errors (M,). `indices`: their slots; `generation`: rows written before the draw.

        If an error is not finite, ValueError is raised; with `guarded` its slot keeps the old priority instead.
        """
        storage: Any = self.storage
        good = np.isfinite(errors) | (not guarded)
        if not good.all():
            indices, errors = np.asarray(indices)[good], errors[good]
            generation = generation[good] if np.ndim(generation) else generation
        storage.update_priorities(indices, errors, generation)


class _Request(NamedTuple):
    """What the thread draws. When the request changes, blocks drawn for the old request are dropped."""

    storage: ReplayStorage
    gradient_steps: int
    batch_size: int
    flat: bool


class _Drawn(NamedTuple):
    """A drawn block, or the error that drawing raised."""

    generation: int  # rows written to the buffer before the draw
    block: Any  # Block or list[ReplayBatch]
    error: BaseException | None = None


class Prefetching(Direct):
    """Draws the blocks of the next updates in a daemon thread, while the trainer acts, steps envs and updates.

    A block is drawn as soon as the previous block was taken. With `depth` 1 it lacks the transitions collected since
    the last update (one vector step if `train_freq` is 1) and the priorities set by that update. The thread has its own
    random generator, so that exploration is not affected. Timing decides which rows are stored before a draw. So two
    runs with the same seed differ. The thread also copies the batches to the device.

    The thread is not used with `VecNormalize`, whose statistics change while the envs step, and not for a buffer whose
    class overrides `sample` or `_get_samples`.

    Args:
        seed: seed of the model; None: a random one.
        depth: maximum number of blocks drawn ahead.
        bound_s: seconds that a request waits before it raises an error.

    Attributes:
        hits: requests whose block was ready.
        waits: requests that had to wait, including the first request.
        wait_ns: total time of these waits.
    """

    def __init__(self, seed: int | None = None, depth: int = 1, bound_s: float = 120.0) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1: it is the number of blocks drawn ahead")
        self.seed, self.depth, self.bound_s = seed, depth, bound_s
        self.hits = self.waits = self.wait_ns = 0
        # Envs and spaces are seeded with `seed` alone; `spawn_key` gives this generator a different random stream.
        self._rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        self._changed = threading.Condition()  # guards the attributes below
        self._request: _Request | None = None
        self._ready: deque[_Drawn] = deque()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Callable[..., Prefetching], tuple[Any, ...]]:
        """A copy has the same settings and no thread."""
        return type(self), (self.seed, self.depth, self.bound_s)

    def batches(
        self, storage: ReplayStorage, gradient_steps: int, batch_size: int, env: VecNormalize | None = None
    ) -> Iterator[ReplayBatch]:
        """Like `Direct.batches`, drawn ahead. Raises errors of the thread, or FastTrainError after `bound_s`."""
        if env is not None or _samples_itself(storage):
            yield from super().batches(storage, gradient_steps, batch_size, env)
        else:
            yield from self._take(_Request(storage, gradient_steps, batch_size, flat=False))

    def block(self, storage: ReplayStorage, gradient_steps: int, batch_size: int) -> Block:
        """Like `Direct.block`, with copies of the transitions.

        Raises:
            any error that was raised in the thread, with the traceback.
            FastTrainError: no block was drawn within `bound_s`.
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
        """Whether a block is ready. Drops blocks that were drawn before the buffer was reset."""
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
            # The lock is taken for each batch, so that the trainer's `put` waits for at most one batch.
            batches = [storage.sample(batch_size, None, self._rng, "cpu") for _ in range(gradient_steps)]
            if storage.device.type != "cpu":  # the lock is not held here, because the copy waits for the device
                to = storage.device
                batches = [each_array(lambda part: part.to(to) if isinstance(part, Tensor) else part, batch)
                           for batch in batches]  # fmt: skip
            return _Drawn(generation, batches)
        except BaseException as error:  # the trainer raises it at its next request
            return _Drawn(generation, None, error=error)


def _samples_itself(storage: ReplayStorage) -> bool:
    sample, get = (getattr(method, "__func__", None) for method in (storage.sample, storage._get_samples))
    return sample not in (ReplayStorage.sample, PrioritizedReplayBuffer.sample) or get is not ReplayStorage._get_samples
