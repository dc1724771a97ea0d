"""DQN and SAC with plain settings equal stock's: same seed, same actions, same batches, same weights."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.her import HerReplayBuffer

import fasttrain
from fasttrain.buffers.hindsight import HindsightStorage

PAIRS = {
    "DQN": (fasttrain.DQN, stable_baselines3.DQN),
    "SAC": (fasttrain.SAC, stable_baselines3.SAC),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "DQN": {
        "learning_starts": 24, "train_freq": 2, "gradient_steps": 1, "batch_size": 16, "buffer_size": 50,
        "target_update_interval": 30, "learning_rate": 1e-3, "exploration_fraction": 0.3,
        "policy_kwargs": {"net_arch": [12, 8]},
    },  # the buffer wraps around
    "SAC": {"learning_starts": 14, "batch_size": 16, "buffer_size": 30, "policy_kwargs": {"net_arch": [12, 8]}},
}  # fmt: skip
STEPS = {"DQN": 120, "SAC": 42}


class Track(gymnasium.Env[Any, Any]):
    """Three choices, or two actions of unlike bounds; ends after 7 steps by its rules or, every other time, by a
    limit."""

    def __init__(self, algorithm: str, kind: str = "vector") -> None:
        vector = spaces.Box(-9.0, 9.0, (3,), np.float32 if algorithm == "DQN" else np.float64)  # as MuJoCo's
        image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        goal = {name: spaces.Box(-9.0, 9.0, (2,)) for name in ("observation", "achieved_goal", "desired_goal")}
        keyed = spaces.Dict({"vector": vector, "image": image, "other": spaces.Box(-1.0, 1.0, (2,))})
        self.observation_space: Any = {"vector": vector, "image": image, "goal": spaces.Dict(goal), "dict": keyed}[kind]
        two = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))
        self.action_space: Any = spaces.Discrete(3) if algorithm == "DQN" else two
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
        return self.observation_space.sample(), float(np.diff(np.r_[action, 1])[0]), over and not limit, limit, {}

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        return -np.abs(achieved - desired).sum(-1)


class Normed(BaseFeaturesExtractor):
    """Its running means are no parameters; the target critics' follow those of the critics."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.norm(observations)


def tracks(algorithm: str, count: int, kind: str = "vector") -> VecEnv:
    normalised = kind == "normalised"
    envs = DummyVecEnv([lambda: Track(algorithm, "vector" if normalised else kind)] * count)
    return VecNormalize(envs) if normalised else envs


def trained(algorithm: str, make: Any, env: VecEnv, **changes: Any) -> Any:
    seen: Any = env.observation_space
    policy = "MultiInput" if isinstance(seen, spaces.Dict) else "Cnn" if len(seen.shape) == 3 else "Mlp"
    settings = {"seed": 3, "device": "cpu", **SETTINGS[algorithm], **changes}
    return make(policy + "Policy", env, **settings).learn(STEPS[algorithm], log_interval=None)


ROUNDS = {"train_freq": 3, "gradient_steps": 2, "tau": 0.5}
CNN = {"policy_kwargs": {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}}
KEYED = {"policy_kwargs": {"net_arch": [8], "features_extractor_kwargs": {"cnn_output_dim": 8}}}


LEAN = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
WINDOW = {"replay_buffer_class": NStepReplayBuffer, "gamma": 0.9}
NOISE = {"action_noise": NormalActionNoise(np.zeros(2), 0.1 * np.ones(2))}
HER: dict[str, Any] = {"replay_buffer_class": HerReplayBuffer}
SHARED = {"policy_kwargs": {"share_features_extractor": True, **CNN["policy_kwargs"]}}


