"""Envs for test_env_state.py. Free of torch, because a worker imports this module."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from plain_env import PlainEnv


class Hidden(PlainEnv):
    """Shows a number that comes from nowhere."""

    observation_space, length = spaces.Box(-9, 9, (1,), np.float32), 10**9

    def seen(self) -> Any:
        return (np.random.default_rng() if self.time else self.np_random).random(1, np.float32)


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

    def seen(self) -> Any:
        time.sleep(0.02 if self.time else 0.0)
        return self.np_random.random(1, np.float32)
