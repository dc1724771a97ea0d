"""In small: an engine that does everything wrong, and frames that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_faults import KINDS, frames, trainings

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")


@pytest.mark.filterwarnings("ignore:daemon . takes . games at once")
def test_a_training_outlives_an_engine_that_does_everything_wrong(tmp_path: Path):
    found = trainings(1200, 3, tmp_path / "run", print, share=0.0025, starts=0.04)
    assert found["bad"] == []
    assert found["decisions"] >= 1200
    assert sum(found["faults"].values()) >= 30
    assert len({*KINDS} & found["faults"].keys()) >= 8
    assert found["lost"] > 10
    assert found["transitions"] > 700


def test_wrong_frames_lose_games_and_nothing_else(tmp_path: Path):
    found = frames(10_000, 5, tmp_path, print)
    assert found["bad"] == []
    assert found["understood"] > 100
    assert {"garbage", "bad message", "oversize"} <= found["lost_by_cause"].keys()
