"""Lists of what is not zero and of legal choices; what nets compute is compared with torch's in test_ppo_kernels.py,
test_q.py and tests/accelerators."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled import from_python
from fasttrain_kernels.dense import add_product, set_product, sparse_backward, sparse_forward
from fasttrain_kernels.nets import compress, count_nonzero, empty_lists, spread, where_nonzero
from fasttrain_kernels.threads import run

add_product, set_product, spread = map(from_python, (add_product, set_product, spread))
sparse_backward, sparse_forward = from_python(sparse_backward), from_python(sparse_forward)
count_nonzero = from_python(count_nonzero)
where_nonzero = from_python(where_nonzero)


@given(
    st.sampled_from([0, 1, 6, 300]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**16), st.integers(1, 2)
)
@settings(max_examples=40)
def test_compress_keeps_what_counts(count: int, inputs: int, actions: int, seed: int, threads: int):
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((count, inputs)).astype(np.float32)
    observations[rng.random(observations.shape) < 0.6] = 0.0
    masks = rng.random((count, actions)) < 0.5
    lists = empty_lists(count, inputs, actions)
    run(compress, threads, observations, masks, lists)
    values, columns, starts, legal, legal_starts = lists
    for i in range(count):
        part = slice(starts[i], starts[i + 1])
        np.testing.assert_array_equal(columns[part], np.flatnonzero(observations[i]))
        np.testing.assert_array_equal(values[part], observations[i][columns[part]])
        np.testing.assert_array_equal(legal[legal_starts[i] : legal_starts[i + 1]], np.flatnonzero(masks[i]))


def test_places_of_what_is_not_zero():
    row = np.zeros(37, np.float32)
    row[[0, 15, 16, 31, 36]] = -1.0, np.nan, 1.0, 1.0, 1.0  # both ends of a group, and what remains after the last one
    places = np.zeros(5, np.int32)
    assert count_nonzero(row) == 5
    where_nonzero(row, places)
    assert places.tolist() == [0, 15, 16, 31, 36]


def test_products_of_spread_inputs_are_those_of_the_lists_bit_for_bit():
    rng, order = np.random.default_rng(0), np.array([4, 1, 6, 2, 0])
    observations = rng.standard_normal((7, 16)).astype(np.float32)
    observations[rng.random(observations.shape) < 0.2] = 0.0
    observations[5] = 0.0
    lists, seen = empty_lists(7, 16, 2), np.full((16, 16), np.nan, np.float32)
    run(compress, 1, observations, np.ones((7, 2), np.bool_), lists)
    assert not spread(lists, np.array([5, 4]), seen), "more than 40 % are zero"
    assert spread(lists, order, seen)
    w, bias, deltas = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 32), 32, (8, 32)))
    by_lists, by_all = np.zeros((2, 8, 32), np.float32)
    sparse_forward(lists, order, w, bias, by_lists)
    set_product(seen[:, :8].T, w, bias, 8, by_all)
    np.testing.assert_array_equal(by_lists[:5], by_all[:5])
    of_lists, of_all = w.copy(), w.copy()
    sparse_backward(lists, order, deltas, of_lists)
    add_product(seen[:, :8], deltas, 16, of_all)
    np.testing.assert_array_equal(of_lists, of_all)
