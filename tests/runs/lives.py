"""A game of three lives of four steps, reward 2 each; and a wrapper in which a life is an episode, of rewards 1."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Lives(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 20, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 2.0, self.steps == 12, False, {}


class LifeByLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    over = True

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        if self.over:
            return self.env.reset(**given)
        return np.full(1, self.unwrapped.steps, np.float32), {}  # type: ignore[attr-defined]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, self.over, cut, info = self.env.step(action)
        return seen, 1.0, self.unwrapped.steps % 4 == 0, cut, info  # type: ignore[attr-defined]
