"""A model that decides for several seats of one game, and remembers what each of them saw apart."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.batch import OPPONENTS_TURN as TURN


def opponents_decide(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether the decision is not the learner's."""
    return env.has_wrapper_attr(TURN) and bool(env.get_wrapper_attr(TURN))


class Seats:
    """Asks a model for whichever seat must decide; where an env does not name it, all opponents are one seat."""

    def __init__(
        self, model: BaseAlgorithm, env: gymnasium.Env[Any, Any], has_masks: bool, deterministic: bool
    ) -> None:
        self._predict: Any = model.predict
        self._env, self._deterministic = env, deterministic
        self.masked = has_masks and "action_masks" in inspect.signature(model.predict).parameters
        self._states: dict[Any, Any] = {}

    def forget(self) -> None:
        """An episode begins."""
        self._states = {}

    def actions(self, observations: Any, masks: NDArray[np.bool_] | None) -> NDArray[Any]:
        """The action (1, …) for one row of observations and masks."""
        seat: Any = opponents_decide(self._env)
        if seat and self._env.has_wrapper_attr("seat_to_decide"):
            seat = self._env.get_wrapper_attr("seat_to_decide")
        begins = np.array([seat not in self._states])
        extra = {"action_masks": masks} if self.masked else {}
        actions: NDArray[Any]
        actions, self._states[seat] = self._predict(
            observations, state=self._states.get(seat), episode_start=begins, deterministic=self._deterministic, **extra
        )
        return actions
