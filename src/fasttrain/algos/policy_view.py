"""How a policy chooses and rates actions: the stock policy's own modules, without distribution objects around them.

`view_of` decides per policy. Discrete, MultiDiscrete, masked MultiBinary and continuous actions of an unchanged SB3
policy get the short way; everything else (gSDE, plain MultiBinary, policies that override anything of the action path)
goes through the policy's own `forward` and `evaluate_actions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import (
    MaskableBernoulliDistribution,
    MaskableCategoricalDistribution,
    MaskableDistribution,
    MaskableMultiCategoricalDistribution,
)
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

from fasttrain.algos import losses
from fasttrain.algos.devices import Precision
from fasttrain.algos.losses import Evaluated
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations

# A policy that overrides one of these acts in a way of its own, and its own methods are called.
_ACTION_PATH = ("forward", "evaluate_actions", "_get_action_dist_from_latent", "__call__")
_SINGLE = (CategoricalDistribution, MaskableCategoricalDistribution)
_MULTI = (MultiCategoricalDistribution, MaskableMultiCategoricalDistribution, MaskableBernoulliDistribution)


Outputs = tuple[Tensor, Tensor]  # logits or means (B, A), and values (B, 1)
OUTPUT = "the policy's output (logits or means)"  # in messages
LOST = f"{OUTPUT} is not finite although its inputs are: its weights are too large; lower algo.learning_rate"


class PolicyView(ABC):
    """Draws actions, and rates actions drawn earlier.

    Args:
        precision: that the networks compute in; None: float32.
        dims: sizes of the sub-actions, where there are several.
    """

    layout = ""  # of the sequences that it rates, where it remembers

    def __init__(self, policy: Any, precision: Precision | None = None, dims: Sequence[int] | None = None) -> None:
        self.policy, self.precision, self.dims = policy, precision, dims
        self.maskable = isinstance(getattr(policy, "action_dist", None), MaskableDistribution)

    @abstractmethod
    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N, ...), values (N, 1) and log-probabilities (N,) for observations (N, ...), masks (N, A) bool."""

    def values(self, observations: TensorObservations) -> Tensor:
        """Values (N, 1) alone: of states that no action is drawn for."""
        values: Tensor = self.policy.predict_values(observations)
        return values

    @abstractmethod
    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        """Rate a minibatch's actions. `entropy_gradient` off: the entropy is a statistic and part of no loss."""


class NetworkView(PolicyView):
    """The policy's networks, called directly, and the distribution's own operations on what comes out of them."""

    acting: Callable[[TensorObservations], Outputs] | None = None  # a compiled form of `outputs`, for `act`

    @abstractmethod
    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions (N,) or (N, K) and their log-probabilities (N,), of the action net's outputs (N, A)."""

    @abstractmethod
    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B,) of the action net's outputs (B, A)."""

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values = (self.acting or self.outputs)(observations)
        actions, log_probs = self.drawn(outputs, action_masks)
        return actions, values, log_probs

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        outputs, values = self.outputs(batch.observations)
        rated = self.rate(outputs, batch.actions, batch.action_masks, entropy_gradient)
        return Evaluated(values.flatten(), *rated, outputs)

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Of the action net (B, A), and values (B, 1): all that networks compute, float32 whatever they compute in."""
        policy, extractor, precision = self.policy, self.policy.mlp_extractor, self.precision
        with nullcontext() if precision is None else precision.autocast():
            features = policy.extract_features(observations)
            if policy.share_features_extractor:
                latent_pi, latent_vf = extractor(features)
            else:
                latent_pi, latent_vf = extractor.forward_actor(features[0]), extractor.forward_critic(features[1])
            outputs, values = policy.action_net(latent_pi), policy.value_net(latent_vf)
        return (outputs, values) if precision is None else (outputs.float(), values.float())


class CategoricalView(NetworkView):
    """One categorical action per row (`dims` None), or K of them; the action net's outputs are logits."""

    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        action_masks = self._masks(outputs, action_masks)
        if self.dims is None:
            return losses.sample(outputs, action_masks)
        return losses.multi_sample(outputs, self.dims, action_masks)

    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        action_masks = self._masks(outputs, action_masks)
        if self.dims is None:
            return losses.log_prob_and_entropy(outputs, actions, action_masks, entropy_gradient)
        return losses.multi_log_prob_and_entropy(outputs, actions, self.dims, action_masks, entropy_gradient)

    def _masks(self, logits: Tensor, action_masks: Tensor | None) -> Tensor | None:
        """Without masks sb3-contrib normalises logits twice all the same, which is what an all-legal mask does here."""
        if action_masks is None and self.maskable:
            return torch.ones_like(logits, dtype=torch.bool)
        return action_masks


