"""`target_tv`: its total variation, the epochs that it ends, and the learning rate that follows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from accelerated import weights
from fasttrain.algos.reuse import FACTOR, Reuse, total_variation
from toys import Bits


def made(target: float | None, engine: str = "torch", reuse: int = 1, **settings: Any) -> Any:
    envs = DummyVecEnv([Bits] * 3)
    envs.seed(0)
    given = {"n_steps": 32, "batch_size": 16, "n_epochs": 4, "seed": 1, "device": "cpu", "engine": engine, **settings}
    model = fasttrain.PPO("MultiInputPolicy", envs, **given)
    model.target_tv = target
    model.reuse = Reuse(reuse) if reuse > 1 else None
    return model


@pytest.mark.parametrize("engine", ["torch", "kernels"])
@pytest.mark.parametrize("reuse", [1, 2])
def test_a_target_that_is_never_reached_changes_nothing(engine: str, reuse: int):
    free, limited = (made(target, engine, reuse).learn(3 * 96) for target in (None, 1.0))
    assert torch.equal(weights(free), weights(limited))
    assert limited._n_updates == free._n_updates == 12
    assert limited.engine.gradient_updates == free.engine.gradient_updates
    for name in ("train/approx_kl", "train/loss", "train/value_loss", "train/explained_variance"):
        assert limited.logger.name_to_value[name] == pytest.approx(free.logger.name_to_value[name], rel=1e-6)


def test_the_variation_is_half_the_mean_difference_of_the_probabilities():
    """Over all actions, weighted by the old policy, half of E|r - 1| is half the sum of |new - old|."""
    model = made(1.0, learning_rate=0.05)
    model.learn(96)
    rollout = model.rollout_buffer.storage
    seen = {key: torch.as_tensor(part.reshape(96, -1)) for key, part in rollout.observations.items()}
    with torch.no_grad():
        new = model.policy.get_distribution(seen).distribution.probs
    taken = new.gather(1, torch.as_tensor(rollout.actions.reshape(96, 1)).long())[:, 0].numpy()
    before = np.exp(rollout.log_probs.reshape(-1))
    wanted = np.mean(np.abs(taken / before - 1)) / 2
    assert wanted > 0.05
    assert total_variation(model, rollout) == pytest.approx(wanted, rel=1e-4)
    assert model.logger.name_to_value["train/total_variation"] == pytest.approx(wanted, rel=1e-4)


def test_above_the_target_epochs_end_and_the_rate_falls_and_it_rises_again():
    model = made(1e-6, learning_rate=0.05)
    model.learn(2 * 96)
    assert model._n_updates == 2  # one epoch of four in each update
    assert model.learning_rate_scale == pytest.approx(FACTOR**-2)
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / FACTOR)  # of the second update
    assert model.logger.name_to_value["train/learning_rate"] == pytest.approx(0.05 / FACTOR)
    model.target_tv = 1.0
    for _ in range(3):
        model.learn(96, reset_num_timesteps=False)
    assert model.learning_rate_scale == 1.0
    assert model._n_updates == 2 + 3 * 4
