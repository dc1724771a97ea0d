"""Run folders of rl_zoo3, as it lays them out: made here by stock Stable-Baselines3 and files in its words."""

from __future__ import annotations

import functools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import yaml
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain_integrations.zoo import read_yaml, zoo_run
from messages import assert_says, wrong_inputs

PPO_ENTRY = {"n_envs": 2, "n_steps": 64, "batch_size": 32, "n_epochs": 1, "n_timesteps": 256.0, "policy": "MlpPolicy",
             "policy_kwargs": "dict(net_arch=[16])", "learning_rate": "lin_0.001"}  # fmt: skip


def lay_out(folder: Path, model: BaseAlgorithm, entry: dict[str, Any], algo: str, **arguments: Any) -> Path:
    """As rl_zoo3's `train` leaves it."""
    below = folder / "CartPole-v1"
    below.mkdir(parents=True)
    model.save(folder / "CartPole-v1.zip")
    if (statistics := model.get_vec_normalize_env()) is not None:
        statistics.save(str(below / "vecnormalize.pkl"))
    asked = {"algo": algo, "env": "CartPole-v1", "env_kwargs": None, "gym_packages": [], "seed": 3, **arguments}
    for name, values in (("config", entry), ("args", asked)):
        text = yaml.dump(OrderedDict(sorted(values.items())))
        assert text.startswith("!!python/object/apply:collections.OrderedDict")
        (below / f"{name}.yml").write_text(text)
    return folder


@functools.cache
def trained(norm: bool = False) -> PPO:
    env: Any = make_vec_env("CartPole-v1", 2, seed=1)
    env = VecNormalize(env) if norm else env
    return PPO(
        "MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=1, seed=1, policy_kwargs={"net_arch": [16]},
        learning_rate=lambda remaining: remaining * 1e-3, device="cpu",
    ).learn(256)  # fmt: skip


def mean_reward(model: BaseAlgorithm, env: Any) -> float:
    env.seed(1_000_003)
    rewards, _ = evaluate_policy(model, env, n_eval_episodes=4)
    return float(rewards)


def test_a_folder_is_evaluated_without_running_what_is_pickled_in_it(fasttrain: RunCommand, tmp_path: Path):
    model = trained()
    folder = lay_out(tmp_path / "CartPole-v1_1", model, {**PPO_ENTRY, "env_kwargs": {"sutton_barto_reward": False}},
                     "ppo", env_kwargs=(), tags=("a", 1))  # fmt: skip
    done = fasttrain("eval", f"run={folder}", "eval.episodes=4").ok()
    assert done.json("eval.json")["quality"]["greedy"]["mean_reward"] == mean_reward(
        model, make_vec_env("CartPole-v1", 4)
    )
    fasttrain("export", f"run={folder}", "format=torchscript").ok()
    found = zoo_run(folder, "model.zip")
    assert (found.config.num_envs, found.config.algo.net_arch, found.config.total_timesteps) == (2, (16,), 256)


def test_statistics_of_observations_take_trust(fasttrain: RunCommand, tmp_path: Path):
    model = trained(norm=True)
    folder = lay_out(tmp_path / "CartPole-v1_2", model, {**PPO_ENTRY, "normalize": True}, "ppo")
    told = "only vecnormalize.pkl, a pickle; --trust loads it"
    fasttrain("eval", f"run={folder}", "eval.episodes=4").refused(told)
    trusted = fasttrain("eval", f"run={folder}", "eval.episodes=4", "--trust").ok()
    env = VecNormalize.load(str(folder / "CartPole-v1" / "vecnormalize.pkl"), make_vec_env("CartPole-v1", 4))
    env.training = env.norm_reward = False
    assert trusted.json("eval.json")["quality"]["greedy"]["mean_reward"] == pytest.approx(mean_reward(model, env))


def test_statistics_of_rewards_are_not_needed(fasttrain: RunCommand, tmp_path: Path):
    entry = {**PPO_ENTRY, "normalize": "{'norm_obs': False, 'norm_reward': True}"}
    fasttrain("eval", f"run={lay_out(tmp_path / 'x', trained(), entry, 'ppo')}", "eval.episodes=2").ok()


def test_a_dqn_whose_last_model_is_missing_is_its_best(fasttrain: RunCommand, tmp_path: Path):
    model = DQN("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8, 8]}, buffer_size=100, device="cpu")
    entry = {"n_timesteps": 100, "policy": "MlpPolicy", "policy_kwargs": "dict(net_arch=[8, 8])", "train_freq": 256,
             "gradient_steps": -1}  # fmt: skip
    folder = lay_out(tmp_path / "CartPole-v1_1", model, entry, "dqn")
    assert "no best_model.zip there" in fasttrain("play", f"run={folder}", "model=best").err
    (folder / "CartPole-v1.zip").rename(folder / "best_model.zip")
    done = fasttrain("eval", f"run={folder}", "eval.episodes=2").ok()
    assert "CartPole-v1.zip: best_model.zip is used" in done.err
    (folder / "best_model.zip").unlink()
    assert (
        "no CartPole-v1.zip there; name the folder of a finished run of rl_zoo3"
        in fasttrain("eval", f"run={folder}").err
    )


def test_a_package_that_registers_the_env_is_named(tmp_path: Path):
    folder = lay_out(tmp_path / "x", trained(), PPO_ENTRY, "ppo", gym_packages=["my_game"])
    found = zoo_run(folder, "model.zip")
    assert found.config.env.id == "my_game:CartPole-v1"


@pytest.mark.parametrize("changed", wrong_inputs("folders of rl_zoo3"))
def test_what_is_no_run_is_told_in_one_line(fasttrain: RunCommand, tmp_path: Path, changed: str):
    """`changed`: the name of a file, and what is in it."""
    folder = lay_out(tmp_path / "x", trained(), PPO_ENTRY, "ppo")
    name, _, text = changed.partition(": ")
    (folder / "CartPole-v1" / name).write_text(text)
    done = fasttrain("eval", f"run={folder}")
    done.refused()
    assert_says("folders of rl_zoo3", changed, done.err.replace(f"{tmp_path}/", ""))
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 3_000, "config.yml: cannot be read as YAML"),
        ("a: 1\n" * 300_000, "config.yml is no YAML file of rl_zoo3"),
    ],
)
def test_deep_and_long_files_are_told_in_one_line(fasttrain: RunCommand, tmp_path: Path, text: str, told: str):
    folder = lay_out(tmp_path / "x", trained(), PPO_ENTRY, "ppo")
    (folder / "CartPole-v1" / "config.yml").write_text(text)
    fasttrain("eval", f"run={folder}").refused(told)


def test_a_file_that_names_its_own_parts_again_and_again_is_refused(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    bomb = tmp_path / "bomb.yml"
    bomb.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="bomb.yml is no YAML file of rl_zoo3"):
        read_yaml(bomb)
    bomb.write_text("&a [*a]")
    with pytest.raises(ConfigError):
        read_yaml(bomb)


def test_other_folders_are_none_of_rl_zoo3(tmp_path: Path):
    assert zoo_run(tmp_path, "model.zip") is None
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.yml").write_text("algo: ppo")
    assert zoo_run(tmp_path, "model.zip") is None
