"""An env that raises on all actions but one, which a method, not called as others are, names; and a function for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from plain_env import PlainEnv


class Hunt(PlainEnv):
    """What it observes says nothing of the legal action, so that only a mask that arrives in time plays it."""

    action_space = spaces.Discrete(5)
    length = 8

    def seen(self) -> Any:
        self.prey = int(self.np_random.integers(5))
        return np.full(2, self.time, np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action != self.prey:
            raise ValueError(f"action {action} is illegal, {self.prey} is not")
        return super().step(action)

    def paid(self, action: Any) -> float:
        return 3.0

    def legal(self, env: Any = None) -> Any:
        """`ActionMasker` hands a method that it finds by name the env once more."""
        return np.arange(5) == self.prey


def legal(env: Any) -> Any:
    return env.unwrapped.legal()


gymnasium.register("Hunt-v0", entry_point=Hunt)
