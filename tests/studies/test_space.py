from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.config import Config
from fasttrain_studies.space import Range, changes, not_worth, space_of, start_of, text_of, update_ratio
from study_toys import PPO

DQN = {**PPO, "num_envs": 12, "vec_env": "shared", "workers": 2, "batch_size": 256, "updates_per_step": 10,
       "warmup_steps": 2000}  # fmt: skip


def start(folder: Path, config: Config, flags: Mapping[str, Any]) -> dict[str, Any]:
    (folder / "plan.json").write_text(json.dumps({"flags": [{"flag": k, "effective": v} for k, v in flags.items()]}))
    return start_of(config, folder)


def test_for_speed_it_lies_around_what_ran(tmp_path: Path):
    config = configured("+profile=speed")
    own = start(tmp_path, config, PPO)
    assert space_of(config, own, 4, {"batch_size"}, speed=True, learning=False) == {
        "num_envs": [64, 128, 256, 512, 1024],
        "torch_threads": [1, 4],
        "fused_update": ["on", "off"],
    }
    dqn = configured("+profile=speed", "algo=dqn")
    space = space_of(dqn, start(tmp_path, dqn, DQN), 4, (), speed=True, learning=False)
    assert (space["updates_per_step"], space["workers"]) == ([5, 10, 20], [2, 4, 8])
    assert (space["num_envs"], space["batch_size"]) == ([3, 6, 12, 24, 48], [64, 128, 256, 512, 1024])


def test_for_learning_it_has_the_settings_of_the_algorithm(tmp_path: Path):
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "algo.clip_range=linear_0.2")
    space = space_of(config, start(tmp_path, config, PPO), 4, (), speed=False, learning=True)
    assert space["algo.learning_rate"] == Range(1e-4, 1e-2, log=True)
    assert space["algo.gae_lambda"] == [0.8, 0.9, 0.95, 0.98, 1.0]
    assert space["algo.n_epochs"] == [2, 5, 10, 20]
    assert {"num_envs", "algo.clip_range", "algo.n_steps", "warmup_steps"}.isdisjoint(space), "a schedule stays"
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "algo.n_steps=32")
    space = space_of(config, start(tmp_path, config, PPO), 4, (), speed=False, learning=True)
    assert space["algo.n_steps"] == [8, 16, 32], "at least ten rollouts"
    assert "algo.rollout_size" not in space
    sac = configured("algo=sac", "env.id=Pendulum-v1")
    space = space_of(sac, start(tmp_path, sac, {**DQN, "updates_per_step": -1}), 4, (), speed=False, learning=True)
    assert space["algo.tau"] == [0.00125, 0.0025, 0.005, 0.01, 0.02]
    assert space["warmup_steps"] == [500, 1000, 2000, 4000, 8000]
    assert {"algo.ent_coef", "updates_per_step", "algo.n_epochs"}.isdisjoint(space), "auto stays"


def test_rounds_of_episodes_stay_with_one_env(tmp_path: Path):
    config = configured("algo=sac", "env.id=Pendulum-v1", "num_envs=1", "algo.train_freq=[1,episode]")
    own = start(tmp_path, config, {**DQN, "num_envs": 1, "vec_env": "dummy", "updates_per_step": -1})
    assert not {"num_envs", "updates_per_step"} & {*space_of(config, own, 4, (), speed=True, learning=True)}


def test_a_space_of_the_user(tmp_path: Path):
    typed = "tune.space={num_envs:[8,16],algo.n_epochs:{low:2,high:20},algo.learning_rate:null}"
    config = configured("+profile=speed", typed)
    space = space_of(config, start(tmp_path, config, PPO), 4, {"num_envs"}, speed=True, learning=False)
    assert space == {"num_envs": [8, 16], "algo.n_epochs": Range(2, 20), "algo.learning_rate": Range(1e-4, 1e-2, True)}
    assert space["algo.n_epochs"].whole
    assert [text_of(own) for own in space.values()] == ["8/16", "2–20", "0.0001–0.01"]
    config = configured("+profile=speed", "tune.space={algo.ent_coef:{low:0.0,high:1.0}}")
    space = space_of(config, start(tmp_path, config, PPO), 4, (), speed=False, learning=True)
    assert not space["algo.ent_coef"].whole, "the setting has numbers with fractions"
    config = configured("+profile=speed", "tune.space={workers:null}")
    with pytest.raises(ConfigError, match="tune.space: workers has no usual values here"):
        space_of(config, start(tmp_path, config, PPO), 4, (), speed=True, learning=True)


def test_update_ratios(tmp_path: Path):
    ppo, dqn = configured("+profile=speed"), configured("+profile=speed", "algo=dqn")
    own, of_dqn = start(tmp_path, ppo, PPO), start(tmp_path, dqn, DQN)
    assert update_ratio(ppo, {}, own) == 4 * 16 / 16384
    assert update_ratio(ppo, {"batch_size": 512}, own) == 4 * 32 / 16384
    assert update_ratio(ppo, {"algo.n_epochs": 2}, own) == 2 * 16 / 16384
    assert update_ratio(ppo, {"algo.rollout_size": 8192, "batch_size": 8192}, own) == 4 / 8192
    assert update_ratio(dqn, {"num_envs": 20}, of_dqn) == 0.5
    rounds = configured("+profile=speed", "algo=dqn", "algo.train_freq=4")
    assert update_ratio(rounds, {"num_envs": 20}, of_dqn) == 0.125
    assert update_ratio(rounds, {"updates_per_step": -1}, of_dqn) == 1.0


def test_algorithms_without_minibatches(tmp_path: Path):
    none = {**PPO, "num_envs": 8, "batch_size": "not applicable"}
    a2c, ars = configured("algo=a2c", "env.id=CartPole-v1"), configured("algo=ars", "env.id=CartPole-v1")
    own = start(tmp_path, a2c, none)
    assert update_ratio(a2c, {}, own) == 1 / own["algo.rollout_size"]
    assert not_worth(a2c, {}, own, update_ratio(a2c, {}, own)) == ""
    own = start(tmp_path, ars, none)
    assert not_worth(ars, {"num_envs": 512}, own, update_ratio(ars, {}, own)) == ""
    space = space_of(ars, own, 4, (), speed=True, learning=False)
    assert "fused_update" not in space, "there are no kernels"


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ({"num_envs": 1024}, ""),
        ({"batch_size": 2048}, "fewer updates per env step"),
        ({"num_envs": 32768}, "a rollout is smaller"),
        ({"algo.rollout_size": 512}, "a rollout is smaller than the minibatch"),
        ({"fused_update": "on", "use_amp": "on"}, "the kernels compute without"),
        ({"fused_update": "off", "use_amp": "on"}, ""),
        ({"num_envs": 4, "workers": 8}, "more workers than environments"),
    ],
)
def test_points_that_are_worth_a_trial(tmp_path: Path, point: dict[str, Any], said: str):
    config = configured("+profile=speed")
    found = not_worth(config, point, start(tmp_path, config, PPO), least_ratio=0.00390625)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_what_differs_from_the_start():
    found = changes({"num_envs": 256, "batch_size": 512, "algo.gamma": 0.9}, PPO)
    assert found == {"batch_size": 512, "algo.gamma": 0.9}
