"""Dense and sparse layers on the CPU for small nets: the arithmetic of the kernels, built on `simd.py`.

Weights are (inputs, outputs). Widths are padded to multiples of `simd.PAD`. The padding is zero, and stays zero in
forward, backward and Adam. The number of rows in a batch is a multiple of `simd.TILE_ROWS`.

On one AVX-512 core `add_product` reaches 114 GFLOP/s for float32, 32 × 64 × 64 (peak 118), and 110 for the gradient of
weights. `activate` takes 0.16 ns per tanh (torch.tanh: 2.4 ns).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import Float32Array, Int32Array, Int64Array
from fasttrain_kernels.jit import njit_inline, njit_inner
from fasttrain_kernels.simd import (
    LANES,
    PANEL,
    STRIP_VECTORS,
    TILE_HEIGHT,
    TILE_VECTORS,
    add_to_half_strip,
    add_to_narrow_strip,
    add_to_wide_strip,
    copy_panel,
    narrow_tile,
    panel,
    sum_half_strip,
    sum_narrow_strip,
    sum_wide_strip,
    wide_tile,
)

ACTIVATIONS = TANH, RELU, ELU, LEAKY_RELU = 0, 1, 2, 3
LARGEST = 1.7976931348623157e308  # for finite checks: with relaxed arithmetic math.isfinite (x - x == 0) is always True
COPY_FROM_ROWS = 32  # with fewer rows of `a`, copying panels of `b` saves no time
_TILE, _STRIP, _HALF = TILE_VECTORS * LANES, STRIP_VECTORS * LANES, 4 * LANES  # floats


@njit_inner
def add_product(
    a: Float32Array,  # (≥rows, k), any strides
    b: Float32Array,  # (k, n), n a multiple of PAD
    rows: int,  # number of rows, a multiple of TILE_ROWS
    out: Float32Array,  # (≥rows, n) in and out: the product is added
) -> None:
    """out[:rows] += a[:rows] @ b. If `a` is the transposed input of a layer, this adds the gradient of weights."""
    _product(a, b, out, 1, rows, out)


@njit_inner
def set_product(
    a: Float32Array,  # (≥rows, k)
    b: Float32Array,  # (k, n), n a multiple of PAD
    start: Float32Array,  # (n,)
    rows: int,  # number of rows, a multiple of TILE_ROWS
    out: Float32Array,  # (≥rows, n), overwritten
) -> None:
    """out[:rows] = start + a[:rows] @ b."""
    _product(a, b, start.reshape((1, len(start))), 0, rows, out)


@njit_inner
def _product(a: Float32Array, b: Float32Array, start: Float32Array, down: int, rows: int, out: Float32Array) -> None:
    """out[:rows] = start + a[:rows] @ b, with start[r × down] for row r.

    If `b` is larger than the L1 cache, its columns do not stay in the cache (rows of 2 KB use 2 of 64 cache sets). So
    one panel of columns after another is copied: 512 × 512 with AVX2 reaches 68 instead of 35 GFLOP/s.
    """
    k, n = b.shape
    if rows < COPY_FROM_ROWS or k * n <= PANEL:
        _tiles(a, b, start, down, rows, out)
        return
    copied, deep = panel(), PANEL // _TILE
    for first in range(0, k, deep):
        depth = min(deep, k - first)
        a_part = a[:, first : first + depth]
        for j in range(0, n, _TILE):
            width = min(_TILE, n - j)
            piece, part = copied[: depth * width].reshape((depth, width)), out[:, j : j + width]
            copy_panel(b, first, j, piece)
            if first == 0:
                _tiles(a_part, piece, start[:, j : j + width], down, rows, part)
            else:
                _tiles(a_part, piece, part, 1, rows, part)


@njit_inner
def _tiles(a: Float32Array, b: Float32Array, start: Float32Array, down: int, rows: int, out: Float32Array) -> None:
    n = b.shape[1]
    j = 0
    while j + _TILE <= n:
        for i in range(0, rows, TILE_HEIGHT):
            wide_tile(a, i, b, j, start, down, out)
        j += _TILE
    while j < n:
        for i in range(0, rows, TILE_HEIGHT):
            narrow_tile(a, i, b, j, start, down, out)
        j += LANES


@njit_inner
def sum_rows(
    values: Float32Array,  # (m,)
    rows: Int32Array,  # (m,) row indices into w
    begin: int,
    end: int,
    w: Float32Array,  # (R, n), n a multiple of PAD
    start: Float32Array,  # (n,)
    out: Float32Array,  # (n,), overwritten
) -> None:
    """out = start + values @ w[rows], for the entries from `begin` to `end`: a layer with a sparse input.

    Observations of games are mostly zeros, in Skull King 211 of 248.
    """
    n = w.shape[1]
    j = 0
    while j + _STRIP <= n:
        sum_wide_strip(values, rows, begin, end, w, j, start, out)
        j += _STRIP
    while j + _HALF <= n:
        sum_half_strip(values, rows, begin, end, w, j, start, out)
        j += _HALF
    while j < n:
        sum_narrow_strip(values, rows, begin, end, w, j, start, out)
        j += LANES


@njit_inner
def add_to_rows(
    values: Float32Array,  # (m,)
    rows: Int32Array,  # (m,) row indices into out
    begin: int,
    end: int,
    d: Float32Array,  # (n,), n a multiple of PAD
    out: Float32Array,  # (R, n) in and out: the outer product is added
) -> None:
    """out[rows] += outer(values, d), for the entries from `begin` to `end`: the gradient of w in `sum_rows`."""
    n = out.shape[1]
    j = 0
    while j + _STRIP <= n:
        add_to_wide_strip(values, rows, begin, end, d, j, out)
        j += _STRIP
    while j + _HALF <= n:
        add_to_half_strip(values, rows, begin, end, d, j, out)
        j += _HALF
    while j < n:
        add_to_narrow_strip(values, rows, begin, end, d, j, out)
        j += LANES


@njit_inner
def sparse_forward(lists: Any, order: Int64Array, w: Float32Array, bias: Float32Array, out: Float32Array) -> None:
    """out[:m] = bias + inputs @ w, for m rows; `order`: their indices (m,) in `lists`; w (inputs, n).

    The loop takes all rows for one strip of columns, then the next strip, so that a strip stays in the cache.
    """
    n = w.shape[1]
    for j in range(0, n, _STRIP):
        width = min(_STRIP, n - j)
        for r in range(len(order)):
            row = order[r]
            sum_rows(lists.values, lists.columns, lists.starts[row], lists.starts[row + 1], w[:, j : j + width],
                     bias[j : j + width], out[r, j : j + width])  # fmt: skip


@njit_inner
def sparse_backward(lists: Any, order: Int64Array, d: Float32Array, out: Float32Array) -> None:
    """out += inputs.T @ d: the gradient of w (inputs, n) in `sparse_forward`; d: the gradients of its outputs."""
    n = out.shape[1]
    for j in range(0, n, _STRIP):
        width = min(_STRIP, n - j)
        for r in range(len(order)):
            row = order[r]
            add_to_rows(lists.values, lists.columns, lists.starts[row], lists.starts[row + 1], d[r, j : j + width],
                        out[:, j : j + width])  # fmt: skip


@njit_inline
def tanh_of(v: Any) -> Any:
    """Tanh by the rational approximation of Eigen and XLA (degree 13 ÷ degree 6, error 2e-7), for |v| below 7.9054."""
    f = np.float32
    s = v * v
    p = f(-2.76076847742355e-16) * s + f(2.00018790482477e-13)
    p = p * s + f(-8.60467152213735e-11)
    p = p * s + f(5.12229709037114e-08)
    p = p * s + f(1.48572235717979e-05)
    p = p * s + f(6.37261928875436e-04)
    p = p * s + f(4.89352455891786e-03)
    q = f(1.19825839466702e-06) * s + f(1.18534705686654e-04)
    q = q * s + f(2.26843463243900e-03)
    q = q * s + f(4.89352518554385e-03)
    return v * p / q


@njit_inner
def activate(x: Float32Array, kind: int) -> None:
    """Replace x by tanh(x), relu(x), elu(x) with alpha 1 or leaky_relu(x) with slope 0.01; by NaN for another kind.

    Beyond ±7.9 tanh is ±1 in float32. exp(x) - 1 = 2 t / (1 - t) with t = tanh(x / 2) keeps its digits near 0. NaN
    stays NaN, because comparisons with NaN are False. Every branch computes a new value: if one stored x[c]
    unchanged, LLVM would use masked stores, which take 4 times as long on processors of AMD.
    """
    f = x.dtype.type
    zero, one, limit = f(0), f(1), f(7.90531110763549805)
    if kind == RELU:
        for c in range(len(x)):
            v = zero if x[c] < zero else x[c]
            x[c] = v * (one if v > zero else zero)
    elif kind == TANH:
        for c in range(len(x)):
            v = x[c]
            x[c] = tanh_of(limit if v > limit else (-limit if v < -limit else v))
    elif kind == ELU:
        for c in range(len(x)):
            v = x[c]
            t = tanh_of(max(f(0.5) * (v if v < zero else zero), -limit))
            x[c] = (t + t) / (one - t) + (zero if v < zero else v)
    elif kind == LEAKY_RELU:
        for c in range(len(x)):
            x[c] *= f(0.01) if x[c] < zero else one
    else:
        for c in range(len(x)):
            x[c] = f(math.nan)


@njit_inner
def through_activation(d: Float32Array, a: Float32Array, kind: int) -> None:
    """d *= derivative of the activation, computed from the activation's output a."""
    f = d.dtype.type
    if kind == RELU:
        for c in range(len(d)):
            d[c] = d[c] if a[c] > 0 else f(0)
    elif kind == TANH:
        for c in range(len(d)):
            d[c] *= f(1) - a[c] * a[c]
    elif kind == ELU:
        for c in range(len(d)):
            d[c] *= f(1) if a[c] > 0 else f(1) + a[c]
    elif kind == LEAKY_RELU:
        for c in range(len(d)):
            d[c] *= f(1) if a[c] > 0 else f(0.01)
    else:
        for c in range(len(d)):
            d[c] = f(math.nan)


