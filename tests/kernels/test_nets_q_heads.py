"""Heads of a Q-network, worked out by hand."""

from __future__ import annotations

import numpy as np

from compiled import from_python
from fasttrain.kernels.nets import add_slope, greedy_of, greedy_row, join, value_of

add_slope = from_python(add_slope)
greedy_of = from_python(greedy_of)
greedy_row = from_python(greedy_row)
join = from_python(join)
value_of = from_python(value_of)


ALL = np.zeros(0, np.bool_)


def test_the_greedy_choice():
    values = np.array([1.0, 3.0, 3.0, 2.0, 99.0], np.float32)  # the last is padding
    assert greedy_of(values, ALL, 0, 4) == 1, "the first of equals"
    assert greedy_of(values, np.array([True, False, False, True]), 0, 4) == 3
    assert greedy_of(values, np.zeros(4, np.bool_), 0, 4) == -1
    values[0] = np.nan
    assert greedy_of(values, np.ones(4, np.bool_), 0, 4) == 0


def test_every_sub_action_is_chosen_and_valued_by_itself():
    values, dims = np.array([1.0, 3.0, 5.0, 9.0, 7.0, 99.0], np.float32), np.array([2, 3])
    chosen = np.zeros(2, np.int64)
    greedy_row(values, ALL, dims, chosen)
    assert chosen.tolist() == [1, 1]
    assert value_of(values, chosen, dims) == (3 + 9) / 2
    greedy_row(values, np.array([True, False, True, False, True]), dims, chosen)
    assert chosen.tolist() == [0, 2]
    assert value_of(values, chosen, dims) == (1 + 7) / 2
    greedy_row(values, np.array([True, True, False, False, False]), dims, chosen)
    assert chosen.tolist() == [1, -1]
    assert value_of(values, chosen, dims) == 3 / 2, "no legal choice is worth nothing"


def test_the_dueling_head():
    outputs = np.array([1.0, 2.0, 6.0, 10.0, 7.0], np.float32)  # advantages, value, padding
    join(outputs, np.array([3]))
    assert outputs.tolist() == [8.0, 9.0, 13.0, 10.0, 7.0]
    outputs = np.array([1.0, 3.0, 2.0, 6.0, 10.0, 7.0], np.float32)
    join(outputs, np.array([2, 2]))
    assert outputs.tolist() == [9.0, 11.0, 8.0, 12.0, 10.0, 7.0]


def test_slopes():
    delta = np.zeros(5, np.float32)
    add_slope(np.float32(3.0), 2, 0, 3, True, delta, 3)
    assert delta.tolist() == [-1.0, -1.0, 2.0, 3.0, 0.0]
    delta[:] = 0
    add_slope(np.float32(3.0), 1, 2, 2, False, delta, 4)
    assert delta.tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]
    add_slope(np.float32(2.0), 0, 0, 2, True, delta, 4)
    assert delta.tolist() == [1.0, -1.0, 0.0, 3.0, 2.0]
