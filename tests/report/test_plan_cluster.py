"""plan-cluster: the formula, its error for other numbers of actors, the plan, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.cli import main


def stored(folder: Path, actors: int, waited_ms: float, learner_ms: float, **more: object) -> Path:
    """A folder like that of a finished training: 10,000 steps, 100 episodes; times in ms per 1,000 env steps."""
    folder.mkdir(parents=True)
    config = {"cluster": {"engine": "ray", "actors": actors}, "schedule": "lockstep", "num_envs": 8,
              "total_timesteps": 10_000, "algo": {"rollout_size": 1_000}, **more}  # fmt: skip
    wall_s = 10 * (waited_ms + learner_ms) / 1000
    summary = {"env_steps": 10_000, "episodes": 100,
               "perf": {"env_steps": 10_000, "wall_s": wall_s, "env_step_ms": waited_ms}}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps({"config": config}))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def said(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    assert main(["plan-cluster", *typed]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_plan_of_a_sweep_and_the_error_of_its_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored(tmp_path / "1", 2, waited_ms=2750.0, learner_ms=500.0)  # 3.25 ms a step: 308 steps/s
    stored(tmp_path / "0", 1, waited_ms=5000.0, learner_ms=500.0)  # 5.5 ms a step: 182 steps/s
    out = said(capsys, f"run={tmp_path}", "games_per_hour=18000", "cores=4", "price=2", "total_timesteps=3.6e6")
    assert f"1 182 182 {tmp_path / '0'} 2 308 333 +8.3 % {tmp_path / '1'}" in out
    assert "the learner takes 500 µs, an actor 5 ms" in out
    # 18,000 games of 100 steps are 500 steps/s: 2 ms a step, of which 1.5 are left for 5 ms of work: 4 actors
    assert "18,000 games an hour of 100 env steps are 500 steps/s: cluster.actors=4 num_envs=32" in out
    assert "machines of 4 cores: 2" in out
    # 0.5 + 5 / 4 = 1.75 ms: 3.6 million steps take 1.75 h
    assert "3,600,000 steps in 1:45:00: 3.5 machine-hours, 7.00 at 2 for a machine and hour" in out
    assert "warning" not in out


def test_with_a_continuous_schedule_the_longer_side_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = stored(tmp_path / "run", 1, waited_ms=4500.0, learner_ms=500.0, schedule="continuous")
    out = said(capsys, f"run={run}", "games_per_hour=36000", "cores=16")
    assert "are 1,000 steps/s: cluster.actors=5 num_envs=40" in out  # 5 ms ÷ 5 actors, beside 0.5 ms of the learner
    assert "only one number of actors was measured" in out
    out = said(capsys, f"run={run}", "games_per_hour=71000")
    assert "cluster.actors=10" in out


def test_a_wrong_formula_and_short_rollouts_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored(tmp_path / "a", 1, waited_ms=500.0, learner_ms=10.0)
    stored(tmp_path / "b", 4, waited_ms=400.0, learner_ms=10.0)
    out = said(capsys, f"run={tmp_path}", "games_per_hour=360000")
    assert "warning: the formula is wrong by more than 10%" in out
    assert "cluster.actors=6" in out
    assert "would work 83.3 ms a rollout, less than 100 ms" in out
    assert "use algo.rollout_size=1200" in out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ((), "plan-cluster needs run=… and games_per_hour=…"),
        (("run=.", "games_per_hour=5", "speed=3"), "not speed"),
        (("run=.", "games_per_hour=many"), "games_per_hour=many: expected a number above 0"),
        (("run=.", "games_per_hour=5", "cores=1.5"), "cores=1.5: expected a whole number above 0"),
        (("run=nowhere", "games_per_hour=5"), "run=nowhere: no such folder"),
        (("run=.", "games_per_hour=5"), "no finished training with cluster=ray there"),
        (("run=slow", "games_per_hour=1e6"), "the learner alone takes 10 ms per env step, enough for 3,600 games"),
    ],
)
def test_wrong_input(
    typed: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if "slow" in str(typed):
        stored(tmp_path / "slow", 1, waited_ms=500.0, learner_ms=10_000.0)
    assert main(["plan-cluster", *typed]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
