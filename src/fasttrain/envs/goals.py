"""Goals that one policy, the manager, sets for another. Setting a goal is a decision without a step of the env."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray
from fasttrain.envs.answers import reset_inner
from fasttrain.envs.masks import head_sizes
from fasttrain.envs.user_code import attribute_of
from fasttrain.envs.wrappers import with_flags
from fasttrain.errors import EnvSpecError


class Goals(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds decisions that set a goal. A one-hot of the goal is appended to observations, the goal's number to actions.

    At the start of an episode a goal is due, and the one-hot is zero. The next action only sets the goal: the env makes
    no step, and the reward is 0. Later actions step the env, until the next goal is due.

    Args:
        count: the number of goals.
        every: number of env steps after which the next goal is due; 0: never.
        borders: columns of the observation; a goal is also due when a value in one of them has changed.

    Raises:
        EnvSpecError: the observation is not a Box with one axis or lacks a column, or the actions are of another kind
            than Box with one axis, Discrete or MultiDiscrete.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], count: int, every: int, borders: Iterable[int] = ()) -> None:
        super().__init__(env)
        self._every, self._borders, self._flags = every, [*borders], np.eye(1 + count)[:, 1:]
        self.observation_space: Any = with_flags(env.observation_space, count, "goal_every")
        space: Any = env.action_space
        if self._borders and max(self._borders) >= self.observation_space.shape[0] - count:
            raise EnvSpecError(f"goal_every=phase: the observation has no column {max(self._borders)}")
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.action_space = spaces.MultiDiscrete([*head_sizes(space), count])
        elif isinstance(space, spaces.Box) and len(space.shape) == 1:
            low, high = np.append(space.low, 0), np.append(space.high, count - 1)
            self.action_space = spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
        else:
            raise EnvSpecError(
                f"goal_every goes with actions that are Discrete, MultiDiscrete or a flat Box, not {space}"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_inner(self.env, seed, options)
        self._goal = 0  # number of the goal + 1; 0: the next action sets a goal
        return self._shown(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self._goal:
            self._goal, self._steps, self._begun = 1 + int(action[-1]), 0, self._last[self._borders]
            return self._shown(self._last), 0.0, False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(self._own(action))
        self._steps += 1
        if self._steps == self._every or np.any(observation[self._borders] != self._begun):
            self._goal = 0
        return self._shown(observation), reward, terminated, truncated, info

    def describe_action(self, action: Any) -> str:
        """The action in words, for `fasttrain play`."""
        if not self._goal:
            return f"sets goal {int(action[-1])}"
        tell = attribute_of(self.env, "describe_action", str)
        return str(tell(self._own(action)))

    def _own(self, action: Any) -> Any:
        """The env's part of an action."""
        space: Any = self.env.action_space
        return np.asarray(action[:-1], space.dtype).reshape(space.shape)[()]

    def _shown(self, observation: Any) -> Any:
        self._last = np.array(observation)
        return np.concatenate([observation, self._flags[self._goal]], dtype=self.observation_space.dtype)


class MaskedGoals(Goals):
    """`Goals` around an env with masks. Every goal is legal."""

    def action_masks(self) -> BoolArray:
        masks = self.env.get_wrapper_attr("action_masks")()
        return np.concatenate([masks, np.ones(self._flags.shape[1], np.bool_)])
