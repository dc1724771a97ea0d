from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.stock import StockPhases, TimedVecEnv, is_stock


def seeded_masked_env(dim: int, n_invalid: int) -> InvalidActionEnvDiscrete:
    """The env draws from its action space, which its `reset(seed)` does not seed."""
    env = InvalidActionEnvDiscrete(dim=dim, n_invalid_actions=n_invalid)
    env.action_space.seed(0)
    return env


def learned(make: type[BaseAlgorithm], watched: bool) -> tuple[BaseAlgorithm, PhaseClock]:
    clock = PhaseClock()
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
    if make is MaskablePPO:
        env = DummyVecEnv([lambda: seeded_masked_env(10, 5)] * 2)
    arguments = {"learning_starts": 20, "buffer_size": 500} if make is DQN else {"n_steps": 32, "n_epochs": 2}
    model = make("MlpPolicy", TimedVecEnv(env, clock) if watched else env, seed=1, device="cpu", **arguments)
    clock.reset()
    model.learn(64, callback=StockPhases(clock) if watched else None)
    return model, clock


@pytest.mark.parametrize("make", [MaskablePPO, DQN])
def test_every_phase_is_seen_and_no_number_is_changed(make: type[BaseAlgorithm]):
    plain, _ = learned(make, watched=False)
    model, clock = learned(make, watched=True)
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(model.policy.state_dict()[name], value), name
    totals = clock.snapshot()
    for phase in ("action", "env_step", "buffer", "train", "optim"):
        assert totals[phase] > 0, phase
    assert totals["train"] > totals["optim"] / 10
    assert is_stock(model)
    assert not model.policy._forward_pre_hooks
    assert not model.policy.optimizer._optimizer_step_pre_hooks
    assert not model.policy.optimizer._optimizer_step_post_hooks


def test_the_wrapper_hands_everything_through():
    clock = PhaseClock()
    env = TimedVecEnv(DummyVecEnv([lambda: seeded_masked_env(4, 2)] * 3), clock)
    env.seed(0)
    assert env.reset().shape == (3,)
    assert np.stack(env.env_method("action_masks")).shape == (3, 4)
    assert env.env_method("action_masks", indices=[1])[0].count(True) == 2
    _, rewards, dones, infos = env.step(np.zeros(3, np.int64))
    assert len(rewards) == len(dones) == len(infos) == 3
    assert clock.snapshot()["env_step"] > 0
    assert not is_stock(fasttrain.PPO("MlpPolicy", "CartPole-v1", device="cpu"))
