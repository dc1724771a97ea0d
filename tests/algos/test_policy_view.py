"""Which way through a policy is taken, and the maths of PPO: by hand, and against the distributions of SB3."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import MaskableMultiCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from fasttrain.accelerators import compiled
from fasttrain.algos import policy_view, ppo
from fasttrain.algos.policy_view import CategoricalView, GaussianView, StockView, action_dims, view_of
from fasttrain.buffers.rollout import RolloutBatch

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


LN2 = math.log(2.0)


def random_case(rows: int, width: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, masks with at least one legal action, legal actions."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    logits = torch.randn(rows, width, generator=generator) * scale
    actions = torch.randint(0, width, (rows,), generator=generator)
    masks = torch.rand(rows, width, generator=generator) < 0.4
    masks[torch.arange(rows), actions] = True
    return logits, masks, actions


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
@pytest.mark.parametrize(
    ("rows", "dims", "scale"),
    [(1, [2], 0.05), (7, [5], 30.0), (64, [86], 1.0), (32, [3, 4, 2], 1.0), (9, [3, 3], 1.0)],
)
def test_values_and_gradients_are_those_of_the_distributions(
    masked: bool, entropy_weight: float, rows: int, dims: list[int], scale: float
):
    parts = zip(*(random_case(rows, size, scale) for size in dims), strict=True)
    logits, masks, actions = (torch.stack(part, 1) if part[0].dim() == 1 else torch.cat(part, 1) for part in parts)
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(0))

    def stock(tensor: Tensor) -> tuple[Tensor, Tensor]:
        kind = MaskableMultiCategoricalDistribution if masked else MultiCategoricalDistribution
        distribution = kind(dims).proba_distribution(tensor)
        if masked:
            distribution.apply_masking(masks)
        return distribution.log_prob(actions), distribution.entropy()

    def ours(tensor: Tensor) -> tuple[Tensor, Tensor]:
        legal, with_gradient = masks if masked else None, entropy_weight != 0
        if len(dims) == 1:
            return policy_view.log_prob_and_entropy(tensor, actions[:, 0], legal, with_gradient)
        return policy_view.multi_log_prob_and_entropy(tensor, actions, dims, legal)

    results = []
    for function in (stock, ours):
        tensor = logits.clone().requires_grad_(True)
        log_prob, entropy = function(tensor)
        ((weights * log_prob).mean() - entropy_weight * entropy.mean()).backward()
        results.append((log_prob.detach(), entropy.detach(), tensor.grad))
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-8 * (1 + float(expected.abs().max())))


@pytest.mark.parametrize("short", [True, False])
def test_draws_are_those_of_multinomial(short: bool, monkeypatch: pytest.MonkeyPatch):
    multinomial, slow = torch.multinomial, Mock(wraps=torch.multinomial)
    monkeypatch.setattr(torch, "multinomial", slow)
    for seed, shape in enumerate([(1, 2), (3, 1), (50, 7), (256, 86)]):
        probs = torch.softmax(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3, -1)
        probs = probs if short else probs.double()
        probs[:, 1:2] = 0.0
        torch.manual_seed(seed)
        expected, after = multinomial(probs, 1, True), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(policy_view.draw(probs), expected)
        assert torch.equal(torch.get_rng_state(), after), "the stream goes on where it would"
    assert slow.called is not short, "the short way is for float32, and meant for this version of torch"


def rows(advantages: list[float], **columns: Any) -> RolloutBatch:
    """A batch with these advantages; what is not named is zero."""
    zero = torch.zeros(len(advantages))
    given = {"old_values": zero, "old_log_probs": zero, "returns": zero} | {
        name: torch.tensor(values) for name, values in columns.items()
    }
    return RolloutBatch(zero, zero, advantages=torch.tensor(advantages), action_masks=None, **given)


def evaluated(values: list[float], log_probs: Any, entropy: Any = None) -> policy_view.Evaluated:
    return policy_view.Evaluated(torch.tensor(values), torch.as_tensor(log_probs), entropy)


def test_policy_loss_by_hand():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    terms = ppo.ppo_terms(rows([1.0, 1.0, -1.0, -1.0]), evaluated([0.0] * 4, ratio.log()), 0.2, None)
    # min(1.5, 1.2), min(0.5, 0.8), min(-1.5, -1.2), min(-0.5, -0.8)
    assert terms["policy_gradient_loss"].item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)


# predictions move to at most 0.1 from the old ones: 0.1 and 0.4
@pytest.mark.parametrize(("clip", "expected"), [(None, 1.0), (0.1, (0.9**2 + 0.6**2) / 2)])
@pytest.mark.parametrize("sequences", [None, "of a recurrent policy"])
def test_value_loss_by_hand(sequences: Any, clip: float | None, expected: float):
    batch = rows([0.0, 0.0], returns=[1.0, 1.0], old_values=[0.0, 0.5])._replace(sequences=sequences)
    terms = ppo.ppo_terms(batch, evaluated([2.0, 0.0], [0.0, 0.0]), 0.2, clip)
    assert terms["value_loss"].item() == pytest.approx(expected)


def test_statistics_by_hand():
    ratio, one = torch.tensor([1.0, 2.0, 0.5, 1.1]), {"one": torch.ones(())}
    numbers = compiled.Coefficients(0.2, None, 0.0, 0.5)
    terms = ppo.with_loss(one, rows([0.0] * 4), evaluated([0.0] * 4, ratio.log()), numbers)
    expected = (0 + (1 - LN2) + (-0.5 + LN2) + (0.1 - math.log(1.1))) / 4
    assert terms["approx_kl"].item() == pytest.approx(expected, abs=1e-6)
    assert terms["clip_fraction"].item() == 0.5
