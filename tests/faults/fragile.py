"""An env that fails on demand and otherwise depends on its seed and actions alone. Free of torch: workers import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from fasttrain.errors import ReplaceEnv

OF_ENV = ("raise", "refused", "ask", "nan observation", "nan reward", "reset raises", "reset asks", "new env asks")
FAULTS = (*OF_ENV, "kill", "exit", "between steps", "call", "call raises", "start", "new reset", "hang", "stop")
GO, END, CUT = 0, 1, 2  # actions that go well: on; the episode ends; it is cut


class Fragile(gym.Env[Any, Any]):
    """Observation: (env number, seed, episodes and steps since then, a random number). Does what the action says.

    A file `FAULT-NUMBER` in the folder tells the next env or call to fail, once.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = spaces.Discrete(3 + len(FAULTS))

    def __init__(self, number: int, folder: str = "/nowhere") -> None:
        self.number, self.folder, self.seed, self.episode, self.fault = number, folder, -1, 0, ""
        if self.is_told("start"):
            os._exit(9)

    def is_told(self, fault: str) -> bool:
        file = Path(self.folder, f"{fault}-{self.number}")
        told = file.exists()
        file.unlink(missing_ok=True)
        return told

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed, 0
        if self.fault == "reset raises":
            raise RuntimeError("no more cards")
        if self.fault == "reset asks" or self.is_told("new env asks"):
            raise ReplaceEnv("worn out")
        if self.is_told("new reset"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.episode, self.steps = self.episode + 1, 0
        return self.row(), {"first": (self.number, self.episode)}

    def row(self) -> Any:
        return np.array([self.number, self.seed, self.episode, self.steps, self.np_random.standard_normal()])

    def step(self, action: Any) -> Any:
        self.steps += 1
        row, reward = self.row(), float(self.np_random.random(dtype=np.float32))
        fault = self.fault = FAULTS[action - 3] if action > CUT else ""
        if fault in ("raise", "refused", "new env asks"):
            raise (ValueError if fault == "refused" else RuntimeError)(f"the action {action} is illegal")
        if fault == "ask":
            raise ReplaceEnv("tired")
        if fault in ("exit", "start", "new reset"):
            os._exit(7)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault in ("kill", "stop", "hang"):
            time.sleep(3600.0)
        if fault == "nan observation":
            row[4] = np.nan
        ended = action == END or fault.startswith("reset")
        return row, np.nan if fault == "nan reward" else reward, ended, action == CUT, {"last": self.steps}

    def poke(self) -> None:
        """A call between steps."""
        if self.is_told("call"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_told("call raises"):
            raise RuntimeError("not now")
