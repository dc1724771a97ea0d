"""An imported entry of rl_zoo3 trains as a script of stock Stable-Baselines3 with the same values: the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from conftest import Finished, RunCommand
from fasttrain.cli import main

PPO_ENTRY = """
defaults: &usual
  policy: MlpPolicy
  n_envs: 4
CartPole-v1:
  <<: *usual
  n_timesteps: !!float 1e3
  normalize: "dict(norm_obs=True, norm_reward=False)"
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  gamma: 0.98
  n_epochs: 3
  ent_coef: 0.01
  learning_rate: lin_0.001
  clip_range: lin_0.2
  policy_kwargs: "dict(net_arch=dict(pi=[16], vf=[16, 8]), activation_fn=nn.ReLU, ortho_init=False)"
"""
DQN_ENTRY = """
CartPole-v1:
  n_timesteps: !!float 800
  policy: 'MlpPolicy'
  learning_rate: !!float 2.3e-3
  batch_size: 64
  buffer_size: 5000
  learning_starts: 200
  gamma: 0.99
  target_update_interval: 10
  train_freq: 64
  gradient_steps: -1
  exploration_fraction: 0.16
  exploration_final_eps: 0.04
  policy_kwargs: "dict(net_arch=[32, 32])"
"""
SAC_ENTRY = """
default:
  n_timesteps: 400
  policy: 'MlpPolicy'
  learning_rate: lin_7.3e-4
  buffer_size: 2000
  batch_size: 32
  ent_coef: 'auto'
  train_freq: [1, "episode"]
  gradient_steps: -1
  learning_starts: 100
  use_sde: True
  sde_sample_freq: 8
  use_sde_at_warmup: true
  policy_kwargs: "dict(log_std_init=-3, net_arch=[16, 16])"
"""


def imported(fasttrain: RunCommand, text: str, env: str, algo: str, *more: str) -> Finished:
    Path(f"{algo}.yml").write_text(text)
    assert main(["zoo", "import", f"{algo}.yml", "--env", env, "--algo", algo]) == 0
    return fasttrain("--config-dir", "conf", f"+profile=zoo_{algo}_{env}", "seed=3", "eval.episodes=2", *more)


def assert_same(folder: Path, plain: BaseAlgorithm) -> None:
    ours: Mapping[str, Any] = type(plain).load(folder / "model.zip", device="cpu").policy.state_dict()
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(ours[name], value), f"{name} differs"


@pytest.mark.parametrize("more", [(), ("engine=fast",)])
def test_ppo_of_an_entry_is_stocks(fasttrain: RunCommand, more: tuple[str, ...]):
    done = imported(fasttrain, PPO_ENTRY, "CartPole-v1", "ppo", *more)
    assert done.exit_code == 0, done.err
    env = VecNormalize(make_vec_env("CartPole-v1", 4, seed=3, vec_env_cls=DummyVecEnv), norm_reward=False, gamma=0.98)
    with pytest.warns(UserWarning, match="mini-batch size"):  # 256 of 4 × 32
        plain = PPO(
            "MlpPolicy", env, learning_rate=LinearSchedule(1e-3, 0.0, 1.0), clip_range=LinearSchedule(0.2, 0.0, 1.0),
            n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=3, ent_coef=0.01, seed=3, device="cpu",
            policy_kwargs={"net_arch": {"pi": [16], "vf": [16, 8]}, "activation_fn": torch.nn.ReLU,
                           "ortho_init": False},
        )  # fmt: skip
    assert_same(done.folder, plain.learn(1000))


@pytest.mark.parametrize("more", [(), ("engine=fast",)])
def test_dqn_of_an_entry_is_stocks_with_its_rounds(fasttrain: RunCommand, more: tuple[str, ...]):
    done = imported(fasttrain, DQN_ENTRY, "CartPole-v1", "dqn", *more)
    assert done.exit_code == 0, done.err
    plain = DQN(
        "MlpPolicy", make_vec_env("CartPole-v1", 1, seed=3), learning_rate=2.3e-3, batch_size=64, buffer_size=5000,
        learning_starts=200, target_update_interval=10, train_freq=64, gradient_steps=-1, exploration_fraction=0.16,
        exploration_final_eps=0.04, policy_kwargs={"net_arch": [32, 32]}, seed=3, device="cpu",
    ).learn(800)  # fmt: skip
    assert_same(done.folder, plain)
    rows = {row["flag"]: row["effective"] for row in done.json("plan.json")["flags"]}
    assert (rows["updates_per_step"], rows["replay_ratio"]) == (64, 1.0)
    summary = done.json("summary.json")
    assert summary["updates"] == plain._n_updates == 64 * 10


def test_sac_with_rounds_of_episodes_and_sde_is_stocks(fasttrain: RunCommand):
    done = imported(fasttrain, SAC_ENTRY, "Pendulum-v1", "sac")
    assert done.exit_code == 0, done.err
    plain = SAC(
        "MlpPolicy", make_vec_env("Pendulum-v1", 1, seed=3), learning_rate=LinearSchedule(7.3e-4, 0.0, 1.0),
        buffer_size=2000, batch_size=32, train_freq=(1, "episode"), gradient_steps=-1, learning_starts=100,
        use_sde=True, sde_sample_freq=8, use_sde_at_warmup=True, seed=3, device="cpu",
        policy_kwargs={"log_std_init": -3, "net_arch": [16, 16]},
    ).learn(400)  # fmt: skip
    assert_same(done.folder, plain)
    assert done.json("summary.json")["updates"] == plain._n_updates == 400
