"""What the pages of docs/ take for granted beside their commands: the environments of a user, a file of settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MY_GAME = '''
import gymnasium as gym
import numpy as np


class MyGame(gym.Env):
    """Go right `size` times."""

    def __init__(self, size=3, reward=None, config=None, length=None):
        self.size = length or getattr(config, "size", None) or (config or {}).get("length", size)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 0, 0
        return self._observation(), {"phase": "bid"}

    def step(self, action):
        self.place, self.steps = max(0, self.place + (1 if action == 1 else -1)), self.steps + 1
        won, late = self.place == self.size, self.steps >= 30
        info = {"victory": won, "vp": float(self.place), "damage": 0.0, "cause": "goal"} if won or late else {}
        info["phase"] = "play"
        return self._observation(), float(won), won, late, info

    def action_masks(self):
        return np.array([True, True, self.place > 0])

    def _observation(self):
        return np.array([self.place / self.size, self.steps / 30], np.float32)


class Walk(MyGame):
    pass


class Pixels(MyGame):
    """The same as an image."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def _observation(self):
        return np.full((36, 36, 1), (80 * self.place + self.steps) % 256, np.uint8)


class Settings:
    def __init__(self, size):
        self.size = size


def legal(env):
    return np.ones(env.action_space.n, bool)


def shaped(reward):
    return reward
'''
ZOO = {"n_timesteps": 1000, "policy": "MlpPolicy", "n_envs": 2, "n_steps": 64, "batch_size": 32, "n_epochs": 2}


def lay_out(folder: Path) -> None:
    """Write what commands of the pages name into the folder in which they are typed."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "collect.py", folder)
    walks = _module("pufferlib.md", "Walks") + "\n\nMyVectorEnv = Walks\n"
    _write(folder / "my_game" / "envs.py", MY_GAME + walks)
    _write(folder / "my_game" / "__init__.py", "from my_game.envs import *\n")
    _write(folder / "my_module.py", _module("cleanrl.md", "Conservative"))
    _write(folder / "conf" / "profile" / "mine.yaml", "# @package _global_\nnum_envs: 16\nengine: fast\n")
    _write(folder / "ppo.yml", "\n".join(["CartPole-v1:", *(f"  {key}: {value}" for key, value in ZOO.items())]))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _module(page: str, name: str) -> str:
    """The example of a page that defines the class."""
    text = (ROOT / "docs" / "coming_from" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if f"class {name}(" in block)
