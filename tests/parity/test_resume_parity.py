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
from resume_cases import CASES, PPO, assert_equal, assert_equal_arrays, episodes_of, parts_of


def trained(fasttrain: RunCommand, *arguments: str) -> Finished:
    # Beside training it is chance by which checkpoint an evaluation has come back; test_evaluator.py is about that.
    fixed = ("eval.episodes=2", "eval_async=false", "checkpoint.keep=99", "checkup=off")
    done = fasttrain("+profile=speed", "seed=5", *arguments, *fixed)
    assert done.exit_code == 0, done.err
    return done


def interrupted(whole: Path, into: Path, last: str) -> Path:
    """The folder as it was when the run came to the checkpoint `last`, and with what was logged since."""
    shutil.copytree(whole, into)
    for later in (into / "checkpoints").iterdir():
        if later.name > last:
            shutil.rmtree(later)
    return into


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, fasttrain: RunCommand, tmp_path: Path):
    whole = trained(fasttrain, *CASES[name]).folder
    points = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert len(points) >= 5
    point = random.Random(name).choice(points[:-1])
    folder = interrupted(whole, tmp_path / point, point)
    done = fasttrain("resume", f"run={folder}")
    assert done.exit_code == 0, done.err
    assert "warning" not in done.out
    assert_equal(folder, whole)


@pytest.mark.parametrize("name", ["ppo-dummy-wrapped", "dqn-dummy"])
def test_a_checkpoint_of_no_steps_too(
    name: str, fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a signal before the first rollout leaves it."""
    rest = Checkpoints.rest
    monkeypatch.setattr(Checkpoints, "rest", lambda self, steps, due, stop: rest(self, steps, due or not steps, stop))
    whole = trained(fasttrain, *CASES[name]).folder
    folder = interrupted(whole, tmp_path / "resumed", "step_000000000000")
    done = fasttrain("resume", f"run={folder}")
    assert done.exit_code == 0, done.err
    assert "going on from step_000000000000" in done.out
    assert_equal(folder, whole)


@pytest.mark.parametrize("name", ["maskable-native", "dqn-dummy"])
def test_writing_checkpoints_changes_no_number(name: str, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    """Neither by steps nor by the clock, nor what is kept in memory for a crash."""
    case = [text for text in CASES[name] if not text.startswith("checkpoint_every")]
    by_steps = trained(fasttrain, *CASES[name])
    with monkeypatch.context() as patched:
        patched.setattr(checkpointing, "HOLD_MOST_BYTES", 0)
        without = trained(fasttrain, *case, "checkpoint_every=0")
        patched.setattr(checkpointing, "HOLD_MOST_BYTES", 1 << 40)
        patched.setattr(checkpointing, "HOLD_SHARE", 1e12)
        kept = trained(fasttrain, *case, "checkpoint_every=0")
        patched.setattr(checkpointing, "TIMED_SHARE", 1e12)
        by_time = trained(fasttrain, *case, "checkpoint_every=1e-9min")
    assert not (kept.folder / "checkpoints").exists()
    assert len(list((by_time.folder / "checkpoints").iterdir())) >= 5
    for other in (by_steps, kept, by_time):
        assert episodes_of(other.folder) == episodes_of(without.folder)
        assert other.json("summary.json")["quality"] == without.json("summary.json")["quality"]
    assert_equal_arrays(parts_of(by_time.folder)[1], parts_of(by_steps.folder)[1])


def test_the_other_seed_is_another_run(fasttrain: RunCommand):
    """What the comparison above would say if something were different."""
    one, other = trained(fasttrain, *PPO), trained(fasttrain, *PPO, "seed=6")
    with pytest.raises(AssertionError):
        assert_equal(one.folder, other.folder)
