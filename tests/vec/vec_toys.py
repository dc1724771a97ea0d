"""Envs that workers load by their names: without torch, and with it a second or two for each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from duels import Duel
from fasttrain.errors import ReplaceEnv
from fasttrain.native import GameSpec
from plain_env import DrawnEnv, PlainEnv
from worker_toys import Chaos, Walker


class Tired(DrawnEnv):
    """Asks to be replaced in its step `at`, or in its reset number `resets`. Episodes have 10 steps."""

    def __init__(self, at: int = 0, resets: int = 0) -> None:
        self.at, self.resets, self.total, self.begun = at, resets, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.begun += 1
        if self.begun == self.resets:
            raise ReplaceEnv("tired")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.total += 1
        if self.total == self.at:
            raise ReplaceEnv("tired")
        return super().step(action)


class TiredAtFirst(Tired):
    """Asks in its first reset, if it finds the file `once` missing."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self.once = Path(once)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not self.once.exists():
            self.once.touch()
            raise ReplaceEnv("tired")
        return super().reset(seed=seed)


class TiredDuel(Duel):
    """Asks to be replaced after each 23 decisions of both sides."""

    def step(self, action: Any) -> Any:
        if len(self.seen) == 23:
            raise ReplaceEnv("tired")
        return super().step(action)


GAME = GameSpec(env="vec_toys:TiredDuel", opponent_key="opponent", eval_opponent="zero")


class Table(PlainEnv):
    """Dict observations, rewards that float32 does not hold, and infos of many types, some only now and then."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 - Gymnasium's own form
    observation_space = spaces.Dict(
        board=spaces.Box(-np.inf, np.inf, (2, 3), np.float32), flags=spaces.MultiBinary(3), turn=spaces.Discrete(99)
    )
    action_space = spaces.MultiDiscrete([3, 2])

    def __init__(self, number: int) -> None:
        self.number, self.episode, self.length = number, 0, 5 + number

    def seen(self) -> dict[str, Any]:
        board = self.np_random.standard_normal((2, 3)).astype(np.float32)
        return {"board": board, "flags": self.np_random.integers(0, 2, 3, np.int8), "turn": np.int64(self.time)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode += 1
        told = {"episode_number": self.episode, "given": options or {}, "start": f"{self.number}"}
        return super().reset(seed=seed)[0], told

    def step(self, action: Any) -> Any:
        seen, _, over, _, _ = super().step(action)
        info: dict[str, Any] = {
            "turn": self.time, "draw": float(self.np_random.random()), "text": f"s{self.time}", "action": action.copy(),
            "nested": {"even": self.time % 2 == 0, "deep": {"number": np.float32(self.number)}}, "list": [self.time],
        }  # fmt: skip
        if self.time % 3 == self.number % 3:
            info["sometimes"] = self.time
        return seen, 0.1 * self.time + float(action.sum()) / 3, over, self.time == 9, info

    def render(self) -> Any:
        return np.full((2, 2, 3), self.number, np.uint8)


class Telling(Walker):
    def __init__(self, **info: Any) -> None:
        super().__init__(0)
        self.info = info

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], self.info


class Leaving(Chaos):
    def step(self, action: Any) -> Any:
        raise ReplaceEnv("worn out")