class GaussianView(NetworkView):
    """Continuous actions (B, A) of a diagonal Gaussian; the action net's outputs are its means.

    By the operations of torch's Normal, without making one: `log_std` (A,) is a parameter of the policy.
    """

    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = self._scale(outputs)
        actions = outputs + torch.empty_like(outputs).normal_() * scale
        if not torch.isfinite(actions.sum()):
            raise ValueError("Expected parameters of a Gaussian that are finite")  # as torch's Normal does
        return actions, losses.gaussian_log_prob(outputs, scale, actions)

    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        scale = self._scale(outputs)
        return losses.gaussian_log_prob(outputs, scale, actions), losses.gaussian_entropy(scale)

    def _scale(self, means: Tensor) -> Tensor:
        scale: Tensor = torch.ones_like(means) * self.policy.log_std.exp()
        return scale


class StockView(PolicyView):
    """The policy's own methods, called as SB3 calls them."""

    def __init__(self, policy: Any, action_space: spaces.Space[Any], precision: Precision | None = None) -> None:
        super().__init__(policy, precision)
        # SB3's plain rollout buffer hands out every action but Discrete as float32; sb3-contrib's keeps the dtype.
        self.float_actions = not self.maskable and not isinstance(action_space, spaces.Discrete)

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with self._networks():
            if self.maskable:
                masks = None if action_masks is None else action_masks.cpu().numpy()
                actions, values, log_probs = self.policy(observations, action_masks=masks)
            else:
                actions, values, log_probs = self.policy(observations)
        return actions, values, log_probs

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        actions = batch.actions.float() if self.float_actions else batch.actions
        masks = {"action_masks": batch.action_masks} if self.maskable else {}
        with self._networks():
            values, log_probs, entropy = self.policy.evaluate_actions(batch.observations, actions, **masks)
        return Evaluated(values.flatten(), log_probs, entropy)

    def _networks(self) -> Any:
        return nullcontext() if self.precision is None else self.precision.inside(self.policy)


def view_of(policy: nn.Module, action_space: spaces.Space[Any], precision: Precision | None = None) -> PolicyView:
    """The shortest way through `policy` that gives the numbers of its own methods, up to `precision`."""
    direct = networks_of(policy, action_space, precision) if is_unchanged(policy) else None
    return direct or StockView(policy, action_space, precision)


def networks_of(policy: Any, action_space: spaces.Space[Any], precision: Precision | None = None) -> NetworkView | None:
    """Of a policy whose distribution is one of choices, or a diagonal Gaussian over a vector; None of another."""
    kind: Any = type(policy.action_dist)
    if kind in _SINGLE:
        return CategoricalView(policy, precision)
    if kind is DiagGaussianDistribution and len(action_space.shape or ()) == 1:
        return GaussianView(policy, precision)
    return CategoricalView(policy, precision, action_dims(action_space)) if kind in _MULTI else None


def is_unchanged(policy: nn.Module) -> bool:
    """Whether the action path of `policy` is SB3's own: no override in its class, its instance or by hooks."""
    base = MaskableActorCriticPolicy if isinstance(policy, MaskableActorCriticPolicy) else ActorCriticPolicy
    if not isinstance(policy, base):
        return False
    same_class = all(getattr(type(policy), name) is getattr(base, name) for name in _ACTION_PATH)
    hooked = policy._forward_hooks or policy._forward_pre_hooks or policy._backward_hooks
    return same_class and not hooked and not any(name in vars(policy) for name in _ACTION_PATH)


def action_dims(action_space: spaces.Space[Any]) -> list[int]:
    """Sizes of the categorical sub-actions of a maskable action space; their sum is the width of its mask."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(size) for size in action_space.nvec]
    if isinstance(action_space, spaces.MultiBinary):
        return [2] * int(np.prod(action_space.n))
    raise TypeError(f"{type(action_space).__name__} actions have no masks")
