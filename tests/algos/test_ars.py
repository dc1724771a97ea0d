"""ARS: stock's numbers, and callbacks that are heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from accelerated import weights
from fasttrain.algos.ars import ARS
from fasttrain.errors import ConfigError

SETTINGS = {"n_delta": 3, "seed": 1, "zero_policy": False, "delta_std": 0.3, "policy_kwargs": {"net_arch": [4]}}


def made(kind: Any = ARS, policy: str = "MlpPolicy", **changes: Any) -> Any:
    return kind(policy, gymnasium.make("CartPole-v1"), **{**SETTINGS, **changes})


class Steps(BaseCallback):
    """What a callback sees; it ends the training at step `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.seen, self.rests = last, list[float](), list[torch.Tensor]()

    def _on_rollout_start(self) -> None:
        self.rests.append(weights(self.model))

    def _on_step(self) -> bool:
        assert self.locals["new_obs"].shape == (1, 4)
        self.seen.append(float(self.locals["rewards"][0]))
        return self.num_timesteps < self.last


@pytest.mark.parametrize(("policy", "net"), [("MlpPolicy", {"net_arch": [4]}), ("LinearPolicy", None)])
def test_updates_are_stocks_to_the_bit_and_so_is_the_zip(policy: str, net: Any, tmp_path: Path):
    stock, ours = (  # one after the other: both draw from torch's global generator
        made(kind, policy, policy_kwargs=net).learn(300) for kind in (sb3_contrib.ARS, ARS)
    )
    assert stock._n_updates == ours._n_updates > 1
    assert stock.num_timesteps == ours.num_timesteps
    assert torch.equal(stock.weights, ours.weights)
    ours.save(tmp_path / "model.zip")
    loaded = sb3_contrib.ARS.load(tmp_path / "model.zip", env=gymnasium.make("CartPole-v1"))
    assert type(loaded) is sb3_contrib.ARS
    assert torch.equal(weights(loaded), ours.weights), "stock's own attribute is that of a fresh policy after loading"
    observation = np.array([0.01, -0.02, 0.03, 0.04], np.float32)
    assert loaded.predict(observation)[0] == ours.predict(observation)[0]


def test_a_callback_that_says_no_ends_it_with_the_last_updates_weights():
    model, steps = made(), Steps(last=200)
    model.learn(10_000, callback=steps)
    assert (model.num_timesteps, len(steps.seen)) == (200, 200)
    assert torch.equal(weights(model), steps.rests[-1])
    assert not torch.equal(steps.rests[0], steps.rests[-1])


def test_weights_that_were_loaded_are_gone_on_with():
    model, other, steps = made(), made(seed=2), Steps(last=1)
    model.set_parameters(other.get_parameters())
    model.learn(10, callback=steps)
    assert torch.equal(steps.rests[0], other.weights)
    assert torch.equal(model.weights, other.weights)


def test_it_logs_after_every_so_many_updates(monkeypatch: pytest.MonkeyPatch):
    model, logged = made(), list[int]()
    monkeypatch.setattr(model, "dump_logs", lambda: logged.append(model._n_updates))
    model.learn(600, log_interval=2)
    assert logged == [*range(2, model._n_updates + 1, 2)] != []


def test_several_envs_are_refused():
    with pytest.raises(ConfigError, match="num_envs=2: ARS plays one candidate after the other; use num_envs=1"):
        ARS("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2))
