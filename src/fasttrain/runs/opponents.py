"""Self-play in a run: snapshots are taken on the way, kept beside the model, and rated in summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.self_play import SnapshotPool
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.loggers import made
from fasttrain.runs.progress import QualityKeys, win_of
from fasttrain.spec.config import SELF, Config
from fasttrain.spec.typed import named
from fasttrain.vec.self_play import SelfPlayVecEnv


def score_of(info: Mapping[str, Any]) -> float | None:
    """The learner's share of the points: of opponents beaten, or 1, 0.5, 0 for a win, a draw, a loss."""
    if "opponents_beaten" in info:
        return float(info["opponents_beaten"])
    won = win_of(info)
    if won is None:
        return None
    return 0.5 if info.get("is_draw") else float(won)


def pool_for(config: Config, model: BaseAlgorithm, env: VecEnv) -> SnapshotPool | None:
    """The opponents of a run in self-play, set to work in its env; None for any other run.

    A class of the user's is set to work too. What it remembers is no part of a checkpoint.

    Raises:
        ConfigError: it cannot be made, or decides nothing.
    """
    if not isinstance(env, SelfPlayVecEnv):
        return None
    if config.opponent not in (None, SELF):
        opponent: Any = made(*named(config.opponent, "opponent", "opponent"), "opponent", object)
        if not callable(getattr(opponent, "act", None)) or not callable(getattr(opponent, "episode_over", None)):
            raise ConfigError(
                f"opponent: {type(opponent).__name__} needs act(observations, action_masks, envs) and "
                "episode_over(env, info); see fasttrain.vec.self_play.Opponent"
            )
        env.set_opponent(opponent)
        return None
    settings = config.self_play
    alone = config.env.kwargs.get(str(config.env.opponent_key)) == SELF  # with bots among them a score is not theirs
    keys = QualityKeys.of(config.env)
    rated = (lambda info: score_of(keys.read(info))) if alone else lambda _: None
    pool = SnapshotPool(model, env.num_envs, settings.latest, settings.pool, config.seed, rated)
    env.set_opponent(pool)
    return pool


class SnapshotCallback(BaseCallback):
    """Takes a snapshot every `every` gradient updates. Its time is phase `other`."""

    def __init__(self, pool: SnapshotPool, every: int, clock: PhaseClock) -> None:
        super().__init__()
        self.pool, self.every, self.clock = pool, every, clock
        self._next = every

    def _on_rollout_start(self) -> None:
        updates: int = self.model.engine.gradient_updates  # type: ignore[attr-defined]
        if updates >= self._next:
            self._next = (updates // self.every + 1) * self.every
            with self.clock.phase("other"):
                self.pool.take(self.num_timesteps)

    def _on_step(self) -> bool:
        return True


def pool_file(model_file: Path) -> Path:
    """Where the opponents lie that belong to a model zip."""
    return model_file.with_name(f"{model_file.stem}.opponents.pt")


def save_pool(pool: SnapshotPool, model_file: Path) -> None:
    """Beside the model."""
    torch.save(pool.state(), pool_file(model_file))
