"""The storage that a PPO fills: kept while it fits."""

from __future__ import annotations

from stable_baselines3.common.buffers import RolloutBuffer

from fasttrain.algos.ppo import PPO, has_stock_buffer, storage_of
from toys import toy_gym_vec


def small_model(**kwargs) -> PPO:
    return PPO("MlpPolicy", toy_gym_vec(2), n_steps=8, batch_size=8, n_epochs=1, device="cpu", **kwargs)


def test_storage_is_kept_while_it_fits():
    model = small_model()
    storage = model.rollout_buffer
    assert storage_of(model, 8, 2) is storage
    assert storage_of(model, 4, 2) is not storage
    assert model.rollout_buffer.num_steps == 4
    model.gamma = 0.5
    assert storage_of(model, 4, 2).gamma == 0.5
    assert model.rollout_buffer_class is RolloutBuffer, "the zip must name SB3's class"


def test_a_buffer_of_the_users_own_is_none_of_stocks():
    class Own(RolloutBuffer):
        pass

    assert has_stock_buffer(small_model())
    assert not has_stock_buffer(small_model(rollout_buffer_class=Own))
    assert isinstance(small_model(rollout_buffer_class=Own).rollout_buffer, Own)
