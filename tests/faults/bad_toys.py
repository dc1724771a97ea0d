"""An env that breaks while a run is going, in its step number `at`. Free of torch, because workers import it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np


def fall() -> None:
    raise RuntimeError("the board fell")


def eat() -> None:
    """At most 2 GB, slowly."""
    eaten = []
    while len(eaten) < 128:
        eaten.append(b"\1" * (1 << 24))
        time.sleep(0.005)
    time.sleep(600)


DEEDS: dict[str, Callable[[], Any]] = {
    "raise": fall,
    "hang": lambda: time.sleep(600),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "eat": eat,
}


class Bad(gym.Env[Any, Any]):
    """Ten steps an episode. `fault`: one of `DEEDS`, nan_observation, nan_reward, overflow, stuck or endless."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, fault: str = "none", at: int = 205, start: int = 0) -> None:
        self.fault, self.at, self.total = fault, at, 0
        self.action_space = gym.spaces.Discrete(3, start=start)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.total += 1
        now = self.fault if self.total == self.at else ""
        if now in DEEDS:
            DEEDS[now]()
        observation = np.full(3, np.nan if now == "nan_observation" else 0.1 * self.t % 1, np.float32)
        reward = np.nan if now == "nan_reward" else 3e38 if self.fault == "overflow" else 1.0
        return observation, reward, self.t >= 10 and self.fault != "endless", False, {}

    def action_masks(self) -> Any:
        return np.full(3, not (self.fault == "stuck" and self.total >= self.at))
