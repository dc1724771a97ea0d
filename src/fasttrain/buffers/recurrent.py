"""The rollout of a recurrent policy: a `RolloutStorage` with the LSTM states before each step.

All states are stored, because a minibatch may begin at any step. Minibatches have the same rows as in SB3: at a
random index (numpy's global stream) the env-major rows are split, and both parts are swapped. Then they are cut into
minibatches. A sequence begins where a minibatch, an episode or the rows of an env begin, and after a row that is
left out (`leave_out`). Legend: B rows, S sequences, L layers, H units.
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
from fasttrain.buffers.rollout import RolloutBatch, RolloutRow, RolloutStorage

STEP_COST = 11  # fixed time of an LSTM step ÷ time per row in it: 8 µs ÷ 0.7 µs (64 units, oneDNN)


class Memory(NamedTuple):
    """The states of a recurrent policy in N envs before it acts."""

    states: RNNStates  # pi and vf, each a pair (h, c) of (L, N, H)
    episode_starts: BoolArray  # (N,) True where an episode begins: the policy uses zeros for these states

    @classmethod
    def blank(cls, num_envs: int, state_shape: tuple[int, int], device: Any, keeps_cells: bool = True) -> Memory:
        """Zero states of envs whose episodes begin; `state_shape` is (L, H). Without `keeps_cells` c has width 0."""
        layers, units = state_shape
        pi, vf = ((zeros(layers, num_envs, units, device=device),
                   zeros(layers, num_envs, units * keeps_cells, device=device)) for _ in range(2))  # fmt: skip
        return cls(RNNStates(pi, vf), np.ones(num_envs, np.bool_))

    @classmethod
    def within(cls, states: Any, rows: Any) -> Memory:
        """A Memory of `states` at `rows` (env indices or a slice), in which no episode begins."""
        picked = rows_of_states(states, rows)
        return cls(picked, np.zeros(picked.pi[0].shape[1], np.bool_))

    def copied(self) -> Memory:
        """A copy that may be changed in place."""
        return Memory(each_array(lambda part: part.clone(), self.states), np.array(self.episode_starts, np.bool_))

    def beside(self, other: Memory) -> Memory:
        """The states of the envs of `self`, followed by the states of `other`."""
        states = each_array(lambda part, more: cat([part, more], 1), self.states, other.states)
        return Memory(states, np.concatenate([self.episode_starts, other.episode_starts]))

    def of(self, rows: Any) -> Memory:
        """A copy of the states of the envs `rows`."""
        return Memory(rows_of_states(self.states, rows), self.episode_starts[rows])

    def put(self, rows: Any, states: RNNStates) -> None:
        """Set the states of the envs `rows`, in place."""
        each_array(lambda part, now: part.__setitem__((slice(None), rows), now), self.states, states)

    def where(self, unchanged: BoolArray, states: RNNStates, episode_starts: BoolArray) -> Memory:
        """`states` (changed in place) as a Memory; envs where `unchanged` keep states and episode starts of `self`."""
        after = Memory(states, episode_starts | (unchanged & self.episode_starts))
        after.put(rows := np.flatnonzero(unchanged), self.of(rows).states)
        return after


class Padded(NamedTuple):
    """SB3's layout: sequences one after another, each padded to the length of the longest sequence."""

    states: RNNStates  # (L, S, H) each, stored states at the start of each sequence
    episode_starts: Tensor  # (S × longest,) float
    rows: Tensor  # (B,) indices of the rows that are no padding


class Group(NamedTuple):
    """Sequences of about the same length, for one call of the LSTM."""

    rows: slice  # the group's rows in the minibatch
    sequences: slice
    shape: tuple[int, int]  # (longest, sequences)
    places: Tensor  # (rows,) flat index of each row in an array (longest, sequences)


class Grouped(NamedTuple):
    """A layout with little padding: few groups, the longest sequence first. Sums round differently than in SB3."""

    states: RNNStates  # (L, S, H) each, zeros where an episode begins
    groups: tuple[Group, ...]


def rows_of_states(states: Any, rows: Any) -> Any:
    """A copy of the states of the envs `rows`: indices or a slice."""
    return each_array(lambda part: part[:, rows].clone(memory_format=contiguous_format), states)


