"""Windows of several steps that run over the end of the ring and stop early, each against a sum written out."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from fasttrain.buffers.replay_storage import ReplayStorage

SIZE, GAMMA = 10, 0.5


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("done_at", [None, 11])
@pytest.mark.parametrize("norm_reward", [False, True])
def test_over_the_end_of_the_ring_no_reward_of_what_comes_after_counts(
    lean: bool, done_at: int | None, norm_reward: bool
):
    """An end, or the newest row, stops a window; what lies behind it in the ring is another episode's, or old."""
    envs = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]), norm_obs=False, norm_reward=norm_reward)
    storage = ReplayStorage(
        SIZE, spaces.Box(-100, 100, (1,), np.float32), spaces.Discrete(2), "cpu", 1, lean,
        handle_timeout_termination=False, n_steps=4, gamma=GAMMA,
    )  # fmt: skip
    for step in range(12):  # the newest lies in row 1
        seen, following = np.full((1, 1), step), np.full((1, 1), step + 1)
        storage.put(seen, following, np.zeros(1), np.full(1, 2.0**-step), np.full(1, step == done_at))
    rows = np.array(
        [6, 8, 9, 0, 1]
    )  # of the steps 6, 8, 9, 10 and 11: the last three windows end before they are whole
    batch = storage.gather(rows, np.zeros(5, np.int64), envs)
    rewards = 2.0 ** -np.arange(12)
    if norm_reward:
        rewards = np.clip(rewards / np.sqrt(envs.ret_rms.var + envs.epsilon), -envs.clip_reward, envs.clip_reward)
    windows = [range(first, min(first + 4, 12)) for first in (6, 8, 9, 10, 11)]
    expected = [sum(GAMMA ** (step - window[0]) * rewards[step] for step in window) for window in windows]
    np.testing.assert_allclose(batch.rewards[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(batch.discounts[:, 0], [GAMMA ** len(window) for window in windows])
    assert batch.next_observations[:, 0].tolist() == [10.0] + [12.0] * 4
    assert batch.dones[:, 0].tolist() == [0.0] + [float(done_at == 11)] * 4
