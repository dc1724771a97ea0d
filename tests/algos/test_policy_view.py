"""Which way through a policy is taken, and that both ways give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.algos.policy_view import CategoricalView, GaussianView, StockView, action_dims, view_of

BOX = spaces.Box(-1, 1, (5,), np.float32)


def policy_for(action_space: spaces.Space, base: type = MaskableActorCriticPolicy, **kwargs):
    torch.manual_seed(0)
    return base(BOX, action_space, lambda _: 3e-4, **kwargs)


class OwnForward(ActorCriticPolicy):
    def forward(self, obs, deterministic=False):
        return super().forward(obs, deterministic)


class OwnFeatures(ActorCriticPolicy):
    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(2 * obs, features_extractor)


@pytest.mark.parametrize(
    ("action_space", "base", "expected"),
    [
        (spaces.Discrete(4), MaskableActorCriticPolicy, CategoricalView),
        (spaces.MultiDiscrete([2, 3]), MaskableActorCriticPolicy, CategoricalView),
        (spaces.MultiBinary(3), MaskableActorCriticPolicy, CategoricalView),
        (spaces.Discrete(4), ActorCriticPolicy, CategoricalView),
        (spaces.MultiDiscrete([2, 3]), ActorCriticPolicy, CategoricalView),
        (spaces.MultiBinary(3), ActorCriticPolicy, StockView),
        (spaces.Box(-1, 1, (2,)), ActorCriticPolicy, GaussianView),
        (spaces.Box(-1, 1, (2, 1)), ActorCriticPolicy, StockView),
        (spaces.Discrete(4), OwnForward, StockView),
        (spaces.Discrete(4), OwnFeatures, CategoricalView),
    ],
)
def test_choice_of_head(action_space, base, expected):
    assert type(view_of(policy_for(action_space, base), action_space)) is expected


def test_a_patched_or_hooked_policy_keeps_its_own_methods():
    space = spaces.Discrete(4)
    policy = policy_for(space)
    policy.forward = policy.forward
    assert type(view_of(policy, space)) is StockView
    policy = policy_for(space)
    policy.register_forward_hook(lambda *_: None)
    assert type(view_of(policy, space)) is StockView


def test_widths_of_masks():
    assert action_dims(spaces.Discrete(5)) == [5]
    assert action_dims(spaces.MultiDiscrete([2, 3])) == [2, 3]
    assert action_dims(spaces.MultiBinary(3)) == [2, 2, 2]
    with pytest.raises(TypeError, match="Box"):
        action_dims(spaces.Box(-1, 1, (2,)))