class RecurrentStorage(RolloutStorage):
    """T steps of N envs, and the LSTM states before each step.

    Args:
        state_shape: (L, H) of an LSTM.
        own_critic: whether the critic has its own LSTM. If not, the states of the actor's LSTM are also the critic's.
        keeps_cells: whether the layer has cell states c; False for a GRU, whose c has width 0.
        settings: further arguments of `RolloutStorage`.
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

    def _parts(self, row: RolloutRow) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._parts(row)
        states: Any = row.lstm_states
        for stored, state in zip(self._states, (*states.pi, *states.vf), strict=False):
            yield stored, state.transpose(0, 1)

    @property
    def states(self) -> tuple[Float32Array, ...]:
        """LSTM states before each step, (T, L, N, H) each: h and c of pi, and of vf if the critic has its own."""
        return tuple(stored.transpose(1, 2).cpu().numpy() for stored in self._states)

    def assign(self, name: str, given: Any) -> None:
        if name != "states":
            return super().assign(name, given)
        for stored, part in zip(self._states, given, strict=True):
            stored.copy_(torch.as_tensor(part).transpose(1, 2))
        return None

    def draw_order(self) -> Int64Array:
        """The `rows` in env-major order, from a random row to the end, then from the start to this row."""
        if not self.full:
            raise RuntimeError(f"only {self.pos} of {self.num_steps} steps are stored")
        rows = self.rows
        split = np.random.randint(len(rows))
        order: Int64Array = np.concatenate([rows[split:], rows[:split]])
        return order

    def minibatches(self, batch_size: int | None = None, layout: str = "padded") -> Iterator[RolloutBatch]:
        """One epoch of minibatches, each cut into sequences. Values, advantages and so on have no padding.

        Args:
            layout: "padded": observations, actions and masks are padded with zeros (masks: all legal) as in SB3, and
                sums have SB3's order. "grouped": only inputs of the LSTM are padded; the longest sequence comes first.
        """
        lay_out = {"padded": self._padded, "grouped": self._grouped}[layout]
        order = self.draw_order()
        size = batch_size or len(order)
        begins = self.begins(order)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            starts, lengths = sequences_of(begins[first : first + size])
            yield lay_out(rows, starts, lengths)

    def past(self) -> tuple[Any, Float32Array]:
        """LSTM states before each of the T × N rows, (rows, L × H) each: h and c of the policy, h and c of the critic.
        And `episode_starts` (rows,)."""
        flat = [stored.reshape(self.num_steps * self.num_envs, -1).numpy() for stored in self._states]
        return (flat[0], flat[1], flat[-2], flat[-1]), self.episode_starts.reshape(-1)

    def padding(self, batch_size: int | None) -> tuple[float, float, float]:
        """Mean number of sequences in a minibatch, share of padding in SB3's layout, and in `Grouped`."""
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
        """True where a sequence begins, for rows in this order."""
        begins: BoolArray = (self.episode_starts.reshape(-1)[order] != 0) | (order < self.num_envs)
        if self.left_out is not None:
            begins[1:] |= np.diff(order) != self.num_envs  # consecutive rows of an env differ by num_envs
        return begins

    def _padded(self, rows: Int64Array, firsts: Int64Array, lengths: Int64Array) -> RolloutBatch:
        places = padded_places(lengths)
        size = len(lengths) * int(lengths.max())
        with_padding, padding = np.full(size, rows[0]), np.ones(size, np.bool_)
        with_padding[places], padding[places] = rows, False
        gaps, own = self._on_device(padding), self._on_device(places)
        episode_starts = torch.zeros(size, device=self.device)
        episode_starts[own] = self._on_device(self.episode_starts.reshape(-1)[rows])
        sequences = Padded(self._states_at(rows[firsts]), episode_starts, own)
        batch = self._batch(self._on_device(rows), sequences, self._on_device(with_padding))
        each_array(lambda part: part.__setitem__(gaps, 0), (batch.observations, batch.actions))
        if batch.action_masks is not None:
            batch.action_masks[gaps] = True
        return batch

    def _grouped(self, rows: Int64Array, firsts: Int64Array, lengths: Int64Array) -> RolloutBatch:
        order, by_length = longest_first(firsts, lengths)
        sizes = lengths[by_length]
        groups, ends = [], np.cumsum([0, *sizes])
        for begin, end in pairwise([0, *cuts(sizes)]):
            places = self._on_device(timed_places(sizes[begin:end]))
            own_rows, shape = slice(int(ends[begin]), int(ends[end])), (int(sizes[begin]), end - begin)
            groups.append(Group(own_rows, slice(begin, end), shape, places))
        starts = rows[firsts[by_length]]
        within = self._on_device(1 - self.episode_starts.reshape(-1)[starts])[:, None]
        sequences = Grouped(self._states_at(starts, within), tuple(groups))
        index = self._on_device(rows[order])
        return self._batch(index, sequences, index)

    def _states_at(self, rows: Int64Array, factor: Tensor | None = None) -> RNNStates:  # (S,), (S, 1) → (L, S, H) each
        index = self._on_device(rows)
        selected = [stored.flatten(0, 1).index_select(0, index).transpose(0, 1) for stored in self._states]
        states = [part.contiguous() if factor is None else part * factor for part in selected]
        return RNNStates((states[0], states[1]), (states[-2], states[-1]))

    def _batch(self, rows: Tensor, sequences: Any, with_padding: Tensor) -> RolloutBatch:
        """`rows`: indices of values, advantages and so on; `with_padding`: of observations, actions and masks."""
        total = self.num_steps * self.num_envs
        actions = self._actions.view(total) if self._discrete else self._actions.view(total, -1)
        masks = None if self._masks is None else self._masks.view(total, -1)
        values, log_probs, advantages, returns = (
            stored.view(total).index_select(0, rows)
            for stored in (self._values, self._log_probs, self._advantages, self._returns)
        )
        return RolloutBatch(
            observations=self._gather_observations(with_padding),
            actions=actions.index_select(0, with_padding),
            old_values=values,
            old_log_probs=log_probs,
            advantages=advantages,
            returns=returns,
            action_masks=None if masks is None else masks.index_select(0, with_padding),
            sequences=sequences,
        )

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


