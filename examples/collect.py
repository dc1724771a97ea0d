import gymnasium as gym
import numpy as np


class Collect(gym.Env):
    """Pick `size` stones, heaviest first; a stone that is gone cannot be picked again."""

    def __init__(self, size: int = 5):
        self.size = size
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2 * size,), np.float32)
        self.action_space = gym.spaces.Discrete(size)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.weights = self.np_random.random(self.size).astype(np.float32)
        self.there = np.ones(self.size, bool)
        return self._observation(), {}

    def step(self, action):
        reward = float(self.weights[action] == self.weights[self.there].max())
        self.there[action] = False
        over = not self.there.any()
        return self._observation(), reward, over, False, {"is_success": reward == 1.0} if over else {}

    def action_masks(self):
        return self.there if self.there.any() else np.ones(self.size, bool)

    def _observation(self):
        return np.concatenate([self.weights, self.there]).astype(np.float32)
