"""How a policy chooses and rates actions: the stock policy's own modules, without distribution objects around them.

`head_of` decides per policy. Discrete, MultiDiscrete and masked MultiBinary actions of an unchanged SB3 policy get the
short way; everything else (Box, gSDE, plain MultiBinary, policies that override anything of the action path) goes
through the policy's own `forward` and `evaluate_actions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import (
    MaskableBernoulliDistribution,
    MaskableCategoricalDistribution,
    MaskableMultiCategoricalDistribution,
)
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import CategoricalDistribution, MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

from fasttrain.batch import BoolArray, Int64Array
from fasttrain.buffers.rollout import TensorObservations
from fasttrain.engines import losses
from fasttrain.engines.devices import Precision
from fasttrain.errors import EnvError

# A policy that overrides one of these acts in a way of its own, and its own methods are called.
_ACTION_PATH = ("forward", "evaluate_actions", "_get_action_dist_from_latent", "__call__")
_SINGLE = (CategoricalDistribution, MaskableCategoricalDistribution)
_MULTI = (MultiCategoricalDistribution, MaskableMultiCategoricalDistribution, MaskableBernoulliDistribution)


Outputs = tuple[Tensor, Tensor]  # logits (B, A) and values (B, 1)
OUTPUT = "the policy's output (logits)"  # in messages
LOST = f"{OUTPUT} is not finite although its inputs are: its weights are too large; lower algo.learning_rate"


class ActingHead(Protocol):
    """Draws actions."""

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N, ...), values (N, 1) and log-probabilities (N,) for observations (N, ...), masks (N, A) bool."""

    def values(self, observations: TensorObservations) -> Tensor:
        """Values (N, 1) alone: of states that no action is drawn for."""


