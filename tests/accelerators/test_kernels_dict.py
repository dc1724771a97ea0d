"""Dicts of vectors in the kernels: the same numbers, bit by bit, as the same vectors in one flat observation."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.dqn.policies import MultiInputPolicy as MultiInputDQNPolicy

from fasttrain.accelerators.eligible import policy_reason
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings, PPOWork
from fasttrain.algos.ppo import PPO
from fasttrain.batch import joined
from fasttrain.buffers.prefetch import draw_block
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.rollout import RolloutStorage
from q_blocks import trained

STEPS, ENVS, KEYS = 6, 4, ("z", "a", "hand")  # no alphabet: the order is the space's
DICT = spaces.Dict(
    [
        ("z", spaces.Box(-1.0, 1.0, (2, 3), np.float32)),
        ("a", spaces.Box(-5, 5, (2,), np.int64)),
        ("hand", spaces.MultiBinary(4)),
    ]
)
FLAT, CHOICES = spaces.Box(-5.0, 5.0, (12,), np.float32), spaces.Discrete(3)


def draw(rng: np.random.Generator, count: int) -> dict[str, Any]:
    return {
        "z": rng.uniform(-1, 1, (count, 2, 3)).astype(np.float32),
        "a": rng.integers(-5, 5, (count, 2)),
        "hand": rng.integers(0, 2, (count, 4)).astype(np.int8),
    }


def twins(keyed: type[Any], flat: type[Any]) -> tuple[Any, Any]:
    first = keyed(DICT, CHOICES, lambda _: 1e-2, net_arch=[8, 8])
    second = flat(FLAT, CHOICES, lambda _: 1e-2, net_arch=[8, 8])
    second.load_state_dict(first.state_dict())
    return first, second


def test_the_features_are_joined_in_the_order_of_sb3():
    policy, _ = twins(MultiInputActorCriticPolicy, ActorCriticPolicy)
    seen = draw(np.random.default_rng(0), 5)
    tensors = {key: torch.from_numpy(value) for key, value in seen.items()}
    assert tuple(DICT.spaces) == KEYS
    shuffled = {key: seen[key] for key in ("hand", "a", "z")}
    assert (policy.extract_features(tensors).numpy() == joined(shuffled, KEYS)).all()


def test_ppo_acts_and_learns_as_on_one_flat_observation():
    keyed, flat = twins(MultiInputActorCriticPolicy, ActorCriticPolicy)
    assert policy_reason(keyed) is None
    results = []
    for policy, space in ((keyed, DICT), (flat, FLAT)):
        torch.manual_seed(3)
        np.random.seed(3)
        rng = np.random.default_rng(7)
        storage = RolloutStorage(STEPS, ENVS, space, CHOICES, device=torch.device("cpu"), gamma=0.9, gae_lambda=0.9)
        fused = KernelEngine(policy, EngineSettings())
        fused.begin(storage)
        for _ in range(STEPS):
            parts = draw(rng, ENVS)
            seen: Any = parts if space is DICT else joined(parts, KEYS)
            kept: Any = fused.act(seen, None).stored
            rewards = rng.normal(size=ENVS).astype(np.float32)
            storage.add(kept.observations, kept.actions, rewards, np.zeros(ENVS, bool), kept.values, kept.log_probs)
        storage.compute_returns_and_advantages(fused.values(seen), np.zeros(ENVS, bool))
        anew = KernelEngine(policy, EngineSettings())  # its rows are listed from the storage, not as they were acted on
        anew.guard = None
        anew.update(storage, PPOWork(2, 8, 0.2, None, 0.01, 0.5, True, 0.5, None))
        results.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    assert results[0].keys() == results[1].keys()
    assert all((results[0][name] == results[1][name]).all() for name in results[0])


@pytest.mark.parametrize("n_steps", [1, 3])
def test_dqn_draws_and_learns_as_on_one_flat_observation(n_steps: int):
    keyed, flat = twins(MultiInputDQNPolicy, DQNPolicy)
    assert policy_reason(keyed) is None
    blocks, weights = [], []
    for policy, space in ((keyed, DICT), (flat, FLAT)):
        rng = np.random.default_rng(5)
        storage = ReplayStorage(200, space, CHOICES, "cpu", ENVS, n_steps=n_steps, gamma=0.9)
        before = draw(rng, ENVS)
        for _ in range(20):
            after = draw(rng, ENVS)
            shown = [part if space is DICT else joined(part, KEYS) for part in (before, after)]
            dones = rng.random(ENVS) < 0.2
            storage.put(shown[0], shown[1], rng.integers(0, 3, ENVS), rng.normal(size=ENVS), dones)
            before = after
        np.random.seed(11)
        block = draw_block(storage, 3, 16).copied().batches
        trained(KernelQEngine(policy, EngineSettings()), block)
        blocks.append(block)
        weights.append([parameter.detach().clone() for parameter in policy.q_net.parameters()])
    assert (blocks[0].observations == blocks[1].observations).all()
    assert (blocks[0].next_observations == blocks[1].next_observations).all()
    assert all((first == second).all() for first, second in zip(*weights, strict=True))
    seen = draw(np.random.default_rng(1), 7)
    values, _ = KernelQEngine(keyed, EngineSettings()).q_values(seen)
    with torch.no_grad():
        expected = keyed.q_net({key: torch.from_numpy(value) for key, value in seen.items()}).numpy()
    assert values == pytest.approx(expected, abs=1e-5)


class Parts(gymnasium.Env[Any, Any]):
    """Ends after ten steps."""

    observation_space, action_space = DICT, CHOICES

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._seen(), float(action), self.steps == 10, False, {}

    def _seen(self) -> dict[str, Any]:
        return {key: value[0] for key, value in draw(self.np_random, 1).items()}


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_a_model_with_dict_observations_takes_the_kernels(kind: type[Any]):
    more = {"n_steps": 8, "batch_size": 16} if kind is PPO else {"learning_starts": 8, "train_freq": 1}
    model = kind("MultiInputPolicy", DummyVecEnv([Parts] * 2), seed=0, **more)
    model.use_engine("kernels")
    assert model.engine.kind == "kernels"
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(64)
    assert model.engine.gradient_updates > 0
    assert any((first != second).any() for first, second in zip(before, model.policy.parameters(), strict=True))


def test_classes_and_images_in_a_dict_are_not_for_the_kernels():
    of_class = "is Discrete(3); kernels would serve a one-hot Box"
    for odd, told in ((spaces.Discrete(3), of_class), (spaces.Box(0, 255, (3, 36, 36), np.uint8), "is an image")):
        space = spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,), np.float32), "b": odd})
        policy = MultiInputActorCriticPolicy(space, CHOICES, lambda _: 1e-3)
        assert policy_reason(policy) == f"the observations' key 'b' {told}"
