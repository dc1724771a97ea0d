from __future__ import annotations

import importlib
from pathlib import Path

import numba
import pytest

from fasttrain import jit
from fasttrain.errors import ConfigError
from fasttrain_kernels.jit import njit, njit_inner


def test_numba_without_its_compiler_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set"):
        importlib.reload(jit)


def test_arithmetic_is_strict():
    @njit
    def cancel(big: float, small: float) -> float:
        return (big + small) - big

    assert cancel(1e16, 1.0) == 0.0, "fastmath would simplify this to 1"


def test_a_kernel_is_compiled_once_whatever_stands_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # found compiled, it would call for no inner one

    @njit_inner
    def double(x: int) -> int:
        return 2 * x

    @njit
    def both(x: int) -> int:
        return double(3) + double(4) + double(x)

    assert both(5) == 24
    assert len(double.signatures) == 1
