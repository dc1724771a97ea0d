"""An env on a wire: it counts its steps where a SIGKILL does not reach, and fails when it is told to. Free of torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEPS, ORDER = 0, 1  # what the two numbers of a wire mean
RAISE, EXIT = 1, 2
LENGTH = 7  # steps of an episode


class Wire:
    """Two numbers in a file, seen by the injector and by all envs of a run."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        self.numbers = np.memmap(path, np.int64, "r+", shape=(2,))

    @property
    def steps(self) -> int:
        return int(self.numbers[STEPS])

    def clear(self) -> None:
        self.numbers[:] = 0

    def order(self, what: int) -> None:
        self.numbers[ORDER] = what


class WiredEnv(gym.Env[Any, Any]):
    """Random numbers to see, a reward for the right one of four actions; one action in turn is illegal.

    Args:
        wire: the file; empty: none.
        step_s: how long a step takes.
    """

    observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, wire: str = "", step_s: float = 0.0) -> None:
        self._wire = Wire(Path(wire)) if wire else None
        self._step_s = step_s
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._wire is not None:
            self._wire.numbers[STEPS] += 1
            if self._wire.numbers[ORDER] == RAISE:
                raise ValueError("as ordered")
            if self._wire.numbers[ORDER] == EXIT:
                os._exit(3)
        time.sleep(self._step_s)
        self.t += 1
        reward = float(int(action) == self.t % 3) + 0.1 * float(self.np_random.normal())
        return self._observation(), reward, self.t == LENGTH, False, {}

    def action_masks(self) -> Any:
        return np.arange(4) != self.t % 4

    def _observation(self) -> Any:
        return self.np_random.normal(size=3).clip(-9, 9).astype(np.float32)
