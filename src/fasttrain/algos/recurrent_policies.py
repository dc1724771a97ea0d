"""sb3-contrib's recurrent policies with a GRU in place of the LSTM, and with action masks.

With masks the weights have the names and shapes of sb3-contrib's recurrent policies. (MultiBinary actions have two
logits per bit, as in MaskablePPO.) This file imports nothing of fasttrain. With a copy of it beside a model.zip,
`sb3_contrib.RecurrentPPO.load(…, custom_objects={"policy_class": …})` loads the zip.
"""

from __future__ import annotations

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

States = tuple[Tensor, Tensor]  # h and c like an LSTM's, (L, N, H) each


class GRU(nn.GRU):
    """torch's GRU with the interface of an LSTM. A GRU has no cell states; given ones are returned unchanged."""

    def forward(self, inputs: Tensor, states: States) -> tuple[Tensor, States]:  # type: ignore[override]
        """Hidden states (T, N, H) for inputs (T, N, F), and the states after the last step."""
        output, after = super().forward(inputs, states[0])
        return output, (after, states[1])


class CellActorCriticPolicy(RecurrentActorCriticPolicy):
    """sb3-contrib's policy, with GRUs in place of the LSTMs if `cell` is gru."""

    @wraps(RecurrentActorCriticPolicy.__init__)  # type: ignore[misc]  # whose defaults are read by `inspect`
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
        optimizer: Any = self.optimizer_class  # a new optimizer for the new parameters
        self.optimizer = optimizer(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class CellActorCriticCnnPolicy(CellActorCriticPolicy, RecurrentActorCriticCnnPolicy):
    """`CellActorCriticPolicy` for images."""


class CellMultiInputActorCriticPolicy(CellActorCriticPolicy, RecurrentMultiInputActorCriticPolicy):
    """`CellActorCriticPolicy` for Dict observations."""


class MaskableRecurrentActorCriticPolicy(CellActorCriticPolicy):
    """A policy whose methods take `action_masks` (N, A) bool; None: all actions are legal."""

    _masks: Any = None  # the masks of the method call that is running

    def _build(self, lr_schedule: Any) -> None:
        # SB3 builds the networks, so that a seed gives the same weights as in SB3. A masked distribution has two logits
        # per bit. SB3 cannot build it, so SB3 gets an unmasked distribution with as many logits.
        if isinstance(self.action_space, spaces.MultiBinary):
            as_choices = spaces.MultiDiscrete([2] * int(np.prod(self.action_space.n)))
            self.action_dist = make_proba_distribution(as_choices)
        super()._build(lr_schedule)
        self.action_dist = make_masked_proba_distribution(self.action_space)

    @contextmanager
    def _within(self, action_masks: Any) -> Iterator[None]:
        # SB3's methods call each other without masks, so `_masks` keeps the masks of the outer call.
        before = self._masks
        self._masks = before if action_masks is None else action_masks
        try:
            yield
        finally:
            self._masks = before

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Any:
        masked: Any = self.action_dist
        distribution = masked.proba_distribution(action_logits=self.action_net(latent_pi))
        distribution.apply_masking(self._masks)
        return distribution

    def forward(  # type: ignore[override]
        self, obs: Any, lstm_states: Any, episode_starts: Tensor, deterministic: bool = False, action_masks: Any = None
    ) -> Any:
        """Actions, values, log-probabilities, and the states after the step."""
        with self._within(action_masks):
            return super().forward(obs, lstm_states, episode_starts, deterministic)

    def get_distribution(  # type: ignore[override]
        self, obs: Any, lstm_states: Any, episode_starts: Tensor, action_masks: Any = None
    ) -> Any:
        """The distribution of the actions, and the states after the step."""
        with self._within(action_masks):
            return super().get_distribution(obs, lstm_states, episode_starts)

    def evaluate_actions(  # type: ignore[override]
        self, obs: Any, actions: Tensor, lstm_states: Any, episode_starts: Tensor, action_masks: Any = None
    ) -> Any:
        """Values, log-probabilities and entropies of `actions`."""
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
        """Actions, and the states after the step, as arrays."""
        with self._within(action_masks):
            return super().predict(observation, state, episode_start, deterministic)


class MaskableRecurrentActorCriticCnnPolicy(MaskableRecurrentActorCriticPolicy, RecurrentActorCriticCnnPolicy):
    """`MaskableRecurrentActorCriticPolicy` for images."""


class MaskableRecurrentMultiInputActorCriticPolicy(
    MaskableRecurrentActorCriticPolicy, RecurrentMultiInputActorCriticPolicy
):
    """`MaskableRecurrentActorCriticPolicy` for Dict observations."""
