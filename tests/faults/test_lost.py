"""The campaigns of lost.py, a few times each: nothing is lost to an error, nothing is written over."""

from __future__ import annotations

import sys
from pathlib import Path

import lost
import pytest
from injector import Nursery

HORIZON = 1000  # of 3,000 in the campaigns

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork"),
]


@pytest.mark.campaign
def test_errors_in_late_steps_leave_model_and_checkpoint(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ("PPO, shared", "DQN, dummy", "MaskablePPO, native")
    fewer = {name: (*lost.LATE_ERRORS[name], f"total_timesteps={HORIZON}") for name in names}
    monkeypatch.setattr(lost, "LATE_ERRORS", fewer)
    monkeypatch.setattr(lost, "HORIZON", HORIZON)
    found = lost.late_errors(3, 1, tmp_path, lambda line: None, nursery)
    assert found["bad"] == []
    assert found["errors"] == found["left"] == found["resumed"] == found["equal"] == 3


def test_nothing_is_written_over(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fewer = {"PPO, dummy": (*lost.LATE_ERRORS["PPO, dummy"], f"total_timesteps={HORIZON}")}
    monkeypatch.setattr(lost, "LATE_ERRORS", fewer)
    found = lost.overwrites(5, 1, tmp_path, lambda line: None, nursery)
    assert found["bad"] == []
    assert (found["folders"], found["refused"], found["written_over"]) == (5, 5, 0)
    assert set(found["kinds"]) == set(lost.HELD)
