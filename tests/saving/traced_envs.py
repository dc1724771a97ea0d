"""Envs for test_env_state.py. Free of torch, because a worker imports this module."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium import spaces

from plain_env import PlainEnv


class Hidden(PlainEnv):
    """Shows a number that comes from nowhere."""

    observation_space, length = spaces.Box(-9, 9, (1,), np.float32), 10**9

    def seen(self) -> Any:
        return (np.random.default_rng() if self.time else self.np_random).random(1, np.float32)


class Parts(PlainEnv):
    """Walks by its actions and at random, and observes where it is in two parts."""

    observation_space = spaces.Dict(dict.fromkeys(("cart", "pole"), spaces.Box(-np.inf, np.inf, (2,), np.float32)))
    place = 0.0

    def seen(self) -> Any:
        self.place = self.np_random.random() + (self.place if self.time else 0.0)
        return {key: np.full(2, self.place + number, np.float32) for number, key in enumerate(("cart", "pole"))}

    def paid(self, action: Any) -> float:
        self.place += float(action)
        return self.place


class Slow(Hidden):
    """An episode without an end, 20 ms a step."""

    def seen(self) -> Any:
        time.sleep(0.02 if self.time else 0.0)
        return self.np_random.random(1, np.float32)
