"""Envs for test_env_state.py. Free of torch, because a worker imports this module."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Hidden(gymnasium.Env[Any, Any]):
    """Shows a number that comes from nowhere."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.random.default_rng().random(1, np.float32), 1.0, False, False, {}


class Parts(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with observations in two parts."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({"cart": box, "pole": box})

    def reset(self, **more: Any) -> Any:
        seen, info = self.env.reset(**more)
        return {"cart": seen[:2], "pole": seen[2:]}, info

    def step(self, action: Any) -> Any:
        seen, *rest = self.env.step(action)
        return {"cart": seen[:2], "pole": seen[2:]}, *rest


class Slow(Hidden):
    """An episode without an end, 20 ms a step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.02)
        return self.np_random.random(1, np.float32), 1.0, False, False, {}
