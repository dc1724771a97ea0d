"""The rollout of a recurrent policy: a `RolloutStorage` with what the policy remembered before each step.

Every step's states are kept, because a minibatch may begin at any. Membership of minibatches is stock's: one number
from numpy's global stream splits the env-major data, one env's steps after the other's, then they are cut off one after
the other. A sequence begins where an episode does, where another env's steps do, after a row that was left out, and
with the minibatch. Legend: B rows, S sequences, L layers, H units.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor, cat, contiguous_format, zeros

from fasttrain.batch import BoolArray, Float32Array, Int64Array, each_array
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations

# What a step of time costs besides its rows, in rows: an LSTM of 64 units on oneDNN takes 8 µs a step and 0.7 a row.
STEP_COST = 11


class Memory(NamedTuple):
    """What a recurrent policy remembers of N envs when it is to act."""

    states: RNNStates  # pi and vf, each a pair (h, c) of (L, N, H)
    episode_starts: BoolArray  # (N,) where that is of an episode that is over

    @classmethod
    def blank(cls, num_envs: int, state_shape: tuple[int, int], device: Any, keeps_cells: bool = True) -> Memory:
        """Of envs whose episodes begin; `state_shape` is (L, H). Without cells c has no width."""
        layers, units = state_shape
        pi, vf = ((zeros(layers, num_envs, units, device=device),
                   zeros(layers, num_envs, units * keeps_cells, device=device)) for _ in range(2))  # fmt: skip
        return cls(RNNStates(pi, vf), np.ones(num_envs, np.bool_))

    @classmethod
    def within(cls, states: Any, rows: Any) -> Memory:
        """Of these rows of `states`, in the middle of their episodes."""
        picked = rows_of_states(states, rows)
        return cls(picked, np.zeros(picked.pi[0].shape[1], np.bool_))

    def copied(self) -> Memory:
        """One that may be changed in place."""
        return Memory(each_array(lambda part: part.clone(), self.states), np.array(self.episode_starts, np.bool_))

    def beside(self, other: Memory) -> Memory:
        """What is remembered here, and then there."""
        states = each_array(lambda part, more: cat([part, more], 1), self.states, other.states)
        return Memory(states, np.concatenate([self.episode_starts, other.episode_starts]))

    def of(self, rows: Any) -> Memory:
        """What is remembered of these envs."""
        return Memory(rows_of_states(self.states, rows), self.episode_starts[rows])

    def put(self, rows: Any, states: RNNStates) -> None:
        """Remember this of these envs from now on."""
        each_array(lambda part, now: part.__setitem__((slice(None), rows), now), self.states, states)

    def where(self, kept: BoolArray, states: RNNStates, episode_starts: BoolArray) -> Memory:
        """As here in the envs `kept` (N,), and as in the others after a step, of which `states` are changed."""
        after = Memory(states, episode_starts | (kept & self.episode_starts))
        after.put(rows := np.flatnonzero(kept), self.of(rows).states)
        return after


class Padded(NamedTuple):
    """How stock lays sequences out: each filled up to the longest, one after the other."""

    states: RNNStates  # (L, S, H) each, as stored where the sequences begin
    episode_starts: Tensor  # (S × longest,) float
    kept: Tensor  # (B,) places of the minibatch's own rows


class Group(NamedTuple):
    """Sequences of about the same length, for one call."""

    rows: slice  # of the minibatch
    sequences: slice
    shape: tuple[int, int]  # (longest, sequences)
    places: Tensor  # where each row lies in that shape, flat


class Grouped(NamedTuple):
    """How sequences are laid out where sums may be taken in another order: the longest first, in few groups."""

    states: RNNStates  # (L, S, H) each, zero where an episode begins
    groups: tuple[Group, ...]


def rows_of_states(states: Any, rows: Any) -> Any:
    """The same of some envs, copied: `rows` are indices, or a slice."""
    return each_array(lambda part: part[:, rows].clone(memory_format=contiguous_format), states)


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


# --- where a minibatch is cut, and how its parts are laid side by side


def sequences_of(begins: BoolArray) -> tuple[Int64Array, Int64Array]:  # (B,) → (S,), (S,)
    """Where sequences begin, and how long they are. The first row begins one, whatever it says."""
    inner = np.flatnonzero(begins[1:]) + 1
    firsts = np.concatenate([[0], inner])
    return firsts, np.diff(firsts, append=len(begins))


def padded_places(lengths: Int64Array) -> Int64Array:  # (S,) → (B,)
    """Place of each row in (S, longest), flat: one sequence after the other."""
    gaps = int(lengths.max()) - lengths
    before = np.cumsum(gaps) - gaps  # padding in front of each sequence
    places: Int64Array = np.arange(int(lengths.sum())) + np.repeat(before, lengths)
    return places


def timed_places(lengths: Int64Array) -> Int64Array:  # (S,) → (B,)
    """Place of each row in (longest, S), flat: step by step."""
    count, ends = len(lengths), np.cumsum(lengths)
    steps = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)  # 0, 1, … of each sequence
    places: Int64Array = steps * count + np.repeat(np.arange(count), lengths)
    return places


def longest_first(firsts: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:  # (S,), (S,) → (B,), (S,)
    """Rows in the order in which the longest sequence comes first, and the order of the sequences."""
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    rows = np.arange(int(sizes.sum())) + np.repeat(firsts[order] - (np.cumsum(sizes) - sizes), sizes)
    return rows, order


def cuts(lengths: Int64Array, step_cost: int = STEP_COST) -> list[int]:
    """Where groups of sequences (the longest first) end, such that time and padding cost the least found.

    A group costs its longest × (step_cost + sequences). Cut in two where that saves most, and the parts again.
    """
    ends, todo = [], [(0, len(lengths))]
    while todo:
        begin, end = todo.pop()
        within, counts = lengths[begin:end], np.arange(1, end - begin)
        whole = within[0] * (step_cost + end - begin)
        costs = within[0] * (step_cost + counts) + within[1:] * (step_cost + end - begin - counts)
        best = int(costs.argmin()) if len(costs) else 0
        if len(costs) and costs[best] < whole:
            todo += [(begin + best + 1, end), (begin, begin + best + 1)]
        else:
            ends.append(end)
    return ends
