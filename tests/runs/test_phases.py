from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from conftest import RunCommand
from fasttrain import PPO
from fasttrain.runs.phases import Phases
from messages import assert_says, wrong_inputs
from toys import Corridor


class Phased(Corridor):
    """Bids in its first step."""

    def reset(self, **given: Any) -> Any:
        observation, info = super().reset(**given)
        return observation, {**info, "phase": "bid"}

    def step(self, action: int) -> Any:
        *answer, info = super().step(action)
        return (*answer, {**info, "phase": "play"})


SMALL = ("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.net_arch=[8]", "checkup=off",
         "total_timesteps=512", "eval.episodes=2", "report=true")  # fmt: skip


def test_each_phase_has_means_of_its_own_rows() -> None:
    model = object.__new__(PPO)
    model.observation_space, model._vec_normalize_env = spaces.Box(0, 1, (3,)), None
    model.env = SimpleNamespace(unwrapped=SimpleNamespace(observation_space=model.observation_space))  # type: ignore[assignment]
    steps, envs = 4, 2
    seen = np.zeros((steps, envs, 3), np.float32)
    seen[:2, :, 1] = seen[2:, :, 2] = 1
    numbers = np.arange(8, dtype=np.float32).reshape(steps, envs)
    rows = np.array([0, 1, 2, 3, 4, 5, 6])  # the last one is no transition
    storage: Any = SimpleNamespace(
        num_steps=steps, num_envs=envs, rows=rows, observations=seen, values=0 * numbers, returns=-numbers,
        log_probs=numbers, rewards=2 * numbers,
    )  # fmt: skip
    model.rollout_buffer = SimpleNamespace(storage=storage)
    phases = Phases({"bid": 1, "play": 2, "never": 0}, model)
    phases.take_rollout()
    phases.take_rollout()
    assert phases.to_dict()["bid"] == {
        "steps": 8, "share": 4 / 7, "reward": 3.0, "value": 0.0, "value_error": 1.5, "log_prob": 1.5
    }  # fmt: skip
    assert phases.to_dict()["play"]["steps"] == 6
    assert phases.to_dict()["play"]["value_error"] == 5.0
    assert phases.to_dict()["never"]["reward"] is None


def test_a_run_reports_them_and_goes_on_counting(fasttrain: RunCommand) -> None:
    run = fasttrain(*SMALL, "env.phases={bid: 175}", "checkpoint_every=256")
    told = run.json("summary.json")["phases"]["bid"]
    assert 60 < told["steps"] < 120, "10 bids in 65 decisions of a game; early rounds are short"
    assert told["reward"] == 0.0
    fasttrain("resume", f"run={run.folder}", "total_timesteps=768").ok()
    assert run.json("summary.json")["phases"]["bid"]["steps"] > told["steps"] + 20


def test_an_infos_phase_becomes_a_column(fasttrain: RunCommand) -> None:
    wrapper = "[{wrapper: 'fasttrain.envs.wrappers:InfoOneHot', key: phase, values: [bid, play]}]"
    env = ("algo=ppo", "env.entry_point=test_phases:Phased", "vec_env=dummy", f"env.wrappers={wrapper}")
    told = fasttrain(*SMALL, *env, "env.phases={bid: 3, play: 4}").json("summary.json")["phases"]
    assert told["bid"]["steps"] + told["play"]["steps"] == 512
    assert told["bid"]["steps"] == pytest.approx(512 / 16, rel=0.3)
    stacked = fasttrain(*SMALL, *env, "env.phases={bid: 3, play: 4}", "env.frame_stack=2").ok()
    told = stacked.json("summary.json")["phases"]
    assert told["bid"]["steps"] + told["play"]["steps"] == 512, (
        "of the newest frame: the one before it is empty at first"
    )


@pytest.mark.parametrize("typed", wrong_inputs("phases"))
def test_phases_that_cannot_be_read_are_refused(typed: str, fasttrain: RunCommand) -> None:
    done = fasttrain(*[text for text in SMALL if "algo=dqn" not in typed or "rollout" not in text], *typed.split())
    done.refused()
    assert_says("phases", typed, done.err)
