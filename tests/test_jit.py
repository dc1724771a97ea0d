from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fasttrain.jit import njit, njit_inner


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


def test_a_kernel_is_compiled_once_whatever_stands_in_the_call():
    @njit_inner
    def double(x: int) -> int:
        return 2 * x

    @njit
    def both(x: int) -> int:
        return double(3) + double(4) + double(x)

    assert both(5) == 24
    assert len(double.signatures) == 1