@pytest.mark.parametrize(
    ("algorithm", "count", "changes"),
    [
        ("DQN", 1, {}),
        ("DQN", 5, {"n_steps": 3}),
        ("DQN", 2, WINDOW),
        ("DQN", 2, {**WINDOW, "replay_buffer_kwargs": {"n_steps": 4, "gamma": 0.95}}),
        ("DQN", 4, ROUNDS),
        ("DQN", 3, {"gradient_steps": -1}),
        ("DQN", 1, {"train_freq": (2, "episode")}),
        ("DQN", 2, LEAN),
        ("DQN", 4, {"kind": "normalised"}),
        ("DQN", 2, {"kind": "image", **CNN}),
        ("DQN", 2, {"kind": "dict", **KEYED}),
        ("DQN", 2, {"kind": "goal", **HER, "replay_buffer_kwargs": {"n_sampled_goal": 2}}),
        ("DQN", 2, {"kind": "goal", **HER, "replay_buffer_kwargs": {"copy_info_dict": True}}),
        ("SAC", 1, {}),
        ("SAC", 3, {**ROUNDS, "target_update_interval": 2, "n_steps": 3}),
        ("SAC", 2, {"gradient_steps": -1, "ent_coef": 0.2}),
        ("SAC", 1, {"train_freq": (2, "episode"), "ent_coef": "auto_0.1", "target_entropy": -3.0}),
        ("SAC", 2, {"use_sde": True, "sde_sample_freq": 3, "use_sde_at_warmup": True}),
        ("SAC", 1, {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(2), 0.1 * np.ones(2))}),
        ("SAC", 1, {"learning_rate": lambda left: left * 1e-3, "policy_kwargs": {"n_critics": 3, "net_arch": []}}),
        ("SAC", 1, {"policy_kwargs": {"features_extractor_class": Normed, "net_arch": [8]}}),
        ("SAC", 1, LEAN),
        ("SAC", 4, {"kind": "normalised", **NOISE}),
        ("SAC", 2, {"kind": "image", **SHARED}),
        ("SAC", 2, {"kind": "dict", **KEYED}),
        ("SAC", 2, {"kind": "goal", **HER, "learning_starts": 28}),
    ],
)
def test_same_actions_batches_and_weights(algorithm: str, count: int, changes: dict[str, Any]):
    kind, settings = changes.get("kind", "vector"), {key: value for key, value in changes.items() if key != "kind"}
    if kind not in ("vector", "normalised"):
        settings = {"batch_size": 8, **settings}
    ours, stock = (trained(algorithm, make, tracks(algorithm, count, kind), **settings) for make in PAIRS[algorithm])
    assert ours._n_updates == stock._n_updates > 0
    assert ours.num_timesteps == stock.num_timesteps
    for name, value in stock.policy.state_dict().items():
        assert torch.equal(ours.policy.state_dict()[name], value), name
    logged = {name: value for name, value in stock.logger.name_to_value.items() if name.startswith("train/")}
    if algorithm == "DQN":
        assert ours.exploration_rate == stock.exploration_rate
        assert logged["train/loss"] == pytest.approx(ours.logger.name_to_value["train/loss"], rel=1e-6)
    else:
        learned = stock.ent_coef_optimizer is not None
        assert torch.equal(*(model.log_ent_coef if learned else model.ent_coef_tensor for model in (ours, stock)))
        assert len(logged) == 5 + learned
        assert {name: ours.logger.name_to_value[name] for name in logged} == logged
    assert list(ours.ep_info_buffer) == list(stock.ep_info_buffer)
    for name in ("actions", "rewards", "dones", "timeouts"):
        if hasattr(ours.replay_buffer, name):
            np.testing.assert_array_equal(getattr(ours.replay_buffer, name), getattr(stock.replay_buffer, name))


def test_an_algorithm_of_sb3_learns_the_same_from_our_hindsight():
    settings: Any = {"learning_starts": 28, "batch_size": 16, "buffer_size": 30, "policy_kwargs": {"net_arch": [8]}}
    weights = []
    for kind in (HerReplayBuffer, HindsightStorage):
        envs = tracks("SAC", 2, "goal")
        model = stable_baselines3.TD3("MultiInputPolicy", envs, replay_buffer_class=kind, seed=3, **settings)
        weights.append(model.learn(60, log_interval=None).policy.state_dict())
    stock, ours = weights
    for name, value in stock.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("algorithm", PAIRS)
def test_a_zip_goes_both_ways(algorithm: str, tmp_path: Any):
    seen = np.random.default_rng(0).standard_normal((9, 3))
    mine, stocks = PAIRS[algorithm]
    plain, fused = (trained(algorithm, mine, tracks(algorithm, 2), engine=engine) for engine in ("torch", "kernels"))
    assert (plain.engine.kind, fused.engine.kind) == ("torch", "kernels")
    stock = trained(algorithm, stocks, tracks(algorithm, 2))
    for model, other in ((plain, stocks), (fused, stocks), (stock, mine)):
        model.save(tmp_path / "model.zip")
        again = other.load(tmp_path / "model.zip", env=tracks(algorithm, 2), device="cpu")
        expected = model.predict(seen, deterministic=True)[0]
        np.testing.assert_array_equal(again.predict(seen, deterministic=True)[0], expected)
        again.learn(20, log_interval=None, reset_num_timesteps=False)
        assert again._n_updates > model._n_updates
