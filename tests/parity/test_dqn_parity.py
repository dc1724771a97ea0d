"""Our DQN with plain settings equals stock DQN: same seed, same actions, same batches, same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

import fasttrain


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small batches gain nothing from more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SETTINGS: dict[str, Any] = {
    "learning_starts": 60,
    "train_freq": 2,
    "gradient_steps": 1,
    "batch_size": 16,
    "buffer_size": 200,  # wraps around twice
    "target_update_interval": 80,
    "learning_rate": 1e-3,
    "exploration_fraction": 0.3,
    "seed": 3,
    "device": "cpu",
}


class Grid(gymnasium.Env[Any, Any]):
    """Observes an image, or an image and a vector; ends after 9 steps by its rules or, every other time, by a limit."""

    def __init__(self, keyed: bool = False) -> None:
        image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        vector = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.observation_space = spaces.Dict({"image": image, "vector": vector}) if keyed else image
        self.action_space = spaces.Discrete(3)
        self.keyed, self.episodes = keyed, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        over = self.steps == 9
        limit = over and self.episodes % 2 == 0
        return self.observe(), float(action) - 1.0, over and not limit, limit, {}

    def observe(self) -> Any:
        image = self.np_random.integers(0, 255, (36, 36, 1), np.uint8)
        vector = self.np_random.random(3, np.float32)
        return {"image": image, "vector": vector} if self.keyed else image


def cartpoles(count: int) -> VecEnv:
    return DummyVecEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=40)] * count)


def trained(make: Any, env: VecEnv, policy: str, steps: int, **changes: Any) -> Any:
    model = make(policy, env, **{**SETTINGS, **changes})
    return model.learn(steps, log_interval=None)


def assert_equal(ours: Any, stock: Any, atol: float = 0.0) -> None:
    for name, value in stock.policy.state_dict().items():
        torch.testing.assert_close(ours.policy.state_dict()[name], value, rtol=0, atol=atol, msg=name)
    assert ours.num_timesteps == stock.num_timesteps
    assert ours._n_updates == stock._n_updates
    assert ours.exploration_rate == stock.exploration_rate
    assert list(ours.ep_info_buffer) == list(stock.ep_info_buffer)
    np.testing.assert_array_equal(ours.replay_buffer.actions, stock.replay_buffer.actions)
    np.testing.assert_array_equal(ours.replay_buffer.rewards, stock.replay_buffer.rewards)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "changes", [{}, {"n_steps": 3}, {"train_freq": 4, "gradient_steps": 3, "tau": 0.5}, {"gradient_steps": -1}]
)
def test_cartpole(count: int, changes: dict[str, Any]):
    ours = trained(fasttrain.DQN, cartpoles(count), "MlpPolicy", 500, **changes)
    stock = trained(stable_baselines3.DQN, cartpoles(count), "MlpPolicy", 500, **changes)
    assert_equal(ours, stock)


def test_train_by_episode():
    changes = {"train_freq": (2, "episode")}
    ours = trained(fasttrain.DQN, cartpoles(1), "MlpPolicy", 500, **changes)
    assert_equal(ours, trained(stable_baselines3.DQN, cartpoles(1), "MlpPolicy", 500, **changes))


@pytest.mark.parametrize(("keyed", "policy"), [(False, "CnnPolicy"), (True, "MultiInputPolicy")])
def test_images_and_dicts(keyed: bool, policy: str):
    def env() -> VecEnv:
        return DummyVecEnv([lambda: Grid(keyed)] * 2)

    changes = {"learning_starts": 40, "buffer_size": 60, "batch_size": 8, "target_update_interval": 20}
    ours = trained(fasttrain.DQN, env(), policy, 120, **changes)
    assert_equal(ours, trained(stable_baselines3.DQN, env(), policy, 120, **changes))


def test_normalised_observations_and_rewards():
    make: Callable[[], VecEnv] = lambda: VecNormalize(cartpoles(4))  # noqa: E731
    ours = trained(fasttrain.DQN, make(), "MlpPolicy", 500)
    assert_equal(ours, trained(stable_baselines3.DQN, make(), "MlpPolicy", 500))


def test_a_zip_goes_both_ways(tmp_path: Any):
    observations = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    for make, other in ((fasttrain.DQN, stable_baselines3.DQN), (stable_baselines3.DQN, fasttrain.DQN)):
        model = trained(make, cartpoles(2), "MlpPolicy", 400)
        model.save(tmp_path / "model.zip")
        again = other.load(tmp_path / "model.zip", device="cpu")
        expected = model.predict(observations, deterministic=True)[0]
        np.testing.assert_array_equal(again.predict(observations, deterministic=True)[0], expected)
        again.set_env(cartpoles(2))
        again.learn(200, log_interval=None)
