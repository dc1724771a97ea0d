"""Recurrent policies of all shapes, with observations, masks, memories and rollouts of chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy, RecurrentMultiInputActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.recurrent import RecurrentEngine
from fasttrain.algos.recurrent_policies import (
    MaskableRecurrentActorCriticPolicy,
    MaskableRecurrentMultiInputActorCriticPolicy,
)
from fasttrain.algos.step import PPOWork
from fasttrain.buffers.recurrent import Memory, RecurrentStorage

BOX = spaces.Box(-1, 1, (5,), np.float32)
DICT = spaces.Dict({"b": spaces.Box(-1, 1, (3,), np.float32), "a": spaces.MultiBinary(4)})
SHARED = {"shared_lstm": True, "enable_critic_lstm": False}
CPU = torch.device("cpu")


def policy_of(kind: Any = RecurrentActorCriticPolicy, box: Any = BOX, actions: Any = None, **settings: Any) -> Any:
    torch.manual_seed(2)
    eps = {"eps": 1.0}  # Adam's first steps are then as the gradient is, not its sign
    policy = kind(box, actions or spaces.Discrete(4), lambda _: 1e-2, lstm_hidden_size=settings.pop("units", 16),
                  optimizer_kwargs=eps, **settings)  # fmt: skip
    for parameter in policy.parameters():  # biases and heads of SB3's initialisation are too small to test anything
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "two LSTMs": (RecurrentActorCriticPolicy, {}),
    "one for both nets": (MaskableRecurrentActorCriticPolicy, {**SHARED, "units": 32}),
    "no layers behind": (RecurrentActorCriticPolicy, {"net_arch": []}),
    "nets of two depths, relu": (MaskableRecurrentActorCriticPolicy,
                                 {"net_arch": {"pi": [8], "vf": [16, 9]}, "activation_fn": torch.nn.ReLU}),
    "several choices": (MaskableRecurrentActorCriticPolicy, {"actions": spaces.MultiDiscrete([2, 3]), "net_arch": [8]}),
    "bits": (MaskableRecurrentActorCriticPolicy, {"actions": spaces.MultiBinary(3)}),
    "keys": (MaskableRecurrentMultiInputActorCriticPolicy, {"box": DICT}),
    "keys, extractors apart": (RecurrentMultiInputActorCriticPolicy, {"box": DICT, "share_features_extractor": False}),
    "wide": (RecurrentActorCriticPolicy, {"net_arch": [256]}),  # its blocks have more rows
    "keys without masks": (RecurrentMultiInputActorCriticPolicy, {"box": DICT, **SHARED}),
}  # fmt: skip


def seen_of(space: Any, rng: Any, count: int) -> Any:
    """Observations (count, …), half of the numbers zero."""
    if isinstance(space, spaces.Dict):
        return {key: seen_of(part, rng, count) for key, part in space.spaces.items()}
    seen = rng.standard_normal((count, *space.shape)).astype(np.float32) * (rng.random((count, *space.shape)) < 0.5)
    return (seen > 0).astype(np.int8) if isinstance(space, spaces.MultiBinary) else seen.astype(np.float32)


def masks_of(policy: Any, rng: Any, count: int) -> Any:
    """Masks (count, A) with a legal choice of each sub-action; None where the policy takes none."""
    if not isinstance(policy, MaskableRecurrentActorCriticPolicy):
        return None
    dims = action_dims(policy.action_space)
    masks = rng.random((count, sum(dims))) < 0.5
    for first, size in zip(np.cumsum([0, *dims]), dims, strict=False):
        masks[np.arange(count), first + rng.integers(size, size=count)] = True
    return masks


def memory_of(policy: Any, rng: Any, count: int, starts: float) -> Memory:
    units, shared = policy.lstm_actor.hidden_size, policy.lstm_critic is None
    parts = [torch.from_numpy(rng.standard_normal((1, count, units)).astype(np.float32)) for _ in range(4)]
    pi, vf = (parts[0], parts[1]), (parts[2], parts[3])
    return Memory(RNNStates(pi, pi if shared else vf), rng.random(count) < starts)


def rollout_of(policy: Any, steps: int, envs: int, seed: int = 0, left_out: bool = False) -> RecurrentStorage:
    """Acted on by the torch engine, with numbers of chance for states, rewards and ends of episodes."""
    rng, engine = np.random.default_rng(seed), RecurrentEngine(policy, EngineSettings())
    masked = isinstance(policy, MaskableRecurrentActorCriticPolicy)
    lstm = policy.lstm_actor
    storage = RecurrentStorage(
        steps, envs, policy.observation_space, policy.action_space, state_shape=(1, lstm.hidden_size),
        own_critic=policy.lstm_critic is not None, device=CPU, gamma=0.9, gae_lambda=0.8,
        mask_width=sum(action_dims(policy.action_space)) if masked else None,
    )  # fmt: skip
    for step in range(steps):
        memory = memory_of(policy, rng, envs, 0.1)
        stored = engine.act(seen_of(policy.observation_space, rng, envs), masks_of(policy, rng, envs), memory).stored
        noise = torch.from_numpy(rng.normal(0, 0.3, envs).astype(np.float32))  # so that some ratios are clipped
        rewards = rng.standard_normal(envs).astype(np.float32)
        noisy = stored._replace(values=stored.values + noise[:, None], log_probs=stored.log_probs + noise)
        storage.add(noisy, rewards, memory.episode_starts)
        if left_out:
            storage.leave_out(step, rng.random(envs) < 0.1)
    storage.compute_returns_and_advantages(np.zeros(envs, np.float32), np.zeros(envs, np.bool_))
    return storage


def assert_walked(model: Any, left_out: Any = None, atol: float = 1e-6) -> None:
    """The states of a rollout are what walking through each env's row by itself gives; rows `left_out` (T, N) are no
    steps, and an episode that begins with one begins with the next."""
    rollout, policy = model.rollout_buffer, model.policy
    seen, starts = torch.from_numpy(rollout.observations), torch.from_numpy(rollout.episode_starts)
    steps, envs = starts.shape
    begun = (rollout.hidden_states_pi, rollout.cell_states_pi)
    for index in range(envs):
        states = tuple(torch.tensor(part[0, :, index : index + 1]) for part in begun)
        for step in range(steps):
            assert np.allclose(rollout.hidden_states_pi[step, :, index], states[0][:, 0], atol=atol), (index, step)
            if left_out is not None and left_out[step, index]:
                after = starts[step + 1, index] if step + 1 < steps else model._last_episode_starts[index]
                assert bool(after) == bool(starts[step, index])
                continue
            row = slice(index, index + 1)
            with torch.no_grad():
                _, states = policy._process_sequence(seen[step, row], states, starts[step, row], policy.lstm_actor)
        assert torch.allclose(model._last_lstm_states.pi[0][:, index], states[0][:, 0], atol=atol)


WORK = PPOWork(2, 50, 0.2, None, 0.01, 0.5, True, 0.5, None)
