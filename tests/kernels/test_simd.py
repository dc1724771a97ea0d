from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compiled
from fasttrain_kernels.jit import njit
from fasttrain_kernels.simd import GROUP, PAD, TILE_ROWS, Tile, nonzero_bits


@njit
def bits_of(x: np.ndarray, at: int) -> int:
    return nonzero_bits(x, at)


@pytest.mark.parametrize("kind", [np.float32, np.bool_])
def test_bits_of_what_is_not_zero(kind: type):
    x = np.zeros(3 * GROUP, kind)
    x[[GROUP, GROUP + 5, 2 * GROUP - 1, 2 * GROUP]] = 1
    assert bits_of(x, GROUP) == 1 + 2**5 + 2 ** (GROUP - 1)
    assert bits_of(x, 0) == 0
    assert bits_of(x, GROUP + 5) == 1 + 2 ** (GROUP - 6) + 2 ** (GROUP - 5)
    if kind is np.float32:  # NaN is not zero, and minus zero is
        x[1:3] = np.nan, -0.0
        assert bits_of(x, 0) == 2


PRODUCTS = """
import numpy as np
from compiled import from_python
from fasttrain_kernels import simd
from fasttrain_kernels.dense import set_product
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
