"""ARS: stock's numbers, and callbacks that are heard."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from fasttrain.algos.ars import ARS
from fasttrain.errors import ConfigError

SETTINGS = {"n_delta": 3, "seed": 1, "zero_policy": False, "delta_std": 0.3, "policy_kwargs": {"net_arch": [4]}}


class Steps(BaseCallback):
    """What a callback sees; it ends the training at step `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.seen, self.rests = last, list[float](), list[np.ndarray]()

    def _on_rollout_start(self) -> None:
        weights = torch.nn.utils.parameters_to_vector(self.model.policy.parameters())
        self.rests.append(weights.detach().numpy().copy())

    def _on_step(self) -> bool:
        assert self.locals["new_obs"].shape == (1, 4)
        self.seen.append(float(self.locals["rewards"][0]))
        return self.num_timesteps < self.last


@pytest.mark.parametrize("policy", ["MlpPolicy", "LinearPolicy"])
def test_updates_are_stocks_to_the_bit(policy: str):
    settings = SETTINGS if policy == "MlpPolicy" else {**SETTINGS, "policy_kwargs": None}
    stock, ours = (  # one after the other: both draw from torch's global generator
        cls(policy, gymnasium.make("CartPole-v1"), **settings).learn(500) for cls in (sb3_contrib.ARS, ARS)
    )
    assert stock._n_updates == ours._n_updates > 1
    assert stock.num_timesteps == ours.num_timesteps
    assert torch.equal(stock.weights, ours.weights)


def test_a_callback_that_says_no_ends_it_with_the_last_updates_weights():
    model, steps = ARS("MlpPolicy", gymnasium.make("CartPole-v1"), **SETTINGS), Steps(last=300)
    model.learn(10_000, callback=steps)
    assert (model.num_timesteps, len(steps.seen)) == (300, 300)
    weights = torch.nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy()
    assert (weights == steps.rests[-1]).all()
    assert (steps.rests[0] != steps.rests[-1]).any()


def test_weights_that_were_loaded_are_gone_on_with():
    model, other = (ARS("MlpPolicy", gymnasium.make("CartPole-v1"), **{**SETTINGS, "seed": seed}) for seed in (1, 2))
    model.set_parameters(other.get_parameters())
    steps = Steps(last=1)
    model.learn(10, callback=steps)
    assert (steps.rests[0] == other.weights.numpy()).all()
    assert torch.equal(model.weights, other.weights)


def test_its_zip_is_stocks(tmp_path: Path):
    model = ARS("MlpPolicy", gymnasium.make("CartPole-v1"), **SETTINGS).learn(200)
    model.save(tmp_path / "model.zip")
    stock = sb3_contrib.ARS.load(tmp_path / "model.zip", env=gymnasium.make("CartPole-v1"))
    assert type(stock) is sb3_contrib.ARS
    vectors = [torch.nn.utils.parameters_to_vector(each.policy.parameters()) for each in (stock, model)]
    assert torch.equal(*vectors)
    assert torch.equal(vectors[1], model.weights), "stock's own attribute is that of a fresh policy after loading"
    observation = np.array([0.01, -0.02, 0.03, 0.04], np.float32)
    assert stock.predict(observation)[0] == model.predict(observation)[0]


def test_several_envs_are_refused():
    with pytest.raises(ConfigError, match="num_envs=2: ARS plays one candidate after the other; take num_envs=1"):
        ARS("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2))
