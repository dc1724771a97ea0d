"""Recurrent policies with action masks: sb3-contrib's, drawing from its masked distributions.

The weights are those of sb3-contrib's recurrent policies, by the same names and shapes (for MultiBinary actions two
logits a bit, as its MaskablePPO has them). This file needs nothing of fasttrain: copied beside a model.zip of
MaskableRecurrentPPO it is all that `sb3_contrib.RecurrentPPO.load(…, custom_objects={"policy_class": …})` needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticCnnPolicy,
    RecurrentActorCriticPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from stable_baselines3.common.distributions import make_proba_distribution
from torch import Tensor


class MaskableRecurrentActorCriticPolicy(RecurrentActorCriticPolicy):
    """Every method that draws or rates actions takes `action_masks` (N, A), None for all legal."""

    _legal: Any = None  # of the call under way

    def _build(self, lr_schedule: Any) -> None:
        # Stock builds the networks, so that the same random numbers make the same weights. It does not know masked
        # distributions, and to a mask a bit is a choice of two.
        if isinstance(self.action_space, spaces.MultiBinary):
            as_choices = spaces.MultiDiscrete([2] * int(np.prod(self.action_space.n)))
            self.action_dist = make_proba_distribution(as_choices)
        super()._build(lr_schedule)
        self.action_dist = make_masked_proba_distribution(self.action_space)

    @contextmanager
    def _within(self, action_masks: Any) -> Iterator[None]:
        # One of these methods calls another, in stock without masks: those of the outer call hold.
        before = self._legal
        self._legal = before if action_masks is None else action_masks
        try:
            yield
        finally:
            self._legal = before

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Any:
        found: Any = self.action_dist
        distribution = found.proba_distribution(action_logits=self.action_net(latent_pi))
        distribution.apply_masking(self._legal)
        return distribution

    def forward(  # type: ignore[override]
        self, obs: Any, lstm_states: Any, episode_starts: Tensor, deterministic: bool = False, action_masks: Any = None
    ) -> Any:
        """Actions, values, log-probabilities, states."""
        with self._within(action_masks):
            return super().forward(obs, lstm_states, episode_starts, deterministic)

    def get_distribution(  # type: ignore[override]
        self, obs: Any, lstm_states: Any, episode_starts: Tensor, action_masks: Any = None
    ) -> Any:
        """The distribution of the actions, and the states after."""
        with self._within(action_masks):
            return super().get_distribution(obs, lstm_states, episode_starts)

    def evaluate_actions(  # type: ignore[override]
        self, obs: Any, actions: Tensor, lstm_states: Any, episode_starts: Tensor, action_masks: Any = None
    ) -> Any:
        """Values, log-probabilities, entropies."""
        with self._within(action_masks):
            return super().evaluate_actions(obs, actions, lstm_states, episode_starts)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> Any:
        """Actions and states, on the host."""
        with self._within(action_masks):
            return super().predict(observation, state, episode_start, deterministic)


class MaskableRecurrentActorCriticCnnPolicy(MaskableRecurrentActorCriticPolicy, RecurrentActorCriticCnnPolicy):
    """For images."""


class MaskableRecurrentMultiInputActorCriticPolicy(
    MaskableRecurrentActorCriticPolicy, RecurrentMultiInputActorCriticPolicy
):
    """For Dict observations."""
