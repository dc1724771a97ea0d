from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled
from fasttrain.jit import njit
from fasttrain.kernels.simd import (
    GROUP,
    LANES,
    PAD,
    TILE_ROWS,
    Tile,
    count_bits,
    dot_rows,
    fetch,
    lowest_bit,
    nonzero_bits,
    transpose_tile,
)


@njit
def bits_of(x: np.ndarray, at: int) -> int:
    return nonzero_bits(x, at)


@njit
def low_and_count(bits: int) -> tuple[int, int]:
    return lowest_bit(bits), count_bits(bits)


@njit
def dots(w: np.ndarray, rows: np.ndarray, begin: int, end: int, h: np.ndarray, out: np.ndarray) -> None:
    dot_rows(w, rows, begin, end, h, w.shape[1], out)


@njit
def fetch_all(x: np.ndarray) -> None:
    fetch(x, 0, len(x))


@njit
def transpose(a: np.ndarray, at: int, down: int, out: np.ndarray, to: int, across: int) -> None:
    transpose_tile(a, at, down, out, to, across)


def test_registers_fit_the_padding():
    assert PAD % LANES == 0
    assert LANES in (4, 8, 16)


@pytest.mark.parametrize("kind", [np.float32, np.bool_])
def test_bits_of_what_is_not_zero(kind: type):
    x = np.zeros(3 * GROUP, kind)
    x[[GROUP, GROUP + 5, 2 * GROUP - 1, 2 * GROUP]] = 1
    assert bits_of(x, GROUP) == 1 + 2**5 + 2 ** (GROUP - 1)
    assert bits_of(x, 0) == 0
    assert bits_of(x, GROUP + 5) == 1 + 2 ** (GROUP - 6) + 2 ** (GROUP - 5)


def test_nan_is_not_zero_and_minus_zero_is():
    x = np.zeros(GROUP, np.float32)
    x[1], x[2] = np.nan, -0.0
    assert bits_of(x, 0) == 2


@given(st.integers(1, 2**62))
def test_lowest_bit_and_count(bits: int):
    assert low_and_count(bits) == ((bits & -bits).bit_length() - 1, bin(bits).count("1"))


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 2**16))
@settings(max_examples=40)
def test_dots_of_some_rows(pads: int, count: int, seed: int):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((10, PAD * pads)).astype(np.float32)
    h = rng.standard_normal(PAD * pads).astype(np.float32)
    rows = rng.integers(10, size=count + 3).astype(np.int32)
    out = np.full(count + 1, np.nan, np.float32)
    dots(w, rows, 2, 2 + count, h, out)
    np.testing.assert_allclose(out[:count], w[rows[2 : 2 + count]] @ h, rtol=1e-4, atol=1e-4)
    assert np.isnan(out[count])


def test_fetching_changes_nothing():
    x = np.arange(100, dtype=np.float32)
    fetch_all(x)
    fetch_all(x[:0])
    np.testing.assert_array_equal(x, np.arange(100))


def test_a_tile_is_transposed_and_nothing_beside_it():
    a = np.arange(40 * 41, dtype=np.float32).reshape(40, 41)
    out = np.full((42, 43), -1.0, np.float32)
    expected = out.copy()
    expected[5 : 5 + LANES, 6 : 6 + LANES] = a[3 : 3 + LANES, 2 : 2 + LANES].T
    transpose(a.ravel(), 3 * 41 + 2, 41, out.ravel(), 5 * 43 + 6, 43)
    np.testing.assert_array_equal(out, expected)


PRODUCTS = """
import numpy as np
from compiled import from_python
from fasttrain.kernels import simd
from fasttrain.kernels.dense import set_product
set_product = from_python(set_product)
rng = np.random.default_rng(0)
a, b, start = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 600), (600, 48), 48))
for rows, n, depth in ((8, 16, 5), (40, 48, 600)):  # in one piece, and copied
    out = np.zeros((rows, n), np.float32)
    set_product(a[:, :depth], b[:depth, :n], start[:n], rows, out)
    np.testing.assert_allclose(out, start[:n] + (a[:rows, :depth] @ b[:depth, :n]), rtol=1e-4, atol=1e-3)
print(simd.LANES, simd.TILE_HEIGHT, simd.TILE_VECTORS)
"""


def test_products_with_narrow_registers():
    path = os.pathsep.join((str(Path(compiled.__file__).parent), *sys.path))
    where = {**os.environ, "PYTHONPATH": path, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    ran = subprocess.run([sys.executable, "-c", PRODUCTS], env=where, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(number) for number in Tile.of(platform.machine(), "")]


@pytest.mark.parametrize(
    ("triple", "features", "registers", "tile"),
    [
        ("x86_64-unknown-linux-gnu", "+avx,+avx2,+avx512f,+avx512vl", 32, (16, 8, 2)),
        ("x86_64-unknown-linux-gnu", "+avx,+avx2,+fma,-avx512f", 16, (8, 4, 2)),
        ("x86_64-unknown-linux-gnu", "", 16, (4, 4, 2)),
        ("aarch64-unknown-linux-gnu", "+neon", 32, (4, 8, 2)),
        ("arm64-apple-darwin23", "", 32, (4, 8, 2)),
    ],
)
def test_a_tile_fits_the_registers(triple: str, features: str, registers: int, tile: tuple[int, int, int]):
    lanes, height, vectors = Tile.of(triple, features)
    assert (lanes, height, vectors) == tile
    assert 8 <= height * vectors < registers - vectors, "sums, columns of a row and a number"
    assert PAD % lanes == TILE_ROWS % height == 0
