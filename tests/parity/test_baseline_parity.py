"""`+profile=baseline` is a plain SB3 script: same seed, same vec env, bit for bit the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from conftest import RunCommand


def weights(model: BaseAlgorithm) -> Mapping[str, torch.Tensor]:
    return model.policy.state_dict()


def assert_same(ours: BaseAlgorithm, plain: BaseAlgorithm) -> None:
    assert ours.num_timesteps == plain.num_timesteps
    for name, value in weights(plain).items():
        assert torch.equal(weights(ours)[name], value), f"{name} differs"


def test_ppo_on_cartpole_with_a_dummy_vec_env(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=baseline", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=4", "seed=3",
        "algo.rollout_size=1024", "algo.n_epochs=2", "total_timesteps=3000", "eval.episodes=2", "eval_every=1500",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    env = make_vec_env("CartPole-v1", n_envs=4, seed=3, vec_env_cls=DummyVecEnv)
    plain = PPO("MlpPolicy", env, n_steps=256, n_epochs=2, batch_size=64, seed=3, device="cpu").learn(3000)
    assert_same(PPO.load(done.folder / "model.zip", device="cpu"), plain)


def test_ppo_on_cartpole_with_subproc(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=baseline", "env.id=CartPole-v1", "algo=ppo", "num_envs=2", "seed=5", "algo.rollout_size=256",
        "algo.n_epochs=2", "total_timesteps=512", "eval.episodes=2",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    env = make_vec_env("CartPole-v1", n_envs=2, seed=5)  # in this process: SB3 promises the same numbers
    plain = PPO("MlpPolicy", env, n_steps=128, n_epochs=2, batch_size=64, seed=5, device="cpu").learn(512)
    env.close()
    assert_same(PPO.load(done.folder / "model.zip", device="cpu"), plain)


def test_dqn_on_cartpole(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=baseline", "env.id=CartPole-v1", "algo=dqn", "vec_env=dummy", "num_envs=4", "seed=3",
        "warmup_steps=200", "algo.buffer_size=5000", "algo.target_update_interval=400", "total_timesteps=2000",
        "eval.episodes=2",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    env = make_vec_env("CartPole-v1", n_envs=4, seed=3, vec_env_cls=DummyVecEnv)
    plain = DQN(
        "MlpPolicy", env, batch_size=64, learning_starts=200, buffer_size=5000, target_update_interval=400,
        train_freq=1, gradient_steps=1, seed=3, device="cpu",
    ).learn(2000)  # fmt: skip
    assert_same(DQN.load(done.folder / "model.zip", device="cpu"), plain)