@njit_inner
def clip_and_adam(
    parameters: Float32Array,  # (P,) in and out
    gradient: Float32Array,  # (P,)
    exp_avg: Float32Array,  # (P,) in and out
    exp_avg_sq: Float32Array,  # (P,) in and out
    step: int,  # number of this Adam step, from 1
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    max_grad_norm: float,
    loss: float = 0.0,
    guarded: bool = False,
) -> float:
    """Clip the gradient to `max_grad_norm` (like `clip_grad_norm_`), then take a step of torch's Adam.

    Returns the norm before clipping. If `guarded`, and the norm or the loss is not finite, returns NaN without a step.
    """
    f = parameters.dtype.type
    square = 0.0
    for c in range(len(gradient)):
        square += gradient[c] * gradient[c]
    norm = square**0.5
    if guarded and not abs(norm + loss) <= LARGEST:
        return math.nan
    scale = max_grad_norm / (norm + 1e-6)
    scale = 1.0 if scale > 1.0 else scale  # NaN stays NaN
    bias1, bias2 = 1.0 - beta1**step, 1.0 - beta2**step
    step_size, root_bias2 = f(learning_rate / bias1), f(bias2**0.5)
    b1, b2, c1, c2, clip, e = f(beta1), f(beta2), f(1.0 - beta1), f(1.0 - beta2), f(scale), f(eps)
    for c in range(len(parameters)):
        g = gradient[c] * clip
        m = b1 * exp_avg[c] + c1 * g
        v = b2 * exp_avg_sq[c] + c2 * g * g
        exp_avg[c], exp_avg_sq[c] = m, v
        parameters[c] -= step_size * m / (v ** f(0.5) / root_bias2 + e)
    return float(norm)


@njit_inner
def worst_of(numbers: Float32Array) -> int:
    """Index of the first number that is NaN or infinite; if all are finite, the index of the largest |number|."""
    worst = 0
    for c in range(len(numbers)):
        if not abs(numbers[c]) <= LARGEST:
            return c
        if abs(numbers[c]) > abs(numbers[worst]):
            worst = c
    return worst
