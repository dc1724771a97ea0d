"""Figures for each phase of a game, such as bidding and playing. A column of the observation marks each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.algos.ppo import _PPO
from fasttrain.errors import ConfigError


class Phases:
    """Reads the rollouts of fasttrain's PPO, MaskablePPO and their recurrent forms.

    Args:
        columns: name of a phase → the column of the observation that is 1 in this phase, else 0. With
            `env.frame_stack` it is a column of the newest frame.

    Raises:
        ConfigError: the observation has no such column, or the algorithm is not one of these.
    """

    def __init__(self, columns: Mapping[str, int], model: BaseAlgorithm) -> None:
        space, self.columns = model.observation_space, columns
        if not isinstance(model, _PPO):
            raise ConfigError("env.phases reads the rollouts of PPO with engine=fast; remove it for another algorithm")
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"env.phases names columns of an observation with one axis, this one is {space}")
        if (normalizer := model.get_vec_normalize_env()) is not None and normalizer.norm_obs:
            raise ConfigError("env.phases cannot read observations that env.normalize=[obs] changed; remove either")
        self._model: Any = model
        env: Any = model.env
        width = env.unwrapped.observation_space.shape[0]
        for name, column in columns.items():
            if not 0 <= column < width:
                raise ConfigError(f"env.phases.{name}={column}: the observation has columns 0 to {width - 1}")
        self._newest = space.shape[0] - width  # first column of the newest frame; older frames stand before it
        self._figures: dict[str, dict[str, float | int | None]] = {}

    def take_rollout(self) -> None:
        """Read the rollout that has just been collected."""
        if (storage := getattr(self._model.rollout_buffer, "storage", None)) is None:
            return
        rows = storage.rows  # indices of the rows with a transition, in arrays flattened from (T, N)
        seen, values, returns, log_probs, rewards = (
            np.asarray(part).reshape(storage.num_steps * storage.num_envs, -1)[rows]
            for part in (storage.observations, storage.values, storage.returns, storage.log_probs, storage.rewards)
        )
        for name, column in self.columns.items():
            inside = seen[:, self._newest + column] > 0.5
            count = int(inside.sum())
            figures = {
                "reward": rewards, "value": values, "value_error": np.abs(returns - values), "log_prob": log_probs,
            }  # fmt: skip
            before = int(self._figures.get(name, {}).get("steps") or 0)
            self._figures[name] = {
                "steps": before + count,
                "share": count / len(seen) if len(seen) else None,
                **{key: float(part[inside].mean()) if count else None for key, part in figures.items()},
            }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Continue from the figures of a checkpoint."""
        self._figures = {name: dict(stored[name]) for name in self.columns if name in stored}

    def to_dict(self) -> dict[str, Any]:
        """Per phase, for JSON: its steps in the whole training, and its share and means in the last rollout."""
        return self._figures
