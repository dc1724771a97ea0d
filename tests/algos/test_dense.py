from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.algos.dense import (
    RELU,
    TANH,
    activate,
    add_outer,
    add_sparse_outer,
    clip_and_adam,
    dot,
    matmul_bt,
    sparse_row_times,
    through_activation,
)
from fasttrain.batch import Float32Array


def random_array(seed: int, *shape: int) -> Float32Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(st.integers(1, 5), st.integers(1, 13), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_products_equal_numpys(fours: int, n: int, k: int, seed: int):
    rows = 4 * fours
    x, w = random_array(seed, rows, k + 3), random_array(seed + 1, n, k)  # x has columns to spare
    out = random_array(seed + 2, rows, n + 2)
    kept = out[:, n:].copy()
    matmul_bt(x, w, rows, out)
    np.testing.assert_allclose(out[:, :n], x[:, :k] @ w.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[:, n:], kept)
    assert dot(x[0], w[0], k) == pytest.approx(float(x[0, :k].astype(np.float64) @ w[0].astype(np.float64)), abs=1e-4)

    d = random_array(seed + 3, 8 * fours, n)
    inputs = random_array(seed + 4, 8 * fours, k)
    gradient = random_array(seed + 5, n, k)
    expected = gradient + d.T @ inputs
    add_outer(inputs, d, 8 * fours, gradient)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 11), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_sparse_rows_equal_dense_ones(nonzero: int, n: int, seed: int):
    columns = np.random.default_rng(seed).choice(12, nonzero, replace=False).astype(np.int32)
    values, w = random_array(seed, nonzero), random_array(seed + 1, 12, n)
    dense = np.zeros(12, np.float32)
    dense[columns] = values
    out = random_array(seed + 2, n)
    expected = out + dense @ w
    sparse_row_times(values, columns, w, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    d = random_array(seed + 3, n)
    gradient = w.copy()
    add_sparse_outer(values, columns, d, gradient)
    np.testing.assert_allclose(gradient, w + np.outer(dense, d), rtol=1e-5, atol=1e-5)


def test_tanh_to_float32_and_its_derivative():
    x = np.concatenate([np.linspace(-12, 12, 4001), [1e-30, -1e-8, 100.0, -1e30]]).astype(np.float32)
    a = x.copy()
    activate(a, len(a), TANH)
    np.testing.assert_allclose(a, np.tanh(x.astype(np.float64)), atol=3e-7)
    assert np.abs(a).max() <= 1.0 + 1e-6
    d = np.ones_like(a)
    through_activation(d, a, len(d), TANH)
    np.testing.assert_allclose(d, 1 - np.tanh(x.astype(np.float64)) ** 2, atol=1e-6)


def test_relu_and_its_derivative():
    a = np.array([-1.0, 0.0, 2.0, -3.0], np.float32)
    activate(a, 3, RELU)
    np.testing.assert_array_equal(a, [0.0, 0.0, 2.0, -3.0])
    d = np.array([5.0, 6.0, 7.0, 8.0], np.float32)
    through_activation(d, a, 3, RELU)
    np.testing.assert_array_equal(d, [0.0, 0.0, 7.0, 8.0])


@pytest.mark.parametrize("kind", [TANH, RELU])
def test_nan_stays_nan(kind: int):
    a = np.array([np.nan, 1.0], np.float32)
    activate(a, 2, kind)
    assert np.isnan(a[0])
    assert np.isfinite(a[1])


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
def test_clip_and_adam_is_torchs(max_grad_norm: float):
    start = random_array(0, 500)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Adam([parameter], lr=3e-3, eps=1e-5)
    ours, average, square = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(1, 21):
        gradient = random_array(step, 500)
        parameter.grad = torch.from_numpy(gradient.copy())
        torch.nn.utils.clip_grad_norm_([parameter], max_grad_norm)
        optimizer.step()
        clip_and_adam(ours, gradient, average, square, step, 3e-3, 0.9, 0.999, 1e-5, max_grad_norm)
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(average, optimizer.state[parameter]["exp_avg"].numpy(), rtol=1e-4, atol=1e-7)


def test_a_nan_gradient_is_not_hidden_by_clipping():
    parameters, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    gradient = np.array([1.0, np.nan, 1.0], np.float32)
    clip_and_adam(parameters, gradient, zeros.copy(), zeros.copy(), 1, 1e-3, 0.9, 0.999, 1e-5, 0.5)
    assert np.isnan(parameters).all()
