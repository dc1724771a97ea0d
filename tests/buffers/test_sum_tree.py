"""SumTree against a plain list of numbers, and where rounding bites."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.buffers.sum_tree import FAN_OUT, SumTree, find_kernel, set_kernel

CAPACITIES = st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 200, 513])
WHOLE = st.integers(0, 1000).map(float)  # sums of whole numbers are exact in any order
ANY = st.floats(0, 1e12, allow_subnormal=True)


def put(tree: SumTree, indices: Any, values: Any) -> int:
    """Set leaves; the place in the batch that was refused, or -1."""
    where = np.array(indices, np.int64).reshape(-1)
    what = np.ascontiguousarray(np.broadcast_to(np.array(values, np.float64).reshape(-1), where.shape))
    return set_kernel(tree.nodes, tree.starts, tree.capacity, where, what)


def find(tree: SumTree, prefixes: Any) -> Any:
    rest = np.array(prefixes, np.float64)
    found = np.empty(len(rest), np.int64)
    find_kernel(tree.nodes, tree.starts, rest, found)
    return found


@st.composite
def updates(draw: Any, values: Any) -> tuple[int, list[tuple[list[int], list[float]]]]:
    capacity = draw(CAPACITIES)
    pairs = st.lists(st.tuples(st.integers(0, capacity - 1), values), min_size=1, max_size=40)
    batches = draw(st.lists(pairs, min_size=1, max_size=6))
    return capacity, [([i for i, _ in batch], [v for _, v in batch]) for batch in batches]


def applied(capacity: int, batches: list[tuple[list[int], list[float]]]) -> tuple[SumTree, list[float]]:
    tree, plain = SumTree(capacity), [0.0] * capacity
    for indices, values in batches:
        put(tree, indices, values)
        for index, value in zip(indices, values, strict=True):
            plain[index] = value
    return tree, plain


def assert_sums(tree: SumTree) -> None:
    """Every node is the sum of its eight children, in the fixed order."""
    levels = np.split(tree.nodes, tree.starts[1:])
    for below, here in itertools.pairwise(levels):
        a, b, c, d, e, f, g, h = below.reshape(-1, FAN_OUT).T
        np.testing.assert_array_equal(here[: len(a)], ((a + b) + (c + d)) + ((e + f) + (g + h)))
        assert not here[len(a) :].any()


@settings(max_examples=60)
@given(updates(WHOLE), st.data())
def test_as_a_plain_list(case: tuple, data: Any):
    tree, plain = applied(*case)
    assert tree.total() == sum(plain)
    assert tree.nodes[: len(plain)].tolist() == plain
    assert_sums(tree)
    if sum(plain) == 0:
        return
    running = list(itertools.accumulate(plain))
    last = max(index for index, value in enumerate(plain) if value > 0)
    prefixes = data.draw(st.lists(st.floats(0, running[-1]) | st.sampled_from(running), min_size=1, max_size=20))
    expected = [next((i for i, s in enumerate(running) if prefix < s), last) for prefix in prefixes]
    assert find(tree, prefixes).tolist() == expected


@settings(max_examples=60)
@given(updates(ANY), st.lists(st.floats(0, 1), max_size=20))
def test_with_rounding_never_a_leaf_of_zero(case: tuple, shares: list[float]):
    tree, plain = applied(*case)
    exact = math.fsum(plain)
    assert tree.total() == pytest.approx(exact, rel=1e-14)
    if exact == 0:
        return
    running = np.cumsum(plain)
    total = tree.total()
    edges = np.concatenate([running, [0.0, total, total * (1 + 1e-15), np.nextafter(total, 0)]])
    prefixes = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, np.inf), np.array(shares) * total])
    found = find(tree, prefixes)
    assert (tree.nodes[found] > 0).all()
    # The right leaf but for rounding: the prefix lies in its interval, wider by 1e-13 of the total on both sides.
    slack = 1e-13 * total
    assert (running[found] + slack >= np.minimum(prefixes, total)).all()
    assert (running[found] - tree.nodes[found] - slack <= prefixes).all()


def test_of_duplicates_the_last_wins_and_empty_batches_are_some():
    tree = SumTree(100)
    put(tree, [3, 90, 3, 50, 3], [1.0, 2.0, 4.0, 8.0, 16.0])
    put(tree, [], [])
    assert tree.nodes[[3, 90, 50]].tolist() == [16, 2, 8]
    assert tree.total() == 26
    assert find(tree, []).tolist() == []
    tree.clear()
    assert tree.total() == 0
    with pytest.raises(ValueError, match="at least 1"):
        SumTree(0)


def test_a_pickled_tree_is_the_same_tree_and_aligned():
    tree = SumTree(1000)
    put(tree, range(1000), range(1000))
    other = pickle.loads(pickle.dumps(tree))
    np.testing.assert_array_equal(tree.nodes, other.nodes)
    assert tree.nodes.ctypes.data % 64 == other.nodes.ctypes.data % 64 == 0
    put(other, 0, 7.0)
    assert other.total() == tree.total() + 7


BAD = [(-1, 1.0), (10, 1.0), (1 << 40, 1.0), (2, -1.0), (2, -1e-300), (2, math.nan), (2, math.inf)]


@pytest.mark.parametrize(("index", "value"), BAD)
def test_what_cannot_be_is_refused_and_nothing_set(index: int, value: float):
    tree = SumTree(10)
    assert put(tree, [1, index], [1.0, value]) == 1
    assert tree.total() == 0
