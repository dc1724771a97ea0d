"""Recurrent policies with a GRU in the LSTM's place, and with action masks: sb3-contrib's in all else.

With masks the weights are those of sb3-contrib's recurrent policies, by the same names and shapes (for MultiBinary
actions two logits a bit, as its MaskablePPO has them). This file needs nothing of fasttrain: copied beside a model.zip
it is all that `sb3_contrib.RecurrentPPO.load(…, custom_objects={"policy_class": …})` needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
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
from torch import Tensor, nn

States = tuple[Tensor, Tensor]  # h and c, (L, N, H) each, where an LSTM has them


class GRU(nn.GRU):
    """torch's, as a policy calls an LSTM. It keeps no cells: those that it is given, of any width, are given back."""

    def forward(self, inputs: Tensor, states: States) -> tuple[Tensor, States]:  # type: ignore[override]
        """Hidden states (T, N, H) of inputs (T, N, F), and the states after."""
        output, after = super().forward(inputs, states[0])
        return output, (after, states[1])


class CellActorCriticPolicy(RecurrentActorCriticPolicy):
    """sb3-contrib's, with GRUs in the LSTMs' place where `cell` is gru."""

    @wraps(RecurrentActorCriticPolicy.__init__)  # type: ignore[misc]  # whose defaults are looked at
    def __init__(
        self, observation_space: Any, action_space: Any, lr_schedule: Any, *further: Any, cell: str = "lstm",
        **settings: Any,
    ) -> None:  # fmt: skip
        if cell not in ("lstm", "gru"):
            raise ValueError(f"cell={cell}: use lstm or gru")
        super().__init__(observation_space, action_space, lr_schedule, *further, **settings)
        self.cell = cell
        if cell == "lstm":
            return
        for name in ("lstm_actor", "lstm_critic"):
            if (lstm := getattr(self, name)) is not None:
                setattr(self, name, GRU(lstm.input_size, lstm.hidden_size, lstm.num_layers))
        optimizer: Any = self.optimizer_class  # anew, of the parameters that are there now
        self.optimizer = optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class CellActorCriticCnnPolicy(CellActorCriticPolicy, RecurrentActorCriticCnnPolicy):
    """For images."""


class CellMultiInputActorCriticPolicy(CellActorCriticPolicy, RecurrentMultiInputActorCriticPolicy):
    """For Dict observations."""


class MaskableRecurrentActorCriticPolicy(CellActorCriticPolicy):
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


sys.modules.setdefault("fasttrain.engines.recurrent_policies", sys.modules[__name__])  # where older zips look
