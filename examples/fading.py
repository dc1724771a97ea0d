"""An algorithm of your own: fasttrain +profile=speed env.id=CartPole-v1 algo=a2c algo.entry_point=fading:FadingA2C

With arguments: algo.kwargs.fade=2. The class is derived from that of `algo=`: Stable-Baselines3's, or under engine=fast
`fasttrain.PPO`, `MaskablePPO` or `DQN`.
"""

from typing import Any

from stable_baselines3 import A2C


class FadingA2C(A2C):
    """The entropy bonus fades to nothing, as a power of what is left of the training."""

    def __init__(self, *arguments: Any, fade: float = 1.0, **further: Any):
        self.fade = fade
        super().__init__(*arguments, **further)
        self.first_ent_coef = self.ent_coef

    def train(self) -> None:
        self.ent_coef = self.first_ent_coef * self._current_progress_remaining**self.fade
        super().train()
        self.logger.record("train/ent_coef", self.ent_coef)
