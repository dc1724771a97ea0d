"""What tune searches: the space around a plan, and which points are worth a trial."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import configured
from fasttrain.studies.tune import (
    changes,
    default_space,
    is_legal,
    legal_points,
    update_ratio,
)

PPO = {"num_envs": 256, "vec_env": "native", "batch_size": 1024, "torch_threads": 1, "fused_update": "on",
       "workers": "not applicable", "use_amp": "off", "use_compile": "off",
       "updates_per_step": "not applicable"}  # fmt: skip
DQN = {**PPO, "num_envs": 12, "vec_env": "shared", "workers": 2, "batch_size": 256, "updates_per_step": 10}


def plan(effective: dict[str, Any]) -> dict[str, Any]:
    return {"flags": [{"flag": name, "effective": value} for name, value in effective.items()]}


def test_the_space_lies_around_the_plan():
    assert default_space(configured("+profile=speed"), plan(PPO), cores=4) == {
        "num_envs": [64, 128, 256, 512, 1024],
        "batch_size": [512, 1024, 2048],
        "torch_threads": [1, 4],
        "fused_update": ["on", "off"],
    }
    space = default_space(configured("+profile=speed", "algo=dqn"), plan(DQN), cores=4)
    assert space["updates_per_step"] == [5, 10, 20]
    assert space["workers"] == [2, 4, 8]
    assert space["num_envs"] == [3, 6, 12, 24, 48]


def test_update_ratios():
    ppo, dqn = configured("+profile=speed"), configured("+profile=speed", "algo=dqn")
    assert update_ratio(ppo, {}, PPO) == 4 * 16 / 16384
    assert update_ratio(ppo, {"batch_size": 512}, PPO) == 4 * 32 / 16384
    assert update_ratio(ppo, {"algo.n_epochs": 2}, PPO) == 2 * 16 / 16384
    assert update_ratio(dqn, {"num_envs": 20}, DQN) == 0.5
    rounds = configured("+profile=speed", "algo=dqn", "algo.train_freq=4")
    assert update_ratio(rounds, {"num_envs": 20}, DQN) == 0.125
    assert update_ratio(rounds, {"updates_per_step": -1}, DQN) == 1.0


def test_rounds_of_episodes_stay_with_one_env():
    config = configured("algo=sac", "env.id=Pendulum-v1", "num_envs=1", "algo.train_freq=[1,episode]")
    space = default_space(config, plan({**DQN, "num_envs": 1, "vec_env": "dummy", "updates_per_step": -1}), cores=4)
    assert not {"num_envs", "updates_per_step"} & {*space}


@pytest.mark.parametrize(
    ("point", "legal"),
    [
        ({"num_envs": 1024}, True),
        ({"batch_size": 2048}, False),  # half as many updates
        ({"num_envs": 32768}, False),  # more than the rollout
        ({"fused_update": "on", "use_amp": "on"}, False),
        ({"fused_update": "off", "use_amp": "on"}, True),
        ({"num_envs": 4, "workers": 8}, False),
    ],
)
def test_points_that_are_worth_a_trial(point: dict[str, Any], legal: bool):
    assert is_legal(configured("+profile=speed"), point, PPO, least_ratio=0.00390625) == legal


def test_the_point_that_changes_nothing_is_left_out():
    space = {"num_envs": [128, 256], "batch_size": [512, 1024]}
    points = legal_points(configured("+profile=speed"), space, PPO, 0.00390625)
    assert len(points) == 3
    assert changes({"num_envs": 256, "batch_size": 512, "algo.gamma": 0.9}, PPO) == {
        "batch_size": 512,
        "algo.gamma": 0.9,
    }
