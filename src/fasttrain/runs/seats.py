"""A model that decides for several seats of a game and remembers what each saw; which games were one and the same."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.batch import BoolArray, Int64Array, Observations
from fasttrain.envs.masks import property_of


def opponents_decide(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether the decision is not the learner's."""
    read = property_of(env, TURN)
    return bool(read() if read else env.has_wrapper_attr(TURN) and env.get_wrapper_attr(TURN))


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

    def actions(self, observations: object, masks: NDArray[np.bool_] | None) -> NDArray[Any]:
        """The action (1, …) for one row of observations and masks."""
        seat = opponents_decide(self._env)
        if seat and self._env.has_wrapper_attr("seat_to_decide"):
            seat = self._env.get_wrapper_attr("seat_to_decide")
        begins = np.array([seat not in self._states])
        extra = {"action_masks": masks} if self.masked else {}
        actions: NDArray[Any]
        actions, self._states[seat] = self._predict(
            observations, state=self._states.get(seat), episode_start=begins, deterministic=self._deterministic, **extra
        )
        return actions


class Paths:
    """Which episodes of an evaluation were one and the same: by a checksum of all that was observed in each."""

    def __init__(self, env: VecEnv) -> None:
        self.seen = np.zeros(env.num_envs, np.int64)  # of the running episodes
        self.ended = set[tuple[Any, ...]]()
        self._all = not isinstance(env.action_space, spaces.Box)  # else rounding alone leads elsewhere: the first alone

    def see(self, observations: Observations, lengths: Int64Array, late: BoolArray | None) -> None:
        """What the policy acted on, but for rows in which nothing was done."""
        parts = observations.values() if isinstance(observations, dict) else (observations,)
        for index in np.flatnonzero((self._all | (lengths == 0)) & (True if late is None else ~late)):
            for part in parts:
                self.seen[index] = zlib.crc32(part[index].tobytes(), int(self.seen[index]))

    def end(self, index: np.integer[Any], length: np.integer[Any], episode_return: float) -> None:
        """That env's episode counts."""
        self.ended.add((int(self.seen[index]), int(length), f"{episode_return:.5g}"))

    def told(self, quality: dict[str, Any]) -> dict[str, Any]:
        """With `distinct_episodes` where some were one, as all greedy ones of a deterministic game are."""
        distinct = len(self.ended)
        if distinct == 1 < quality["episodes"]:  # one game, seen again and again: nothing of it is uncertain
            quality["ci95"] = dict.fromkeys(quality["ci95"])
        return {**quality, "distinct_episodes": distinct} if distinct < quality["episodes"] else quality
