"""Processes that compile the same kernels at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
@pytest.mark.parametrize("count", [1, pytest.param(100, marks=[pytest.mark.campaign, pytest.mark.timeout(0)])])
def test_a_cold_cache_that_several_fill_at_once_is_whole(tmp_path: Path, count: int):
    command = [sys.executable, Path(__file__).with_name("cold_cache.py"), str(count), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(tmp_path.iterdir())) == count
