"""An env in which nothing happens, from which odd ones are made: they say what is odd about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class PlainEnv(gymnasium.Env[Any, Any]):
    """Observes zeros, pays 1 a step, ends after `length` steps, counted in `time`; `cut`: by a limit."""

    observation_space: spaces.Space[Any] = spaces.Box(-20, 20, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    length, time, cut = 10, 0, False

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.time += 1
        over = self.time == self.length
        return self.seen(), self.paid(action), over and not self.cut, over and self.cut, self.told()

    def seen(self) -> Any:
        return np.zeros(self.observation_space.shape or (), np.float32)

    def paid(self, action: Any) -> Any:
        return 1.0

    def told(self) -> dict[str, Any]:
        return {}


class DrawnEnv(PlainEnv):
    """Observes two random numbers."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


def first(file: Path) -> bool:
    """Whether nobody else has made this file, which is there now."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
