"""How minibatches are cut into sequences and laid side by side, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.buffers.recurrent import Memory, cuts, longest_first, padded_places, sequences_of, timed_places


def flags(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text])


@pytest.mark.parametrize(
    ("begins", "firsts", "lengths"),
    [
        (".....", [0], [5]),
        ("x....", [0], [5]),
        (".x..xx", [0, 1, 4, 5], [1, 3, 1, 1]),
        ("x", [0], [1]),
    ],
)
def test_a_sequence_begins_with_the_minibatch_and_where_it_is_said(begins: str, firsts: list[int], lengths: list[int]):
    found = sequences_of(flags(begins))
    assert [part.tolist() for part in found] == [firsts, lengths]


def test_places_in_padding():
    lengths = np.array([2, 1, 3])  # of rows a a, b, c c c
    assert padded_places(lengths).tolist() == [0, 1, 3, 6, 7, 8]  # a a . | b . . | c c c
    assert timed_places(lengths).tolist() == [0, 3, 1, 2, 5, 8]  # a b c | a . c | . . c


def test_the_longest_comes_first_and_equals_keep_their_order():
    rows, order = longest_first(np.array([0, 2, 3, 6]), np.array([2, 1, 3, 2]))
    assert order.tolist() == [2, 0, 3, 1]
    assert rows.tolist() == [3, 4, 5, 0, 1, 6, 7, 2]


def test_groups_end_where_padding_would_cost_more_than_steps():
    cost = 2
    assert cuts(np.array([5, 5, 5]), cost) == [3]  # one group of 25; any cut costs its steps again
    # One group of 10 × (2 + 4) = 60; the long one apart: 10 × 3 + 2 × 5 = 40.
    assert cuts(np.array([10, 2, 2, 2]), cost) == [1, 4]
    assert cuts(np.array([3, 2]), cost) == [2]  # 3 × 4 = 12; apart 9 + 6 = 15
    assert cuts(np.array([7]), cost) == [1]
    assert cuts(np.array([100, 20, 20, 1, 1, 1, 1]), 1) == [1, 3, 7]


def test_memory_of_some_envs():
    part = torch.arange(6.0).view(1, 3, 2)
    memory = Memory(RNNStates((part, part + 10), (part + 20, part + 30)), flags("x.x")).copied()
    some = memory.of(np.array([2, 0]))
    assert some.states.pi[0].tolist() == [[[4.0, 5.0], [0.0, 1.0]]]
    assert some.episode_starts.tolist() == [True, True]
    memory.put(np.array([1]), RNNStates(*(tuple(torch.full((1, 1, 2), -1.0) for _ in range(2)) for _ in range(2))))
    assert memory.states.vf[1].tolist() == [[[30.0, 31.0], [-1.0, -1.0], [34.0, 35.0]]]
    assert part.min() == 0.0  # copied
    some = memory.of(slice(0, 1))
    memory.put(slice(0, 1), RNNStates(*(tuple(torch.zeros(1, 1, 2) for _ in range(2)) for _ in range(2))))
    assert some.states.vf[1].tolist() == [[[30.0, 31.0]]]  # a copy, of a slice too
    within = Memory.within(memory.states, [1])
    assert (within.states.pi[0].tolist(), within.episode_starts.tolist()) == ([[[-1.0, -1.0]]], [False])
