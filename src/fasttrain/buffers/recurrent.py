"""The rollout of a recurrent policy: a `RolloutStorage` with what the policy remembered before each step.

Every step's states are kept, because a minibatch may begin at any. Membership of minibatches is stock's: one number
from numpy's global stream splits the env-major data, then they are cut off one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.buffers.sequences import (
    Group,
    Grouped,
    Padded,
    cuts,
    longest_first,
    padded_places,
    sequences_of,
    timed_places,
)


class RecurrentStorage(RolloutStorage):
    """T steps of N envs and what was remembered before each.

    Args:
        state_shape: (L, H) of an LSTM.
        own_critic: whether the critic has an LSTM of its own; else its states are the actor's.
        keeps_cells: as an LSTM does; a GRU has hidden states alone, and c has no width.
        further: as `RolloutStorage`.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        state_shape: tuple[int, int],
        own_critic: bool,
        keeps_cells: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(num_steps, num_envs, observation_space, action_space, **settings)
        layers, units = state_shape
        widths = (units, units * keeps_cells) * (2 if own_critic else 1)  # h, c of pi, h, c of vf
        self._states = tuple(torch.zeros(num_steps, num_envs, layers, width, device=self.device) for width in widths)

    def _parts(
        self,
        observations: TensorObservations,
        actions: Tensor,
        values: Tensor,
        log_probs: Tensor,
        masks: Tensor | None,
        memory: Any = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._parts(observations, actions, values, log_probs, masks)
        given = (*memory.pi, *memory.vf)[: len(self._states)]
        yield from ((stored, state.transpose(0, 1)) for stored, state in zip(self._states, given, strict=True))

    @property
    def states(self) -> tuple[Float32Array, ...]:
        """What was remembered before each step, (T, L, N, H) each: h and c of pi, and of vf where it has its own."""
        return tuple(stored.transpose(1, 2).cpu().numpy() for stored in self._states)

    def draw_order(self) -> Int64Array:
        """The `rows` in env-major order from some place on, and then those before it."""
        if not self.full:
            raise RuntimeError(f"only {self.pos} of {self.num_steps} steps are stored")
        rows = self.rows
        split = np.random.randint(len(rows))
        order: Int64Array = np.concatenate([rows[split:], rows[:split]])
        return order

    def minibatches(self, batch_size: int | None = None, layout: str = "padded") -> Iterator[RolloutBatch]:
        """One epoch: minibatches of stock's rows, each cut into sequences.

        Args:
            layout: padded: observations, actions and masks as stock lays them out, zeros in between (masks: all legal),
                so that every sum has its order. grouped: nothing in between, the longest sequence first. The scalars
                never have padding.
        """
        lay = {"padded": self._padded, "grouped": self._grouped}[layout]
        order = self.draw_order()
        size = batch_size or len(order)
        begins = self.begins(order)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            starts, lengths = sequences_of(begins[first : first + size])
            yield lay(rows, starts, lengths)

    def past(self) -> tuple[Any, Float32Array]:
        """What was remembered before each of the T × N rows, (rows, L × H) each: hidden and cells of the policy, and of
        its critic; and where episodes begin, (rows,)."""
        flat = [stored.reshape(self.num_steps * self.num_envs, -1).numpy() for stored in self._states]
        return (flat[0], flat[1], flat[-2], flat[-1]), self.episode_starts.reshape(-1)

    def padding(self, batch_size: int | None) -> tuple[float, float, float]:
        """Of minibatches cut without a draw: sequences in each; shares of padding in stock's layout and in groups."""
        order = self.rows
        begins, size = self.begins(order), batch_size or len(order)
        counts, stock, groups = [], 0, 0
        for first in range(0, len(order), size):
            lengths = -np.sort(-sequences_of(begins[first : first + size])[1])
            counts.append(len(lengths))
            stock += len(lengths) * int(lengths[0])
            groups += sum(int(lengths[begin]) * (end - begin) for begin, end in pairwise([0, *cuts(lengths)]))
        return sum(counts) / len(counts), 1 - len(order) / stock, 1 - len(order) / groups

    def begins(self, order: Int64Array) -> BoolArray:  # (rows,) → (rows,)
        """Which of the rows, in that order, begin a sequence."""
        begins: BoolArray = (self.episode_starts.reshape(-1)[order] != 0) | (order < self.num_envs)
        if self._left_out is not None:
            begins[1:] |= np.diff(order) != self.num_envs  # else the same env's next step
        return begins

    def _padded(self, rows: Int64Array, firsts: Int64Array, lengths: Int64Array) -> RolloutBatch:
        kept = padded_places(lengths)
        size = len(lengths) * int(lengths.max())
        whole = np.full(size, rows[0])
        whole[kept] = rows
        empty = np.ones(size, np.bool_)
        empty[kept] = False
        gaps, places = self._on_device(empty), self._on_device(kept)
        episode_starts = torch.zeros(size, device=self.device)
        episode_starts[places] = self._on_device(self.episode_starts.reshape(-1)[rows])
        sequences = Padded(self._states_at(rows[firsts]), episode_starts, places)
        batch = self._batch(self._on_device(rows), sequences, self._on_device(whole))
        observations = batch.observations
        for part in (*(observations.values() if isinstance(observations, dict) else (observations,)), batch.actions):
            part[gaps] = 0
        if batch.action_masks is not None:
            batch.action_masks[gaps] = True
        return batch

    def _grouped(self, rows: Int64Array, firsts: Int64Array, lengths: Int64Array) -> RolloutBatch:
        order, by_length = longest_first(firsts, lengths)
        sizes = lengths[by_length]
        groups, ends, begin, row = [], np.cumsum(sizes), 0, 0
        for end in cuts(sizes):
            last = int(ends[end - 1])
            places = self._on_device(timed_places(sizes[begin:end]))
            shape = (int(sizes[begin]), end - begin)
            groups.append(Group(slice(row, last), slice(begin, end), shape, places))
            begin, row = end, last
        starts = rows[firsts[by_length]]
        goes_on = self._on_device(1 - self.episode_starts.reshape(-1)[starts])[:, None]
        sequences = Grouped(self._states_at(starts, goes_on), tuple(groups))
        ready = self._on_device(rows[order])
        return self._batch(ready, sequences, ready)

    def _states_at(self, rows: Int64Array, factor: Tensor | None = None) -> RNNStates:  # (S,), (S, 1) → (L, S, H) each
        index = self._on_device(rows)
        found = [stored.flatten(0, 1).index_select(0, index).transpose(0, 1) for stored in self._states]
        ready = [part.contiguous() if factor is None else part * factor for part in found]
        return RNNStates((ready[0], ready[1]), (ready[-2], ready[-1]))

    def _batch(self, rows: Tensor, sequences: Any, whole: Tensor) -> RolloutBatch:
        """Scalars of `rows`; of `whole`, which padding may be among, what networks read."""
        total = self.num_steps * self.num_envs
        actions = self._actions.view(total) if self._discrete else self._actions.view(total, -1)
        masks = None if self._masks is None else self._masks.view(total, -1)
        values, log_probs, advantages, returns = (
            stored.view(total).index_select(0, rows)
            for stored in (self._values, self._log_probs, self._advantages, self._returns)
        )
        return RolloutBatch(
            observations=self._gather_observations(whole),
            actions=actions.index_select(0, whole),
            old_values=values,
            old_log_probs=log_probs,
            advantages=advantages,
            returns=returns,
            action_masks=None if masks is None else masks.index_select(0, whole),
            sequences=sequences,
        )

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