# --- cut a minibatch into sequences, and compute the indices of their rows in a layout


def sequences_of(begins: BoolArray) -> tuple[Int64Array, Int64Array]:  # (B,) → (S,), (S,)
    """The first row of each sequence, and its length. Row 0 always begins a sequence."""
    inner = np.flatnonzero(begins[1:]) + 1
    firsts = np.concatenate([[0], inner])
    return firsts, np.diff(firsts, append=len(begins))


def padded_places(lengths: Int64Array) -> Int64Array:  # (S,) → (B,)
    """Flat index of each row in the layout (S, longest): one sequence after another."""
    gaps = int(lengths.max()) - lengths
    before = np.cumsum(gaps) - gaps  # padding before each sequence
    places: Int64Array = np.arange(int(lengths.sum())) + np.repeat(before, lengths)
    return places


def timed_places(lengths: Int64Array) -> Int64Array:  # (S,) → (B,)
    """Flat index of each row in the layout (longest, S): all first steps, then all second steps, …"""
    count, ends = len(lengths), np.cumsum(lengths)
    steps = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)  # number of the step in its sequence
    places: Int64Array = steps * count + np.repeat(np.arange(count), lengths)
    return places


def longest_first(firsts: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:  # (S,), (S,) → (B,), (S,)
    """Indices of the rows, those of the longest sequence first; indices of the sequences, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    rows = np.arange(int(sizes.sum())) + np.repeat(firsts[order] - (np.cumsum(sizes) - sizes), sizes)
    return rows, order


def cuts(lengths: Int64Array, step_cost: int = STEP_COST) -> list[int]:
    """Divide sequences, the longest first, into groups that cost little. Returns the end index of each group.

    The cost of a group: length of the longest sequence × (step_cost + number of sequences). A group is cut in two where
    the sum of both costs is lowest. The two new groups are cut in the same way, as long as a cut lowers the cost.
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
