"""An env wrapper of your own: fasttrain +profile=speed env.id=CartPole-v1 algo=ppo env.wrappers=[scaled:Scaled]

With arguments: env.wrappers='[{wrapper: "scaled:Scaled", factor: 0.1}]'.
"""

from typing import Any

import gymnasium


class Scaled(gymnasium.RewardWrapper[Any, Any]):
    """Rewards × `factor`."""

    def __init__(self, env: gymnasium.Env[Any, Any], factor: float = 0.01):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return self.factor * float(reward)
