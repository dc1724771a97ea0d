"""The campaign on caches of compiled kernels, a few times; one process forks the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def cold_cache(count: int, folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    script = Path(__file__).with_name("cold_cache.py")
    done = subprocess.run([sys.executable, script, str(count), "1", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
@pytest.mark.parametrize("count", [4, pytest.param(200, marks=[pytest.mark.campaign, pytest.mark.timeout(0)])])
def test_caches_that_are_cold_shared_damaged_or_unwritable(tmp_path: Path, count: int):
    found, each = cold_cache(count, tmp_path), count // 4
    assert found["bad"] == []
    assert found["kinds"] == {"at_once": each, "killed": each, "damaged": each, "unwritable": each}
    assert (found["cases"], found["right"], found["warm"], found["said_once"]) == (count, count, 3 * each, each)
