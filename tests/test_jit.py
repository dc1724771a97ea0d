from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from fasttrain.jit import njit, use_threads


def test_arithmetic_is_strict():
    @njit
    def cancel(big: float, small: float) -> float:
        return (big + small) - big

    assert cancel(1e16, 1.0) == 0.0, "fastmath would simplify this to 1"


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_keeps_its_number_of_threads(tmp_path: Path, threads: int):
    """In a process of its own: numba starts its threads once, and sets torch's number when it does."""
    code = (
        "import torch\n"
        "from fasttrain.jit import use_threads\n"
        f"torch.set_num_threads({threads})\n"
        f"use_threads({3 - threads})\n"
        "print(torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"{threads}\n"), done.stderr


@pytest.mark.parametrize("count", [-1, 0, 1, 10_000])
def test_any_number_is_cut_to_what_there_is(count: int):
    use_threads(count)
    assert numba.get_num_threads() == (1 if count < 2 else numba.config.NUMBA_NUM_THREADS)
