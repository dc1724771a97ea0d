"""Skull King under `+profile=exact` and as a drop-in class: the weights of stock sb3-contrib after three rollouts."""

from __future__ import annotations

import gymnasium
import pytest
import sb3_contrib
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from conftest import RunCommand
from fasttrain_games.skullking.game import SkullKingGame

SETTINGS = {"n_steps": 64, "batch_size": 64, "n_epochs": 3, "seed": 3, "device": "cpu"}
NUM_ENVS = 8
STEPS = 3 * 64 * NUM_ENVS


@pytest.fixture(scope="module")
def stock() -> BaseAlgorithm:
    env = DummyVecEnv([lambda: Monitor(gymnasium.make("fasttrain_games.envs:fasttrain/SkullKing-v0"))] * NUM_ENVS)
    return sb3_contrib.MaskablePPO("MlpPolicy", env, **SETTINGS).learn(STEPS)


def difference(ours: BaseAlgorithm, stock: BaseAlgorithm) -> float:
    theirs = stock.policy.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in ours.policy.state_dict().items())


def test_profile_exact(fasttrain: RunCommand, stock: BaseAlgorithm):
    done = fasttrain(
        "+profile=exact", "seed=3", f"num_envs={NUM_ENVS}", f"algo.rollout_size={64 * NUM_ENVS}", "batch_size=64",
        "algo.n_epochs=3", f"total_timesteps={STEPS}", "eval.episodes=4", f"eval_every={STEPS // 2}",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.json("plan.json")["config"]["vec_env"] == "native"
    ours = sb3_contrib.MaskablePPO.load(done.folder / "model.zip", device="cpu")
    assert ours.num_timesteps == stock.num_timesteps == STEPS
    assert difference(ours, stock) <= 1e-5


def test_the_class_as_it_is(stock: BaseAlgorithm):
    env = fasttrain.NativeVecEnv(SkullKingGame(NUM_ENVS))
    ours = fasttrain.MaskablePPO("MlpPolicy", env, **SETTINGS).learn(STEPS)
    assert difference(ours, stock) == 0.0


def test_the_kernels_are_another_matter(stock: BaseAlgorithm):
    env = fasttrain.NativeVecEnv(SkullKingGame(NUM_ENVS))
    ours = fasttrain.MaskablePPO("MlpPolicy", env, **SETTINGS)
    ours.use_engine("kernels")
    assert difference(ours.learn(STEPS), stock) > 1e-5, "other draws: a parity test that passes here sees nothing"
    assert torch.isfinite(ours.policy.action_net.weight).all()
