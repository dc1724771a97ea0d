from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fasttrain.algos.collector import bootstrap_truncated, clip_actions
from fasttrain.batch import FinishedEpisode

MODEL: Any = SimpleNamespace(
    policy=SimpleNamespace(obs_to_tensor=lambda array: (torch.as_tensor(array), True)),
    gamma=0.5,
    _fast=SimpleNamespace(fused=True),
)


class SumHead:
    """V(observation) = 10 × its sum."""

    def act(self, observations: Any, action_masks: Any) -> Any:
        raise AssertionError("nothing is drawn here")

    def values(self, observations: Any) -> Any:
        return 10.0 * observations.sum(dim=1, keepdim=True)


def episode(index: int, truncated: bool, lost: bool = False) -> FinishedEpisode:
    return FinishedEpisode(index, 1.0, 3, np.full(2, float(index + 1), np.float32), truncated, {}, lost)


def test_only_cut_episodes_get_the_value_of_their_last_state():
    rewards = np.zeros(4, np.float32)
    bootstrap_truncated(MODEL, SumHead(), [episode(0, False), episode(2, True)], rewards, np.zeros(4))
    assert rewards.tolist() == [0.0, 0.0, 0.5 * 10 * 6, 0.0]


def test_a_lost_episode_teaches_nothing():
    rewards, values = np.zeros(3, np.float32), np.array([[1.5], [2.5], [3.5]])
    bootstrap_truncated(MODEL, SumHead(), [episode(1, True, lost=True)], rewards, values)
    assert rewards.tolist() == [0.0, 2.5, 0.0], "reward − value = 0: no advantage"


@pytest.mark.parametrize("squash", [False, True])
def test_box_actions_reach_the_env_within_bounds(squash: bool):
    space = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
    policy = SimpleNamespace(squash_output=squash, unscale_action=lambda actions: 2 * actions)
    model: Any = SimpleNamespace(action_space=space, policy=policy)
    actions = np.array([[-3.0, 2.0], [0.5, 9.0]])
    expected = 2 * actions if squash else np.array([[-1.0, 2.0], [0.5, 4.0]])
    assert (clip_actions(model, actions) == expected).all()


def test_other_actions_pass_as_drawn():
    actions = np.array([3, 4])
    assert clip_actions(SimpleNamespace(action_space=spaces.Discrete(5)), actions) is actions  # type: ignore[arg-type]
