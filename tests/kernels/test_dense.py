from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled import from_python
from fasttrain.accelerators import layout
from fasttrain.batch import Float32Array
from fasttrain_kernels import dense
from fasttrain_kernels.dense import RELU, TANH
from fasttrain_kernels.simd import PAD, TILE_ROWS

activate, through_activation, clip_and_adam = map(
    from_python, (dense.activate, dense.through_activation, dense.clip_and_adam)
)
add_product, set_product = from_python(dense.add_product), from_python(dense.set_product)
add_to_rows, sum_rows = from_python(dense.add_to_rows), from_python(dense.sum_rows)


def random_array(seed: int, *shape: int) -> Float32Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=30)
def test_products_equal_numpys(tiles: int, pads: int, k: int, seed: int):
    rows, n = TILE_ROWS * tiles, PAD * pads
    wide = random_array(seed, rows + 1, k + 3)  # a view of a larger array, as the layers of `Scratch` are
    x, w, start = wide[:, 2 : 2 + k], random_array(seed + 1, k, n), random_array(seed + 2, n)
    out = random_array(seed + 3, rows + 1, n + PAD)
    kept = out.copy()
    set_product(x, w, start, rows, out[:, :n])
    np.testing.assert_allclose(out[:rows, :n], start + x[:rows] @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[:, n:], kept[:, n:])
    np.testing.assert_array_equal(out[rows], kept[rows])
    before = out.copy()
    add_product(x, w, rows, out[:, :n])
    np.testing.assert_allclose(out[:rows, :n], before[:rows, :n] + x[:rows] @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("k", "n"), [(600, 48), (300, 16), (64, 80)])
def test_a_product_in_pieces(k: int, n: int):
    """Of a matrix larger than the first cache; columns that fill no whole panel, and a depth that is no multiple."""
    rows = 5 * TILE_ROWS
    x, w, start, out = (random_array(seed, *shape) for seed, shape in enumerate(((rows, k), (k, n), (n,), (rows, n))))
    expected = start + x @ w
    set_product(x, w, start, rows, out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    gradient = random_array(5, rows, n)
    before = gradient.copy()
    add_product(x, w, rows, gradient)
    np.testing.assert_allclose(gradient, before + x @ w, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 11), st.integers(1, 13), st.integers(0, 2**16))
@settings(max_examples=30)
def test_sparse_rows_equal_dense_ones(nonzero: int, pads: int, seed: int):
    n, before, after = PAD * pads, 2, 3  # entries of other rows stand before and after
    places = np.random.default_rng(seed).choice(12, nonzero + before + after).astype(np.int32)
    values, w, start = random_array(seed, len(places)), random_array(seed + 1, 12, n), random_array(seed + 2, n)
    begin, end = before, before + nonzero
    dense = np.zeros(12, np.float32)
    np.add.at(dense, places[begin:end], values[begin:end])
    out = np.full(n, np.nan, np.float32)
    sum_rows(values, places, begin, end, w, start, out)
    np.testing.assert_allclose(out, start + dense @ w, rtol=1e-5, atol=2e-5)
    d, gradient = random_array(seed + 3, n), w.copy()
    add_to_rows(values, places, begin, end, d, gradient)
    np.testing.assert_allclose(gradient, w + np.outer(dense, d), rtol=1e-5, atol=2e-5)


def test_nan_stays_nan_and_an_unknown_activation_gives_no_number():
    for kind, expected in ((TANH, [True, False]), (RELU, [True, False]), (7, [True, True])):
        a, d = np.array([np.nan, 1.0], np.float32), np.ones(2, np.float32)
        activate(a, kind)
        assert np.isnan(a).tolist() == expected
        through_activation(d, a, kind)
        assert np.isnan(d[1]) == expected[1]


@pytest.mark.parametrize("module", layout.KINDS)
def test_every_number_of_an_activation_is_computed_both_ways(module: Any):
    numbers = np.concatenate([np.linspace(-12, 12, 4001), [0.0, 1e-30, -1e-8, 100.0]]).astype(np.float32)
    x = torch.from_numpy(numbers.astype(np.float64)).requires_grad_()
    expected = module()(x)
    expected.sum().backward()
    a, d = numbers.copy(), np.ones_like(numbers)
    activate(a, layout.KINDS[module])
    through_activation(d, a, layout.KINDS[module])
    np.testing.assert_allclose(a, expected.detach(), rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(d, x.grad, atol=1e-6)
    assert module is not torch.nn.Tanh or np.abs(a).max() <= 1.0 + 1e-6


@pytest.mark.parametrize(
    ("gradient", "loss"), [(np.nan, 1.0), (-np.inf, 1.0), (2e19, 1.0), (1.0, np.nan), (1.0, np.inf)]
)
def test_a_guarded_step_changes_nothing_where_something_is_not_finite(gradient: float, loss: float):
    vectors = [np.arange(5, dtype=np.float32) for _ in range(3)]
    slopes = np.ones(5, np.float32)
    slopes[3] = gradient
    numbers = (1, 1e-3, 0.9, 0.999, 1e-5, 0.5)
    assert np.isnan(clip_and_adam(vectors[0], slopes, vectors[1], vectors[2], *numbers, loss, True))
    assert all(np.array_equal(vector, np.arange(5)) for vector in vectors)
    clip_and_adam(vectors[0], slopes, vectors[1], vectors[2], *numbers, loss, False)
    assert not np.array_equal(vectors[1], np.arange(5)), "unguarded it is taken"
    assert np.isfinite(gradient) or not np.isfinite(vectors[0]).all(), "and not hidden by clipping"
