"""The storage that a PPO fills: kept while it fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure

from accelerated import weights
from fasttrain.algos.ppo import PPO, has_stock_buffer, storage_of
from fasttrain.algos.recurrent import MaskableRecurrentPPO
from fasttrain.buffers.stock import RolloutView
from fasttrain.errors import ConfigError
from toys import toy_gym_vec


def small_model(**kwargs) -> PPO:
    return PPO("MlpPolicy", toy_gym_vec(2), n_steps=8, batch_size=8, n_epochs=1, device="cpu", **kwargs)


def test_storage_is_kept_while_it_fits():
    model = small_model()
    storage, view = model.rollout_buffer.storage, model.rollout_buffer
    assert storage_of(model, 8, 2) is storage
    assert model.rollout_buffer is view
    assert storage_of(model, 4, 2) is not storage
    assert model.rollout_buffer.buffer_size == 4
    model.gamma = 0.5
    assert storage_of(model, 4, 2).gamma == 0.5
    assert model.rollout_buffer_class is RolloutBuffer, "the zip must name SB3's class"


def test_a_buffer_of_the_users_own_is_none_of_stocks():
    class Own(RolloutBuffer):
        pass

    assert has_stock_buffer(small_model())
    assert not has_stock_buffer(small_model(rollout_buffer_class=Own))
    assert isinstance(small_model(rollout_buffer_class=Own).rollout_buffer, Own)


@pytest.mark.parametrize("own", [False, True])
def test_a_buffer_that_is_put_in_afterwards(own: bool):
    """One of SB3's gives way to ours, as the one SB3 makes; another class of the user's is served by SB3's loops."""

    class Counting(RolloutBuffer):
        added = 0

        def add(self, *args: Any, **kwargs: Any) -> None:
            self.added += 1
            super().add(*args, **kwargs)

    model = small_model()
    spaces_of = model.observation_space, model.action_space
    model.n_steps = 4
    model.rollout_buffer = given = (Counting if own else RolloutBuffer)(4, *spaces_of, "cpu", n_envs=2)
    model.learn(8)
    assert isinstance(model.rollout_buffer, Counting if own else RolloutView)
    assert not own or given.added == 4


class WithTerm(PPO):
    def loss(self, batch: Any, evaluated: Any) -> Any:
        return super().loss(batch, evaluated) | {"more": evaluated.values.mean()}


@pytest.mark.parametrize("kind", [PPO, WithTerm])
def test_a_stock_buffer_that_the_user_filled_is_trained_on_as_by_sb3(kind: Any):
    """Its update is SB3's, which calls no `loss` of a subclass: that is refused."""
    ends = []
    for each in (kind, stable_baselines3.PPO):
        model = each("MlpPolicy", toy_gym_vec(2), n_steps=8, batch_size=8, n_epochs=1, device="cpu", seed=0)
        model.set_logger(configure(format_strings=[]))
        model.rollout_buffer = buffer = RolloutBuffer(8, model.observation_space, model.action_space, "cpu", n_envs=2)
        random = np.random.default_rng(0)
        for _ in range(8):
            seen, one = random.random((2, *model.observation_space.shape)), torch.ones(2)
            buffer.add(seen, np.zeros(2), random.random(2), np.zeros(2), one, -one)
        buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2))
        if each is WithTerm:
            with pytest.raises(ConfigError, match="WithTerm.loss with a rollout in a RolloutBuffer: SB3's own update"):
                model.train()
            return
        model.train()
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_a_buffer_of_the_users_own_has_no_place_beside_memory_and_masks():
    model = MaskableRecurrentPPO("MlpLstmPolicy", toy_gym_vec(2), n_steps=8, device="cpu")
    spaces_of = model.observation_space, model.action_space
    model.rollout_buffer = type("Own", (RolloutBuffer,), {})(8, *spaces_of, "cpu", n_envs=2)
    with pytest.raises(ConfigError, match="MaskableRecurrentPPO needs its own rollout buffer"):
        model.learn(16)
