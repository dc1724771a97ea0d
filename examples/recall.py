"""A game for a manager that sets goals: what must be remembered is shown at the first step alone.

fasttrain +profile=speed algo=ppo env.entry_point=recall:Recall total_timesteps=100000 \
    'policies={manager: {goal_every: 5, goals: 3}, worker: {}}'
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Recall(gym.Env):
    """Name the number from 0 to 2 in each of five steps. One policy without memory names it in 2.33 of them at best."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.number = 0, int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.number], {}

    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), float(action == self.number), self.steps == 5, False, {}
