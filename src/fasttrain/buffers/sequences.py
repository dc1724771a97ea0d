"""The maths of sequences: where a minibatch of a recurrent policy is cut, and how its parts are laid side by side.

Pure, on numpy. A minibatch is B rows of the env-major data, one env's steps after the other's. A sequence begins where
an episode does, where another env's steps do, after a row that was left out, and with the minibatch.
Legend: S sequences, L layers, H units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor, cat, contiguous_format, zeros

from fasttrain.batch import BoolArray, Int64Array, each_array

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
