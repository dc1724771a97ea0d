"""Our SAC with plain settings equals stock SAC: same seed, same actions, same batches, same weights."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.her import HerReplayBuffer

import fasttrain
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)

SETTINGS: dict[str, Any] = {
    "learning_starts": 30,
    "batch_size": 16,
    "buffer_size": 80,  # wraps around
    "policy_kwargs": {"net_arch": [12, 8]},
    "seed": 3,
    "device": "cpu",
}


class Track(gymnasium.Env[Any, Any]):
    """Two actions of unlike bounds; ends after 7 steps by its rules or, every other time, by a limit."""

    action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))

    def __init__(self, kind: str = "vector") -> None:
        vector = spaces.Box(-9.0, 9.0, (3,), np.float64)  # as MuJoCo's
        image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        goal = {name: spaces.Box(-9.0, 9.0, (2,)) for name in ("observation", "achieved_goal", "desired_goal")}
        keyed = spaces.Dict({"vector": vector, "other": spaces.Box(-1.0, 1.0, (2,))})
        self.observation_space: Any = {"vector": vector, "image": image, "goal": spaces.Dict(goal), "dict": keyed}[kind]
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.steps, self.episodes = 0, self.episodes + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        over = self.steps == 7
        limit = over and self.episodes % 2 == 0
        return self.observation_space.sample(), float(action[0] - action[1]), over and not limit, limit, {}

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        return -np.abs(achieved - desired).sum(-1)


class Normed(BaseFeaturesExtractor):
    """Its running means are no parameters; the target critics' follow those of the critics."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.norm(observations)


def tracks(count: int, kind: str = "vector") -> VecEnv:
    return DummyVecEnv([lambda: Track(kind)] * count)


def trained(make: Any, env: VecEnv, policy: str = "MlpPolicy", steps: int = 100, **changes: Any) -> Any:
    return make(policy, env, **{**SETTINGS, **changes}).learn(steps, log_interval=None)


def assert_equal(ours: Any, stock: Any) -> None:
    assert stock._n_updates > 0
    for name, value in stock.policy.state_dict().items():
        assert torch.equal(ours.policy.state_dict()[name], value), name
    learned = stock.ent_coef_optimizer is not None
    assert torch.equal(*(model.log_ent_coef if learned else model.ent_coef_tensor for model in (ours, stock)))
    assert ours.num_timesteps == stock.num_timesteps
    assert list(ours.ep_info_buffer) == list(stock.ep_info_buffer)
    names = [name for name in stock.logger.name_to_value if name.startswith("train/")]
    assert len(names) == 5 + learned
    assert all(ours.logger.name_to_value[name] == stock.logger.name_to_value[name] for name in names)
    for name in ("actions", "rewards", "dones", "timeouts"):
        if hasattr(ours.replay_buffer, name):
            np.testing.assert_array_equal(getattr(ours.replay_buffer, name), getattr(stock.replay_buffer, name))


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {}),
        (3, {"train_freq": 2, "gradient_steps": 3, "tau": 0.5, "target_update_interval": 2, "n_steps": 3}),
        (2, {"gradient_steps": -1, "ent_coef": 0.2}),
        (1, {"train_freq": (2, "episode"), "ent_coef": "auto_0.1", "target_entropy": -3.0}),
        (2, {"use_sde": True, "sde_sample_freq": 3, "use_sde_at_warmup": True}),
        (1, {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(2), 0.1 * np.ones(2))}),
        (1, {"learning_rate": lambda left: left * 1e-3, "policy_kwargs": {"n_critics": 3, "net_arch": []}}),
        (1, {"policy_kwargs": {"features_extractor_class": Normed, "net_arch": [8]}}),
        (1, {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}),
    ],
)
def test_settings(count: int, changes: dict[str, Any]):
    ours, stock = (trained(kind, tracks(count), **changes) for kind in (fasttrain.SAC, stable_baselines3.SAC))
    assert_equal(ours, stock)


@pytest.mark.parametrize(
    ("kind", "policy", "changes"),
    [
        ("image", "CnnPolicy", {"policy_kwargs": {"share_features_extractor": True, "net_arch": [8]}}),
        ("dict", "MultiInputPolicy", {}),
        ("goal", "MultiInputPolicy", {"replay_buffer_class": HerReplayBuffer, "learning_starts": 40}),
    ],
)
def test_observations(kind: str, policy: str, changes: dict[str, Any]):
    changes = {"buffer_size": 60, **changes}
    ours, stock = (
        trained(made, tracks(2, kind), policy, 50, **changes) for made in (fasttrain.SAC, stable_baselines3.SAC)
    )
    assert_equal(ours, stock)


def test_normalised_observations_and_rewards_with_noise():
    noise = {"action_noise": NormalActionNoise(np.zeros(2), 0.1 * np.ones(2))}
    ours, stock = (trained(kind, VecNormalize(tracks(4)), **noise) for kind in (fasttrain.SAC, stable_baselines3.SAC))
    assert_equal(ours, stock)


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_a_zip_goes_both_ways(engine: str, tmp_path: Any):
    seen = np.random.default_rng(0).standard_normal((9, 3))
    ours = trained(fasttrain.SAC, tracks(2), engine=engine)
    stock = trained(stable_baselines3.SAC, tracks(2))
    for model, other in ((ours, stable_baselines3.SAC), (stock, fasttrain.SAC)):
        model.save(tmp_path / "model.zip")
        again = other.load(tmp_path / "model.zip", env=tracks(2), device="cpu")
        expected = model.predict(seen, deterministic=True)[0]
        np.testing.assert_array_equal(again.predict(seen, deterministic=True)[0], expected)
        again.learn(60, log_interval=None, reset_num_timesteps=False)
        assert again._n_updates > model._n_updates
