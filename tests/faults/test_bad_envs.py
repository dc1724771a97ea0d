"""Environments that break while a run is going: one cause, an exit code, and what was there is kept."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from injector import Nursery, Training

from conftest import RunCommand

SMALL = (
    "+profile=speed", "env.entry_point=bad_toys:Bad", "num_envs=4", "total_timesteps=2000", "algo.rollout_size=400",
    "batch_size=100", "eval.episodes=4",
)  # fmt: skip
SHARED = (*SMALL, "vec_env=shared", "num_workers=2", "checkup=off")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan_observation", "the observation of env 0, 1, 2, 3 is not finite"),
        ("nan_reward", "the reward of env 0, 1, 2, 3 is not finite"),
        ("stuck", "no legal action"),
    ],
)
def test_bad_data_is_named_and_the_episodes_are_kept(fasttrain: RunCommand, fault: str, message: str):
    done = fasttrain(*SMALL, "vec_env=dummy", f"env.kwargs.fault={fault}", "env.on_empty_mask=raise")
    assert done.exit_code == 1
    assert message in done.err
    assert done.err.count("\n") == 2, "what happened, and what was saved"
    assert f"model.zip and the checkpoint of 400 steps; fasttrain resume run={done.folder} goes on" in done.err
    summary = done.json("summary.json")
    assert summary["status"] == "crashed"
    assert message in summary["error"]
    assert len((done.folder / "episodes.csv").read_text().splitlines()) > 10
    assert (done.folder / "model.zip").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_an_env_that_raises_in_a_stock_worker_process(tmp_path: Path, nursery: Nursery):
    # A process of its own: its workers write to its stderr, not to what pytest catches.
    run = (*SMALL, "vec_env=subproc", "num_envs=2", "hydra.run.dir=run", "env.kwargs.fault=raise", "checkup=off")
    training = Training(nursery, tmp_path, run)
    assert training.end() == 1
    assert "the board fell" in training.said()
    # Two processes write to one terminal: which comes last is chance.
    assert "fasttrain: error: a worker process died; its last output is above" in training.said().splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="fork, signals")
@pytest.mark.parametrize(
    ("fault", "told", "run"),
    [
        ("hang", "hangs in {}: nothing came back for 1 s", ("+profile=speed", "vec_env=dummy", "env.step_timeout_s=1")),
        ("exit", "ends the process with code 3 in {}", ("+profile=speed", "vec_env=shared", "num_workers=2")),
        ("segfault", r"dies by signal 11 \(segmentation fault\) in {}", ("+profile=balance", "vec_env=auto")),
        ("eat", r"needs 0\.\d+ GB or more in {}", ("check",)),
        ("raise", r"RuntimeError: the board fell \(\S*bad_toys\.py:\d+, in fall\)", ("check",)),
    ],
)
def test_what_an_env_does_to_its_process_is_named_before_a_training(
    fault: str, told: str, run: tuple[str, ...], tmp_path: Path, nursery: Nursery
):
    arguments = ("env.entry_point=bad_toys:Bad", f"env.kwargs.fault={fault}", "env.kwargs.at=15", "algo=ppo",
                 "num_envs=4", "total_timesteps=512", "live=off", "report=false",
                 "hydra.run.dir=run")  # fmt: skip
    training = Training(nursery, tmp_path, (*run, *arguments), memory=600 << 20)
    assert training.end() == 2
    found = re.findall(told.format(r"step \d+ of (?:episode \d+ after )?seed \d+"), training.said())
    assert len(found) == 1, training.said()
    assert "Traceback" not in training.said()
    assert training.litter() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "bad_toys.py:16, in fall)"),
        ("nan_observation", "the observation is not finite"),
        ("nan_reward", "the reward is not finite"),
        ("exit", "; env.on_env_error=restart goes on without it"),
    ],
)
def test_a_failing_env_of_a_shared_worker_is_named(fasttrain: RunCommand, fault: str, message: str):
    done = fasttrain(*SHARED, f"env.kwargs.fault={fault}")
    assert done.exit_code == 1
    assert done.err.startswith("fasttrain: error: env 0 (worker 0, seed 0, last action ")
    assert message in done.err
    assert done.err.count("\n") == 2, "what happened, and what was saved"
    assert message in done.json("summary.json")["error"]


@pytest.mark.parametrize("schedule", ["lockstep", "first_ready"])
def test_restart_goes_on_without_what_failed(fasttrain: RunCommand, schedule: str):
    restart = ("env.kwargs.fault=raise", "env.on_env_error=restart", f"schedule={schedule}")
    done = fasttrain(*SHARED, *restart).ok()
    plan = {row["flag"]: row["effective"] for row in done.json("plan.json")["flags"]}
    assert plan["schedule"] == schedule
    # Every env fails at its own step 205; each has 500 or more to take and is rebuilt twice.
    workers = done.json("summary.json")["perf"]["workers"]
    assert 8 <= workers["restarts"] <= 10
    assert workers["lost_steps"] == 5 * workers["restarts"], "205 = 20 whole episodes of 10 and 5 steps of the next"
    assert f"{workers['restarts']} envs or workers were replaced (failed: {workers['restarts']})" in done.out
    rows = (done.folder / "episodes.csv").read_text().splitlines()[1:]
    assert {row.split(",")[4] for row in rows} == {"10"}, "an episode that was cut by a failure is no episode"


def test_an_evaluation_that_never_ends_is_cut(fasttrain: RunCommand):
    done = fasttrain(
        *SMALL, "vec_env=dummy", "env.kwargs.fault=endless", "eval.max_steps=50", "total_timesteps=400"
    ).ok()
    quality = done.json("summary.json")["quality"]
    assert quality["end_reason"] == {"not ended": 1.0}
    assert quality["mean_length"] == 50.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env.entry_point=bad_toys:Bad", "env.kwargs.start=1"], "counts its actions from 1"),
        (["env.id=Pendulum-v1"], "needs Discrete or MultiDiscrete or MultiBinary"),
        (["env.id=Pendulum-v1", "algo=dqn"], "needs Discrete"),
        (["env.id=CartPole-v1", "algo=ppo", "algo.policy=CnnPolicy"], "needs images"),
        (["env.id=CartPole-v1", "algo=ppo", "algo.policy=MultiInputPolicy"], "does not suit"),
    ],
)
def test_spaces_that_do_not_suit(fasttrain: RunCommand, arguments: list[str], message: str):
    fasttrain("+profile=speed", *arguments).refused(message)