class Head(ActingHead, Protocol):
    """Draws actions, and rates actions drawn earlier."""

    policy: Any

    def evaluate(
        self,
        observations: TensorObservations,  # (B, ...)
        actions: Tensor,  # (B,) or (B, K)
        action_masks: Tensor | None,  # (B, A) bool
        entropy_gradient: bool,  # off: the loss does not use the entropy, which is then only a statistic
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # values (B,), log_probs (B,), entropy (B,) or None
        """Rate actions under the policy as it is now, ready for backward."""


class CategoricalHead:
    """One categorical action per row (`dims` None), or K of them.

    `acting` computes the networks' outputs in `act`; a compiled or graphed form of `outputs` may take its place.
    """

    def __init__(self, policy: Any, dims: Sequence[int] | None, precision: Precision | None = None) -> None:
        self.policy = policy
        self.dims = dims
        self.precision = precision
        self.maskable = isinstance(policy, MaskableActorCriticPolicy)
        self.acting: Callable[[TensorObservations], Outputs] = self.outputs

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        logits, values = self.acting(observations)
        action_masks = self._masks(logits, action_masks)
        if self.dims is None:
            actions, log_probs = losses.sample(logits, action_masks)
        else:
            actions, log_probs = losses.multi_sample(logits, self.dims, action_masks)
        return actions, values, log_probs

    def values(self, observations: TensorObservations) -> Tensor:
        values: Tensor = self.policy.predict_values(observations)
        return values

    def evaluate(
        self, observations: TensorObservations, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits, values = self.outputs(observations)
        action_masks = self._masks(logits, action_masks)
        if self.dims is None:
            log_probs, entropy = losses.log_prob_and_entropy(logits, actions, action_masks, entropy_gradient)
        else:
            log_probs, entropy = losses.multi_log_prob_and_entropy(
                logits, actions, self.dims, action_masks, entropy_gradient
            )
        return values.flatten(), log_probs, entropy

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Logits (B, A) and values (B, 1): all that the networks compute, float32 whatever they compute in."""
        if self.precision is None:
            return self._outputs(observations)
        with self.precision.autocast():
            logits, values = self._outputs(observations)
        return logits.float(), values.float()

    def _outputs(self, observations: TensorObservations) -> Outputs:
        latent_pi, latent_vf = self._latents(observations)
        return self.policy.action_net(latent_pi), self.policy.value_net(latent_vf)

    def _masks(self, logits: Tensor, action_masks: Tensor | None) -> Tensor | None:
        """Without masks sb3-contrib normalises logits twice all the same, which is what an all-legal mask does here."""
        if action_masks is None and self.maskable:
            return torch.ones_like(logits, dtype=torch.bool)
        return action_masks

    def _latents(self, observations: TensorObservations) -> tuple[Tensor, Tensor]:
        policy = self.policy
        features = policy.extract_features(observations)
        if policy.share_features_extractor:
            latent_pi, latent_vf = policy.mlp_extractor(features)
            return latent_pi, latent_vf
        pi_features, vf_features = features
        return policy.mlp_extractor.forward_actor(pi_features), policy.mlp_extractor.forward_critic(vf_features)


class StockHead:
    """The policy's own methods, called as SB3 calls them."""

    def __init__(
        self, policy: Any, action_space: spaces.Space[Any], maskable: bool, precision: Precision | None = None
    ) -> None:
        self.policy = policy
        self.maskable = maskable
        self.precision = precision
        # SB3's plain rollout buffer hands out every action but Discrete as float32; sb3-contrib's keeps the dtype.
        self.float_actions = not maskable and not isinstance(action_space, spaces.Discrete)

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with self._networks():
            if self.maskable:
                masks = None if action_masks is None else action_masks.cpu().numpy()
                actions, values, log_probs = self.policy(observations, action_masks=masks)
            else:
                actions, values, log_probs = self.policy(observations)
        return actions, values, log_probs

    def values(self, observations: TensorObservations) -> Tensor:
        values: Tensor = self.policy.predict_values(observations)
        return values

    def evaluate(
        self, observations: TensorObservations, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.float_actions:
            actions = actions.float()
        evaluate = self.policy.evaluate_actions
        with self._networks():
            if self.maskable:
                values, log_probs, entropy = evaluate(observations, actions, action_masks=action_masks)
            else:
                values, log_probs, entropy = evaluate(observations, actions)
        return values.flatten(), log_probs, entropy

    def _networks(self) -> Any:
        return nullcontext() if self.precision is None else self.precision.inside(self.policy)


class ChunkedHead:
    """Acts for so many envs at a time that a forward fits into memory (or cache)."""

    def __init__(self, head: ActingHead, size: int) -> None:
        self.head, self.size = head, size

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        chunks = self._chunks(observations)
        masks = [None] * len(chunks) if action_masks is None else torch.split(action_masks, self.size)
        drawn = [self.head.act(chunk, mask) for chunk, mask in zip(chunks, masks, strict=True)]
        actions, values, log_probs = (torch.cat(part) for part in zip(*drawn, strict=True))
        return actions, values, log_probs

    def values(self, observations: TensorObservations) -> Tensor:
        return torch.cat([self.head.values(chunk) for chunk in self._chunks(observations)])

    def _chunks(self, observations: TensorObservations) -> list[TensorObservations]:
        if not isinstance(observations, dict):
            return list(torch.split(observations, self.size))
        split = {key: torch.split(part, self.size) for key, part in observations.items()}
        return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]


def head_of(policy: nn.Module, action_space: spaces.Space[Any], precision: Precision | None = None) -> Head:
    """The shortest way through `policy` that gives the numbers of its own methods, up to `precision`."""
    maskable = isinstance(policy, MaskableActorCriticPolicy)
    if is_unchanged(policy):
        kind: Any = type(policy.action_dist)
        if kind in _SINGLE:
            return CategoricalHead(policy, None, precision)
        if kind in _MULTI:
            return CategoricalHead(policy, action_dims(action_space), precision)
    return StockHead(policy, action_space, maskable, precision)


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


def stuck_envs(action_masks: BoolArray, dims: Sequence[int]) -> Int64Array:  # (N, A), (K,)
    """Envs in which some sub-action has no legal choice. A product of booleans: 3 µs for 256 × 86, `any` takes 9."""
    count, ones = len(action_masks), np.ones(max(dims), np.bool_)
    if len(set(dims)) == 1:
        return np.flatnonzero(~(action_masks.reshape(count, -1, dims[0]) @ ones).all(axis=1))
    ends = list(accumulate(dims))
    free = [action_masks[:, end - size : end] @ ones[:size] for end, size in zip(ends, dims, strict=True)]
    return np.flatnonzero(~np.logical_and.reduce(free))


class MaskCheck:
    """Refuses masks under which an env cannot move; SB3 would draw one of its illegal actions without a word."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.dims = action_dims(action_space)
        self.width = sum(self.dims)

    def __call__(self, action_masks: BoolArray, step: int) -> None:
        """Raise `EnvError` if the masks (N, A) have the wrong width or leave an env without a legal action."""
        width = self.width
        if action_masks.shape[1] != width:
            raise EnvError(
                f"action_masks() returned {action_masks.shape[1]} entries per env at step {step}, but the action space "
                f"needs {width}: one per choice, the choices of all sub-actions one after the other"
            )
        stuck = stuck_envs(action_masks, self.dims)
        if not len(stuck):
            return
        raise EnvError(
            f"no legal action in env {', '.join(map(str, stuck))} at step {step}: action_masks() is False for every "
            "choice of a (sub-)action. End the episode in such a state, or offer a pass action"
        )
