"""The campaigns of lost.py, a few times each: nothing is lost to an error, nothing is written over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import lost
import pytest
from injector import Nursery

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork"),
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


def test_errors_in_late_steps_leave_model_and_checkpoint(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ("PPO, shared", "DQN, dummy", "MaskablePPO, native")
    monkeypatch.setattr(lost, "LATE_ERRORS", {name: lost.LATE_ERRORS[name] for name in names})
    found = lost.late_errors(3, 1, tmp_path, lambda line: None, nursery)
    assert found["bad"] == []
    assert found["errors"] == found["left"] == found["resumed"] == found["equal"] == 3


def test_nothing_is_written_over(nursery: Nursery, tmp_path: Path):
    found = lost.overwrites(5, 1, tmp_path, lambda line: None, nursery)
    assert found["bad"] == []
    assert (found["folders"], found["refused"], found["written_over"]) == (5, 5, 0)
    assert set(found["kinds"]) == set(lost.HELD)
