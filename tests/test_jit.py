from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from fasttrain.jit import njit, use_threads


def run(folder: Path) -> str:
    code = "from game.caller import score; print(score(3)); print(sum(score.stats.cache_hits.values()))"
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_is_cached_and_an_edited_neighbour_invalidates_it(tmp_path: Path):
    package = tmp_path / "game"
    package.mkdir()
    (package / "__init__.py").touch()
    head = "from fasttrain.jit import njit\n"
    (package / "rule.py").write_text(head + "@njit\ndef rule(x):\n    return 2 * x\n")
    (package / "caller.py").write_text(
        head + "from game.rule import rule\n@njit\ndef score(x):\n    return rule(x) + 1\n"
    )
    assert run(tmp_path).split() == ["7", "0"]
    assert run(tmp_path).split() == ["7", "1"], "the second process must find the machine code on disk"
    (package / "rule.py").write_text(head + "@njit\ndef rule(x):\n    return 10 * x\n")
    assert run(tmp_path).split() == ["31", "0"], "old machine code of the caller was played on"


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
