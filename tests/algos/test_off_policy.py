"""What DQN and SAC share: collecting for replay."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain


@pytest.mark.parametrize(("kind", "env_id"), [(fasttrain.DQN, "CartPole-v1"), (fasttrain.SAC, "Pendulum-v1")])
def test_a_subclass_that_stores_otherwise_is_asked(kind: Any, env_id: str):
    class Halved(kind):
        def _store_transition(self, buffer: Any, actions: Any, new_obs: Any, rewards: Any, *ends: Any) -> None:
            super()._store_transition(buffer, actions, new_obs, rewards / 2, *ends)

    stored = []
    for each in (kind, Halved):
        env = DummyVecEnv([lambda: gymnasium.make(env_id)] * 2)
        model = each("MlpPolicy", env, learning_starts=100, buffer_size=40, seed=0, device="cpu").learn(60)
        stored.append(model.replay_buffer)
    np.testing.assert_array_equal(stored[0].observations, stored[1].observations)
    np.testing.assert_array_equal(stored[0].next_observations, stored[1].next_observations)
    np.testing.assert_array_equal(stored[0].rewards / 2, stored[1].rewards)
