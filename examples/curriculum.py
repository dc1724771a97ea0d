"""A callback of your own: fasttrain +profile=speed env.id=CartPole-v1 algo=ppo callbacks=[curriculum:Longer]

With arguments: callbacks='[{callback: "curriculum:Longer", every: 20000}]'. It is one of Stable-Baselines3's; so are
those that come with it, callbacks=[stable_baselines3.common.callbacks:StopTrainingOnMaxEpisodes].
"""

from stable_baselines3.common.callbacks import BaseCallback


class Longer(BaseCallback):
    """Notes every `every` env steps how long episodes are; `training_env.env_method` would change the envs here."""

    def __init__(self, every: int = 10_000):
        super().__init__()
        self.every = every
        self.lengths: list[float] = []

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.every * (len(self.lengths) + 1):
            episodes = self.model.ep_info_buffer
            self.lengths.append(sum(episode["l"] for episode in episodes) / max(1, len(episodes)))
            self.logger.record("curriculum/mean_length", self.lengths[-1])
        return True  # False ends the training in order, with everything saved
