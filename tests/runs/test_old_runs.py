"""Runs that version 0.1 wrote are still read: evaluated, played, exported and drawn; only `resume` may refuse them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stable_baselines3 import DQN as StockDQN  # noqa: N811 - a class named like a constant

from conftest import RunCommand
from fasttrain.algos import q_networks as old_place
from fasttrain.engines.q_networks import DuelingDQNPolicy

STORED = Path(__file__).resolve().parent.parent / "golden" / "version_0_1"


@pytest.fixture(params=["skullking", "cartpole"])
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / request.param, tmp_path / "old"))


def test_it_is_evaluated_played_exported_and_drawn(fasttrain: RunCommand, old_run: Path):
    evaluated = fasttrain("eval", f"run={old_run}", "eval.episodes=4")
    assert evaluated.exit_code == 0, evaluated.err
    assert "mean reward" in evaluated.out
    exported = fasttrain("export", f"run={old_run}", "format=torchscript")
    assert exported.exit_code == 0, exported.err
    drawn = fasttrain("report", f"run={old_run}")
    assert drawn.exit_code == 0, drawn.err
    assert (old_run / "report.html").is_file()


def test_it_is_watched(fasttrain: RunCommand, tmp_path: Path):
    run = shutil.copytree(STORED / "skullking", tmp_path / "old")
    played = fasttrain("play", f"run={run}", "play.speed=1000", "play.episodes=1", "play.seed=1")
    assert played.exit_code == 0, played.err
    assert "game 1" in played.out


def test_resume_says_what_is_missing(fasttrain: RunCommand, old_run: Path):
    done = fasttrain("resume", f"run={old_run}", "total_timesteps=9000")
    assert done.exit_code == 2
    assert len(done.err.splitlines()) == 1


def test_a_pickled_policy_is_found_at_its_old_place():
    assert old_place.DuelingDQNPolicy is DuelingDQNPolicy
    model = StockDQN.load(STORED / "cartpole" / "model.zip", device="cpu", buffer_size=1)
    assert type(model.policy) is DuelingDQNPolicy
