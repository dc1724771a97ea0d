"""The campaign of scripts/faults.py on caches of compiled kernels, a few times; one process forks the others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
def test_caches_that_are_cold_shared_damaged_or_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    said: list[str] = []
    found = importlib.import_module("faults").cold_cache(4, 1, tmp_path / "caches", said.append)
    assert found["bad"] == []
    assert found["kinds"] == {"at_once": 1, "killed": 1, "damaged": 1, "unwritable": 1}
    assert (found["cases"], found["right"], found["warm"], found["said_once"]) == (4, 4, 3, 1)
