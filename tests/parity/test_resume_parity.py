"""A resumed run equals one that was never interrupted, bit for bit.

One run leaves all its rests. It is resumed from some of them in copies of its folder, and what the copies come to
is compared with what it came to itself: the last checkpoint holds weights, optimizer, random streams, envs, buffers and
counters. What tells the time is left out.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from conftest import Finished, RunCommand
from fasttrain.saving import checkpointing
from fasttrain.saving.checkpointing import Checkpoints
from resume_cases import CASES, assert_equal, assert_equal_arrays, episodes_of, parts_of

# Beside training it is chance by which checkpoint an evaluation has come back; test_evaluator.py is about that.
FIXED = ("+profile=speed", "seed=5", "eval.episodes=2", "eval_async=false", "checkpoint.keep=99", "checkup=off")


@pytest.fixture(autouse=True)
def _a_checkpoint_of_no_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal before the first rollout leaves it."""
    at_rest = Checkpoints.at_rest
    looks = lambda self, steps, due, stop: at_rest(self, steps, due or not steps, stop)  # noqa: E731
    monkeypatch.setattr(Checkpoints, "at_rest", looks)


def resumed(fasttrain: RunCommand, folder: Path, last: str) -> Finished:
    """The run went on from the folder as it was at the checkpoint `last`, and with what was logged since."""
    for later in (folder / "checkpoints").iterdir():
        if later.name > last:
            shutil.rmtree(later)
    done = fasttrain("resume", f"run={folder}").ok()
    assert f"going on from {last}" in done.out
    return done


def points_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, fasttrain: RunCommand, trained: RunCommand):
    whole, again = (trained(*FIXED, *CASES[name]).folder for _ in range(2))
    points = points_of(whole)
    assert len(points) >= 5
    done = resumed(fasttrain, again, random.Random(name).choice(points[1:-1]))
    assert "warning" not in done.out
    assert_equal(again, whole)


@pytest.mark.parametrize("name", ["ppo-dummy-wrapped", "dqn-dummy"])
def test_a_checkpoint_of_no_steps_is_one_too(name: str, fasttrain: RunCommand, trained: RunCommand):
    whole, again = (trained(*FIXED, *CASES[name]).folder for _ in range(2))
    resumed(fasttrain, again, "step_000000000000")
    assert_equal(again, whole)


@pytest.mark.parametrize("name", ["maskable-native", "dqn-dummy"])
def test_writing_checkpoints_changes_no_number(
    name: str, fasttrain: RunCommand, trained: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    """Neither by steps nor by the clock, nor what is kept in memory for a crash."""
    case = [text for text in CASES[name] if not text.startswith("checkpoint_every")]
    by_steps = trained(*FIXED, *CASES[name])
    monkeypatch.setattr(checkpointing, "HOLD_MOST_BYTES", 0)
    without = fasttrain(*FIXED, *case, "checkpoint_every=0")
    monkeypatch.setattr(checkpointing, "HOLD_MOST_BYTES", 1 << 40)
    monkeypatch.setattr(checkpointing, "HOLD_SHARE", 1e12)
    monkeypatch.setattr(checkpointing, "TIMED_SHARE", 1e12)
    by_time = fasttrain(*FIXED, *case, "checkpoint_every=1e-9min")
    assert len(points_of(by_time.folder)) >= 5
    for other in (by_steps, by_time):
        assert episodes_of(other.folder) == episodes_of(without.folder)
        assert other.json("summary.json")["quality"] == without.json("summary.json")["quality"]
    assert_equal_arrays(parts_of(by_time.folder)[1], parts_of(by_steps.folder)[1])
