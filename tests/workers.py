"""Envs for tests that run in worker processes: module-level classes, each with something to check from outside."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from fasttrain.native import GameSpec

GAME = GameSpec(env="workers:Counter", opponent_key="number", eval_opponent="1")


class Counter(gym.Env[Any, Any]):
    """Observation: (env number, episode, steps in it, last action). Reward: action + env number / 10.

    Ends by the rules after `length` steps for an even env, is cut there for an odd one. One action is illegal in turn.
    """

    def __init__(self, number: int, length: int = 7, pause_s: float = 0.0) -> None:
        self.number, self.length, self.pause_s = number, length, pause_s
        self.observation_space = spaces.Box(-1.0, 1e6, (4,), np.float32)
        self.action_space = spaces.Discrete(5)
        self.episode, self.steps = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observation(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.pause_s:
            time.sleep(self.pause_s * (1 + self.number % 3))
        self.steps += 1
        over = self.steps == self.length + self.number
        even = self.number % 2 == 0
        info = {"is_success": even} if over else {}
        return self._observation(int(action)), action + self.number / 10, over and even, over and not even, info

    def action_masks(self) -> Any:
        return np.arange(5) != self.steps % 5

    def level(self) -> int:
        return self.number

    def _observation(self, action: int) -> Any:
        return np.array([self.number, self.episode, self.steps, action], np.float32)


class CounterFactory:
    """Picklable: `Counter(number)`."""

    def __init__(self, number: int, pause_s: float = 0.0) -> None:
        self.number, self.pause_s = number, pause_s

    def __call__(self) -> Counter:
        return Counter(self.number, pause_s=self.pause_s)
