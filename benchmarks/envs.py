"""Environments of known cost, for `env.entry_point=benchmarks.envs:NAME` and the vector envs of others."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Computing(gym.Env[Any, Any]):
    """Computes `cost_ns` of CPU time a step (not wall time: a worker that is kept from its core must not profit)."""

    def __init__(self, cost_ns: int) -> None:
        self.observation_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (64,), np.float32)
        self.action_space = gym.spaces.Discrete(16)
        self.cost_ns, self.steps = cost_ns, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(64, np.float32), {}

    def step(self, action: Any) -> Step:
        until = time.thread_time_ns() + self.cost_ns
        while time.thread_time_ns() < until:
            pass
        self.steps += 1
        return np.full(64, self.steps / 200, np.float32), 1.0, self.steps >= 200, False, {}


class Working(Computing):
    """Computes 100 µs a step, with masks and infos."""

    def __init__(self, cost_ns: int = 100_000) -> None:
        super().__init__(cost_ns)

    def step(self, action: Any) -> Step:
        return (*super().step(action)[:4], {"step": self.steps, "phase": "play"})

    def action_masks(self) -> Any:
        masks = np.ones(16, np.bool_)
        masks[self.steps % 16] = False
        return masks


class Waiting(Working):
    """Waits for an engine instead: 2 ms a step in the mean, log-normal with that coefficient of variation."""

    def __init__(self, variation: float = 0.3) -> None:
        super().__init__(0)
        self.sigma = np.log1p(variation**2) ** 0.5

    def step(self, action: Any) -> Step:
        time.sleep(2e-3 * float(self.np_random.lognormal(-(self.sigma**2) / 2, self.sigma)))
        return super().step(action)


class Pictures(gym.Env[Any, Any]):
    """84×84 images of four frames, as Atari's, that cost nothing."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.steps, self.image = 0, self.np_random.integers(0, 255, (4, 84, 84), np.uint8)
        return self.image, {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        return self.image, float(action), self.steps >= 100, False, {}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


class Lander(gym.Wrapper[Any, Any, Any, Any]):
    """LunarLander with a slower step: `sleep_s` of waiting in the mean (exponential) and `work_ns` of CPU time."""

    def __init__(self, sleep_s: float = 0.0, work_ns: int = 0) -> None:
        super().__init__(gym.make("LunarLander-v3"))
        self.sleep_s, self.work_ns = sleep_s, work_ns

    def step(self, action: Any) -> Any:
        if self.sleep_s:
            time.sleep(float(self.unwrapped.np_random.exponential(self.sleep_s)))
        until = time.thread_time_ns() + self.work_ns
        while time.thread_time_ns() < until:
            pass
        return super().step(action)
