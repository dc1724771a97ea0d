"""PrioritizedReplayBuffer: transitions are drawn in proportion to their last temporal difference errors.

Proportional prioritization of Schaul et al. 2016 (arXiv 1511.05952, sections 3.3 and 3.4). Stock SB3 accepts this class
as `replay_buffer_class`, but never updates priorities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.batch import Float32Array, Float64Array, Int64Array
from fasttrain.buffers.frames import Place
from fasttrain.buffers.n_step import Envs
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.sum_tree import SumTree, find_kernel, refresh, set_kernel
from fasttrain.errors import ConfigError
from fasttrain_kernels.jit import njit
from fasttrain_kernels.kernel_cache import KernelCall

LEAST, MOST = 1e-150, 1e150  # limits of a priority: 0 marks empty slots, and the total must be finite


class PrioritizedDraw(NamedTuple):
    """K batches of B drawn transitions, with importance weights."""

    indices: Int64Array  # (K * B,) row * num_envs + env, as in `FlatViews`
    weights: Float32Array  # (K * B,) importance weights; the largest in each batch is 1
    generation: int  # rows written before the draw


@njit
def draw_kernel(
    nodes: Float64Array,
    starts: Int64Array,
    shares: Float64Array,  # (K * B,) uniform in [0, 1)
    batch_size: int,
    beta: float,
    indices: Int64Array,  # (K * B,) out
    weights: Float32Array,  # (K * B,) out
) -> None:
    """Stratified draws: the total priority has B equal parts, and transition i of a batch is drawn from part i.

    The weight (N P(i))^-β ÷ the largest weight of the batch is (p_smallest / p(i))^β, because N and the total cancel.
    """
    part = nodes[-1] / batch_size
    rest = np.empty(len(shares), np.float64)
    for i in range(len(shares)):
        rest[i] = (i % batch_size + shares[i]) * part
    find_kernel(nodes, starts, rest, indices)
    for first in range(0, len(shares), batch_size):
        smallest = np.inf
        for i in range(first, first + batch_size):
            smallest = min(smallest, nodes[indices[i]])
        for i in range(first, first + batch_size):
            weights[i] = (smallest / nodes[indices[i]]) ** beta


@njit
def update_kernel(
    nodes: Float64Array,
    starts: Int64Array,
    shape: tuple[int, int],  # (size, N) of the ring
    indices: Int64Array,  # (B,)
    errors: Float64Array,  # (B,) TD errors
    drawn_at: Int64Array,  # (B,) or (1,): number of rows written before the draw
    now: int,  # rows written so far
    margin: int,  # invalid rows after the newest row: 1 if optimize_memory_usage, else 0
    alpha: float,
    eps: float,
) -> tuple[int, int, float]:
    """Write (|error| + eps)^alpha into the leaves of slots that were not overwritten since the draw; update the sums.

    Rows are written in order: `now - drawn_at` rows were overwritten since the draw, from row drawn_at % size on.

    Returns:
        the index of an invalid entry of the batch (then nothing is written) or -1; the number of written leaves; the
        largest written leaf.
    """
    size, num_envs = shape
    leaves, places, count = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64), 0
    for i in range(len(indices)):
        index = indices[i]
        if not (0 <= index < size * num_envs and np.isfinite(errors[i])):
            return i, 0, 0.0
        at = drawn_at[i if len(drawn_at) > 1 else 0]
        if (index // num_envs - at) % size < now - at + margin:
            continue
        if nodes[index] == 0.0:
            return i, 0, 0.0
        leaves[count], places[count] = index, i
        count += 1
    highest = 0.0
    for i in range(count):
        priority = (abs(errors[places[i]]) + eps) ** alpha
        nodes[leaves[i]] = min(max(priority, LEAST), MOST)
        highest = max(highest, nodes[leaves[i]])
    refresh(nodes, starts, leaves[:count])
    return -1, count, highest


def kernel_calls() -> list[KernelCall]:
    """The kernels that a `PrioritizedReplayBuffer` calls."""
    tree, places, numbers = SumTree(1), np.zeros(0, np.int64), np.zeros(0)
    own = tree.nodes, tree.starts
    return [
        KernelCall(update_kernel, (*own, (1, 1), places, numbers, places, 0, 0, 0.6, 1e-6)),
        KernelCall(draw_kernel, (*own, numbers, 1, 0.4, places, np.zeros(0, np.float32))),
        KernelCall(set_kernel, (*own, 1, places, numbers)),
    ]


class PrioritizedReplayBuffer(ReplayStorage):
    """A `ReplayStorage` that draws transition i in proportion to p(i)^alpha, with p(i) = |TD error| + eps.

    A new transition gets the highest priority so far, so that it is drawn soon. Any thread may call `add`, `sample` and
    `update_priorities`; each of these methods holds `lock`.

    Args:
        alpha: 0 draws uniformly, 1 in full proportion to the TD error.
        beta: exponent of the importance weights at the start of training: 0 corrects no bias, 1 all of it.
        beta_final: `beta` at the end of training; see `anneal`.
        eps: added to every |TD error|, so that no transition has probability 0.
        *arguments, **options: arguments of `ReplayStorage`.

    Attributes:
        beta: the exponent for the next draw; may be set at any time.
        generation: rows written so far; see `ReplayStorage`.

    Raises:
        ConfigError: alpha < 0, a beta outside 0 … 1, eps ≤ 0, or wrong arguments of `ReplayStorage`.
    """

    overhead_bytes = 10  # the sum tree: 8 bytes per leaf and 8/7 bytes for the sums, rounded up

    def __init__(
        self,
        *arguments: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_final: float = 1.0,
        eps: float = 1e-6,
        **options: Any,
    ) -> None:
        if not 0.0 <= alpha < np.inf:
            raise ConfigError(f"alpha={alpha} must be 0 (uniform) or more; the paper uses 0.6")
        if not (0.0 <= beta <= 1.0 and 0.0 <= beta_final <= 1.0):
            raise ConfigError(f"beta={beta} and beta_final={beta_final} must be from 0 to 1; in the paper 0.4 and 1.0")
        if not 0.0 < eps < np.inf:
            raise ConfigError(f"eps={eps} must be above 0: a transition of priority 0 would never be drawn again")
        super().__init__(*arguments, **options)
        self.alpha, self.beta, self.beta_final, self.eps = alpha, beta, beta_final, eps
        self._beta_first = beta
        self.tree = SumTree(self.buffer_size * self.n_envs)
        self._highest = 1.0
        self._row = np.arange(self.n_envs)

    @property
    def priorities(self) -> Float64Array:
        """A copy of p^alpha of every slot, (size, N); 0 where nothing can be drawn."""
        with self.lock:
            leaves: Float64Array = self.tree.nodes[: self.tree.capacity].copy()
        return leaves.reshape(self.buffer_size, self.n_envs)

    def anneal(self, progress_remaining: float) -> None:
        """Set `beta` linearly: from its initial value at progress_remaining 1 to `beta_final` at 0."""
        self.beta = self.beta_final + (self._beta_first - self.beta_final) * progress_remaining

    def reset(self) -> None:
        """Empty the buffer. `update_priorities` then ignores transitions that were drawn before."""
        with self.lock:
            super().reset()
            self.tree.clear()

    def _row_stored(self, row: int) -> None:
        """Give the row the highest priority so far."""
        self._set(self._row + row * self.n_envs, self._highest)
        if self._margin():  # the next observations of the newest row have overwritten the observations of row `pos`
            self._set(self._row + self.pos * self.n_envs, 0.0)

    def discard(self, lost: Envs, resting: Envs = (), waiting: Envs = ()) -> list[Place]:
        """See `ReplayStorage.discard`. Transitions that must not be drawn get priority 0."""
        with self.lock:
            complete = super().discard(lost, resting, waiting)
            row = (self.pos - 1) % self.buffer_size
            self._set(row * self.n_envs + np.flatnonzero(self.void[row]), 0.0)  # type: ignore[index]
            self._set(np.array([row * self.n_envs + env for row, env in complete], np.int64), self._highest)
        return complete

    def _set(self, slots: Int64Array, priority: float) -> None:
        set_kernel(self.tree.nodes, self.tree.starts, self.tree.capacity, slots, np.full(len(slots), priority))

    def draw_weighted(
        self, batch_size: int, batches: int = 1, rng: np.random.Generator | None = None
    ) -> PrioritizedDraw:
        """Draw `batches` batches of `batch_size` transitions each, with the present priorities.

        Random numbers come from `rng`; None: numpy's global stream.

        Raises:
            ValueError: nothing is stored yet.
        """
        with self.lock:
            if not self.tree.total() > 0.0:
                raise ValueError("cannot sample: the replay buffer is empty")
            count = batch_size * batches
            shares = np.random.random_sample(count) if rng is None else rng.random(count)
            indices, weights = np.empty(len(shares), np.int64), np.empty(len(shares), np.float32)
            draw_kernel(self.tree.nodes, self.tree.starts, shares, batch_size, self.beta, indices, weights)
            return PrioritizedDraw(indices, weights, self.generation)

    def draw(self, batch_size: int, rng: np.random.Generator | None = None) -> tuple[Int64Array, Int64Array]:
        """Rows (B,) and envs (B,) by priority."""
        return np.divmod(self.draw_weighted(batch_size, rng=rng).indices, self.n_envs)

    def sample(  # type: ignore[override]
        self,
        batch_size: int,
        env: VecNormalize | None = None,
        rng: np.random.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> ReplayBatch:
        """A batch with `weights`, and with `indices` and `generation` for `update_priorities`."""
        with self.lock:
            drawn = self.draw_weighted(batch_size, rng=rng)
            batch = self.gather(*np.divmod(drawn.indices, self.n_envs), env, device)
        weights = self._tensor(drawn.weights[:, None], device)
        return batch._replace(weights=weights, indices=drawn.indices, generation=drawn.generation)

    def update_priorities(
        self,
        indices: NDArray[np.integer[Any]],  # (B,) as drawn: row * num_envs + env
        td_errors: NDArray[np.floating[Any]] | torch.Tensor,  # (B,) or (B, 1), positive or negative
        generation: int | Int64Array | None = None,  # rows written before the draw, one or (B,); None: drawn just now
    ) -> int:
        """Set priorities to (|td_error| + eps)^alpha; return how many were set. Overwritten slots are not changed.

        If an index occurs twice, the last error is used.

        Raises:
            IndexError: a slot has no transition. Then nothing was changed.
            ValueError: a TD error is not finite, or their number is not that of indices. Then nothing was changed.
        """
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().cpu().numpy()
        errors = np.ascontiguousarray(td_errors, np.float64).reshape(-1)
        slots = np.ascontiguousarray(indices, np.int64).reshape(-1)
        if len(errors) != len(slots):
            raise ValueError(f"{len(slots)} indices and {len(errors)} TD errors: the numbers must be equal")
        shape = self.buffer_size, self.n_envs
        with self.lock:
            now = self.generation
            drawn_at = np.asarray(now if generation is None else generation, np.int64).reshape(-1)
            if len(drawn_at) not in (1, len(slots)):
                raise ValueError(f"generation must be one number or {len(slots)} numbers, not {len(drawn_at)}")
            arrays = self.tree.nodes, self.tree.starts, shape, slots, errors, drawn_at
            refused, count, highest = update_kernel(*arrays, now, self._margin(), self.alpha, self.eps)
            self._highest = max(self._highest, highest)
        if refused < 0:
            return count
        if not np.isfinite(errors[refused]):
            raise ValueError(f"the TD error of slot {slots[refused]} is {errors[refused]}: the values have diverged")
        raise IndexError(f"slot {slots[refused]} holds no transition: {self.size() * self.n_envs} are stored")
