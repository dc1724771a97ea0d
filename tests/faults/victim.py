"""An env that does to its process what envs do, where and when it is told."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

LENGTH = 400  # of an episode
MOST_BYTES = 1 << 31  # that it really takes


class Victim(gym.Env[Any, Any]):
    """Well until `where` ("constructor", "reset", "step", "action_masks" or "close"), in a step number `at`."""

    observation_space = gym.spaces.Box(-500, 500, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, how: str = "", where: str = "", at: int = 1) -> None:
        self.how, self.where, self.at, self.count = how, where, at, 0
        self._pass("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.x = 0, self.np_random.random()
        self._pass("reset")
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.x += int(action) - 1
        self._pass("step")
        return self._observed(), float(action), self.count == LENGTH, False, {}

    def action_masks(self) -> Any:
        self._pass("action_masks")
        return np.ones(3, np.bool_)

    def close(self) -> None:
        self._pass("close")

    def _observed(self) -> Any:
        return np.zeros(2, np.float32) + self.x

    def _pass(self, where: str) -> None:
        if where == self.where and (self.count == self.at or where in ("constructor", "reset", "close")):
            sys.stdout.write(f"about to {self.how}\n")
            globals()[f"_{self.how}"]()


def _hang() -> None:
    time.sleep(600)


def _spin() -> None:
    while True:
        pass


def _spam() -> None:
    while True:
        sys.stdout.write("spam " * 100 + "\n")
        time.sleep(0.01)


def _exit() -> None:
    os._exit(3)


def _leave() -> None:
    sys.exit(3)


def _segfault() -> None:
    ctypes.string_at(0)


def _abort() -> None:
    os.abort()


def _raises() -> None:
    raise RuntimeError("the board fell")


def _eat() -> None:
    eaten = []
    while len(eaten) << 24 < MOST_BYTES:
        eaten.append(b"\1" * (1 << 24))
        time.sleep(0.005)
    time.sleep(600)
