"""TwoSided: tells the trainer whose decision comes next in an env where it decides for both sides.

Such an env (self-play) has a property `opponents_turn`, true where the next `step` is the opponent's, whose view the
observation and the mask then are; rewards are always the learner's. `vec.self_play` drives it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.errors import EnvSpecError


class TwoSided(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts `opponents_turn` into every info, and takes a negative action for "leave this env as it is".

    So that one side's decisions of some envs can be made while the others wait. Outermost wrapper.

    Raises:
        EnvSpecError: the env has no such property, or actions that may be negative.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        if not env.has_wrapper_attr(TURN):
            raise EnvSpecError(
                f"env {env.unwrapped} cannot be played against oneself: it has no property {TURN} (true where the "
                "next step is the opponent's decision)"
            )
        if not isinstance(env.action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise EnvSpecError(f"env {env.unwrapped} cannot be played against oneself: {env.action_space} actions")
        self._last: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._last, info = self.env.reset(seed=seed, options=options)
        return self._last, self._with_turn(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if np.min(action) < 0:
            return self._last, 0.0, False, False, self._with_turn({})
        self._last, reward, terminated, truncated, info = self.env.step(action)
        return self._last, reward, terminated, truncated, self._with_turn(info)

    def _with_turn(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, TURN: bool(self.env.get_wrapper_attr(TURN))}
