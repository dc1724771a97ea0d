"""Environments that break while a run is going: one cause, an exit code, and what was there is kept."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from injector import Nursery, Training

from conftest import RunCommand

ENV = """
import gymnasium as gym, numpy as np
class Bad(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    def __init__(self, fault="none", at=205, start=0):
        self.fault, self.at, self.total = fault, at, 0
        self.action_space = gym.spaces.Discrete(3, start=start)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.t += 1
        self.total += 1
        now = self.total == self.at
        if now and self.fault == "raise":
            raise RuntimeError("the board fell")
        observation = np.full(3, np.nan if now and self.fault == "nan_observation" else 0.1 * self.t % 1, np.float32)
        reward = float("nan") if now and self.fault == "nan_reward" else 1.0
        over = self.t >= 10 and self.fault != "endless"
        return observation, reward, over, False, {}
    def action_masks(self):
        return np.full(3, not (self.fault == "stuck" and self.total >= self.at))
"""
SMALL = (
    "+profile=speed", "env.entry_point=bad:Bad", "num_envs=4", "total_timesteps=4000", "algo.rollout_size=400",
    "batch_size=100", "eval.episodes=4",
)  # fmt: skip
STOCK_WORKERS = (*SMALL, "vec_env=subproc", "num_envs=2", "hydra.run.dir=run")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(ENV)
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan_observation", "the observation of env 0, 1, 2, 3 is not finite"),
        ("nan_reward", "the reward of env 0, 1, 2, 3 is not finite"),
        ("stuck", "no legal action"),
    ],
)
def test_bad_data_is_named_and_the_episodes_are_kept(fasttrain: RunCommand, bad: Path, fault: str, message: str):
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
def test_an_env_that_raises_in_a_stock_worker_process(bad: Path, nursery: Nursery):
    # A process of its own: its workers write to its stderr, not to what pytest catches.
    training = Training(nursery, bad, [*STOCK_WORKERS, "env.kwargs.fault=raise"])
    assert training.end() == 1
    assert "the board fell" in training.said()
    # Two processes write to one terminal: which comes last is chance.
    assert "fasttrain: error: a worker process died; what it said stands above" in training.said().splitlines()


SHARED = (*SMALL, "vec_env=shared", "num_workers=2")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "RuntimeError: the board fell (bad.py:17, in step)"),
        ("nan_observation", "the observation is not finite"),
        ("nan_reward", "the reward is not finite"),
    ],
)
def test_a_failing_env_of_a_shared_worker_is_named(fasttrain: RunCommand, bad: Path, fault: str, message: str):
    done = fasttrain(*SHARED, "checkup=off", f"env.kwargs.fault={fault}")
    assert done.exit_code == 1
    assert done.err.startswith("fasttrain: error: env 0 (worker 0, seed 0, last action ")
    assert message in done.err
    assert done.err.count("\n") == 2, "what happened, and what was saved"
    assert message in done.json("summary.json")["error"]


def test_restart_goes_on_without_what_failed(fasttrain: RunCommand, bad: Path):
    done = fasttrain(
        *SHARED, "checkup=off", "env.kwargs.fault=raise", "env.on_env_error=restart", "total_timesteps=2000"
    )
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    # Every env fails at its own step 205; each has 500 or more to take and is rebuilt twice.
    workers = summary["perf"]["workers"]
    assert 8 <= workers["restarts"] <= 10
    assert workers["lost_steps"] == 5 * workers["restarts"], "205 = 20 whole episodes of 10 and 5 steps of the next"
    assert f"{workers['restarts']} envs or workers failed and were replaced" in done.out
    rows = (done.folder / "episodes.csv").read_text().splitlines()[1:]
    assert {row.split(",")[4] for row in rows} == {"10"}, "an episode that was cut by a failure is no episode"


def test_too_many_restarts_end_the_run_with_the_cause(fasttrain: RunCommand, bad: Path):
    done = fasttrain(*SHARED, "checkup=off", "env.kwargs.fault=raise", "env.on_env_error=restart")
    assert done.exit_code == 1
    assert "11 restarts within 10 minutes, 10 allowed; the last: env " in done.err
    assert "the board fell" in done.err


def test_restart_in_groups(fasttrain: RunCommand, bad: Path):
    done = fasttrain(*SHARED, "schedule=first_ready", "checkup=off", "env.kwargs.fault=raise",
                     "env.on_env_error=restart", "total_timesteps=2000")  # fmt: skip
    assert done.exit_code == 0, done.err
    assert "waiting_ms" in done.out
    assert done.json("summary.json")["perf"]["workers"]["lost_steps"] > 0
    plan = {row["flag"]: row["effective"] for row in done.json("plan.json")["flags"]}
    assert plan["schedule"] == "first_ready"


def test_an_evaluation_that_never_ends_is_cut(fasttrain: RunCommand, bad: Path):
    done = fasttrain(*SMALL, "vec_env=dummy", "env.kwargs.fault=endless", "eval.max_steps=50")
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert quality["end_reason"] == {"not ended": 1.0}
    assert quality["mean_length"] == 50.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env.kwargs.start=1"], "counts its actions from 1"),
        (["env.id=Pendulum-v1"], "needs Discrete or MultiDiscrete or MultiBinary"),
        (["env.id=Pendulum-v1", "algo=dqn"], "needs Discrete"),
        (["env.id=CartPole-v1", "algo=ppo", "algo.policy=CnnPolicy"], "needs images"),
        (["env.id=CartPole-v1", "algo=ppo", "algo.policy=MultiInputPolicy"], "does not suit"),
    ],
)
def test_spaces_that_do_not_suit(fasttrain: RunCommand, bad: Path, arguments: list[str], message: str):
    chosen = [] if any(a.startswith("env.id") for a in arguments) else ["env.entry_point=bad:Bad"]
    done = fasttrain("+profile=speed", *chosen, *arguments)
    assert done.exit_code == 2, done.err
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process group are POSIX")
def test_ctrl_c_to_the_whole_group_is_a_clean_stop_with_workers_too(bad: Path, nursery: Nursery):
    """SIGTERM to the group of such a run: test_group_signals.py."""
    training = Training(nursery, bad, [*STOCK_WORKERS, "total_timesteps=100000000"])
    assert training.until("make its plan", (training.run / "plan.json").exists)
    time.sleep(2.0)  # it learns by now
    training.send(signal.SIGINT, group=True)
    assert training.end() == 4, training.said()
    assert (training.run / "model.zip").is_file()
    assert "Traceback" not in training.said()
