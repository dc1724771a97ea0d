"""The first thing that was not finite gets the blame."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from accelerated import SETTINGS, filled
from fasttrain.algos.causes import blame, why_replay, why_rollout
from fasttrain.algos.dqn import DQN
from fasttrain.algos.ppo import PPO, MaskablePPO
from toys import RandomEnv, seeded_vec, single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)


def test_data_comes_before_weights_before_what_was_made_of_them():
    model = filled(MaskablePPO("MlpPolicy", toy_gym_vec(), **SETTINGS))
    storage = model.rollout_buffer.storage
    assert why_rollout(model.policy, storage, "the loss") == "the loss"
    with torch.no_grad():
        model.policy.mlp_extractor.policy_net[-2].bias[:] = 100.0  # all features are 1
        model.policy.action_net.weight[:] = 3e38  # finite, but not what comes of it
    assert why_rollout(model.policy, storage, "the loss").startswith(
        "the logits of env 0 in row 0 of the rollout, with finite weights"
    )
    storage._returns[2, 1] = np.inf
    assert why_rollout(model.policy, storage, "") == "the return of env 1 in row 2 of the rollout is inf"
    storage._log_probs[4, 3] = np.nan
    assert why_rollout(model.policy, storage, "") == "the log prob of env 3 in row 4 of the rollout is nan"
    with torch.no_grad():
        model.policy.value_net.bias[0] = np.nan
    assert why_rollout(model.policy, storage, "") == "parameter value_net.bias is not finite"
    storage.rewards[1, 0] = np.nan
    assert why_rollout(model.policy, storage, "") == "the reward of env 0 in row 1 of the rollout is nan"
    storage._observations[""][0, 2, 1] = np.nan
    assert why_rollout(model.policy, storage, "") == "the observation of env 2 in row 0 of the rollout is nan"


def test_dict_observations_by_key():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)})
    env = seeded_vec(lambda: RandomEnv(space, spaces.Discrete(2)))
    model = filled(PPO("MultiInputPolicy", env, **(SETTINGS | {"batch_size": 16})))
    storage = model.rollout_buffer.storage
    assert why_rollout(model.policy, storage, "the loss") == "the loss"
    storage._observations["a"][3, 2, 0] = -np.inf
    assert why_rollout(model.policy, storage, "") == "the observation 'a' of env 2 in row 3 of the rollout is -inf"


def test_replay():
    env = seeded_vec(lambda: RandomEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)))
    model = DQN("MlpPolicy", env, learning_starts=1000, buffer_size=400, device="cpu", seed=0)
    model.learn(40)
    storage = model.replay_buffer
    assert why_replay(model, "the loss") == "the loss"
    storage.rewards[50:] = np.nan  # not filled yet
    assert why_replay(model, "the loss") == "the loss"
    with torch.no_grad():
        model.q_net_target.q_net[0].bias[0] = np.nan
    assert why_replay(model, "") == "parameter q_net_target.q_net.0.bias is not finite"
    storage.rewards[5, 3] = np.inf
    assert why_replay(model, "") == "the reward of env 3 in row 5 of the replay buffer is inf"
    storage.next_observations[2, 1, 0] = np.nan
    assert why_replay(model, "") == "the next observation of env 1 in row 2 of the replay buffer is nan"


def test_loss_before_gradient():
    assert blame(False, "a") == "the loss"
    assert blame(True, "a, b") == "the gradient of parameter a, b"
