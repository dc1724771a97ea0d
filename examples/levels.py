"""A curriculum: a corridor that grows when the agent reaches its end.

    fasttrain +profile=speed env.entry_point=levels:Corridor algo=ppo callbacks=[levels:Harder] \\
        eval.env_kwargs.length=16

Run where this file lies. `Harder` calls `set_length` in every copy of the environment, in workers too.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

LONGEST = 16


class Corridor(gym.Env[Any, Any]):
    """Walk from 0 to `length`; the episode is cut after 3 × `length` steps."""

    def __init__(self, length: int = 2):
        self.length = self.next_length = length
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def set_length(self, length: int) -> None:
        """The length from the next episode on."""
        self.next_length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length, self.position, self.steps = self.next_length, 0, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position = max(0, self.position + (1 if action else -1))
        self.steps += 1
        success, late = self.position == self.length, self.steps >= 3 * self.length
        info = {"is_success": success} if success or late else {}
        return self._observation(), float(success), success, late and not success, info

    def _observation(self) -> Any:
        return np.array([self.position / LONGEST, self.length / LONGEST], np.float32)


class Harder(BaseCallback):
    """Doubles the length when 90 % of the last 100 episodes were won."""

    def __init__(self, longest: int = LONGEST):
        super().__init__()
        self.longest, self.length = longest, 2

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        wins = self.model.ep_success_buffer
        if self.length < self.longest and wins is not None and len(wins) == 100 and np.mean(wins) >= 0.9:
            self.length *= 2
            self.training_env.env_method("set_length", self.length)
            wins.clear()
        self.logger.record("curriculum/length", self.length)
