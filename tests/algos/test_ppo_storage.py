"""The storage that a PPO fills: kept while it fits."""

from __future__ import annotations

from typing import Any

import pytest
from stable_baselines3.common.buffers import RolloutBuffer

from fasttrain.algos.ppo import PPO, has_stock_buffer, storage_of
from fasttrain.buffers.stock import RolloutView
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
