"""What lies around the vector env: stacked frames, running normalisation, and the latter's statistics on disk.

From inside: the vector env, SB3's VecFrameStack, SB3's VecNormalize (outermost, because SB3's replay buffer asks it for
observations as the policy's space has them).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from fasttrain.runs.env_options import is_normalisable
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.checkpoints import array_writer
from fasttrain.saving.env_state import load_moments, moments
from fasttrain.spec.config import Config

Statistics = Path | VecNormalize
PLAIN, PICKLED = ".npz", ".pkl"
MOST_STATISTICS_BYTES = 1 << 30  # three float64 a number of an observation


def wrapped(env: VecEnv, config: Config, statistics: Statistics | None = None) -> VecEnv:
    """`env` as the policy sees it.

    Args:
        statistics: those of a training, as its env or as its file; they are applied and stay as they are, and rewards
            are the env's own. None: the env is one to train on.
    """
    if config.env.frame_stack > 1:
        env = VecFrameStack(env, config.env.frame_stack)
    if not config.env.normalize:
        return env
    return _learning(env, config) if statistics is None else _settled(env, config, statistics)


def _learning(env: VecEnv, config: Config) -> VecNormalize:
    space, norm_obs = env.observation_space, "obs" in config.env.normalize
    keys = None
    if norm_obs and isinstance(space, spaces.Dict):
        keys = [key for key, part in space.spaces.items() if is_normalisable(part)]
    normalised = VecNormalize(
        env,
        norm_obs=norm_obs,
        norm_reward="reward" in config.env.normalize,
        gamma=config.algo.gamma,
        norm_obs_keys=keys,
    )
    if norm_obs:  # float32 whatever the env's own are; a buffer that goes by the space would cut integers
        normalised.observation_space = _float_space(space, keys, normalised.clip_obs)
    return normalised


def _float_space(space: spaces.Space[Any], keys: list[str] | None, clip: float) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return spaces.Dict(
            OrderedDict((key, _float_space(part, None, clip) if key in (keys or ()) else part) for key, part in parts)
        )
    return space if space.dtype == np.float32 else spaces.Box(-clip, clip, space.shape, np.float32)


def _settled(env: VecEnv, config: Config, statistics: Statistics) -> VecNormalize:
    if isinstance(statistics, VecNormalize):
        normalised = copy.deepcopy(statistics)  # VecNormalize leaves its env out of copies
        normalised.set_venv(env)
    elif statistics.suffix == PLAIN:
        normalised = _learning(env, config)
        load_moments(normalised, read_arrays(statistics, MOST_STATISTICS_BYTES))
    else:  # SB3's own file, a pickle: who names it trusts it (model_files.find_statistics)
        normalised = VecNormalize.load(str(statistics), env)
    normalised.training = normalised.norm_reward = False
    return normalised


def save_model(model: BaseAlgorithm, path: Path) -> None:
    """`path` and, where the env is normalised, its statistics beside it: as plain arrays, and in SB3's own format."""
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        with statistics_of(path).open("wb") as file:
            array_writer({name: np.asarray(value) for name, value in moments(statistics).items()})(file)
        statistics.save(str(statistics_of(path, pickled=True)))
    model.save(path)


def statistics_of(path: Path, pickled: bool = False) -> Path:
    """Where the statistics of the model at `path` are: vecnormalize.npz for model.zip, else with the model's name.

    Args:
        pickled: SB3's own file, for its users; nothing here reads it unless it is told to trust it.
    """
    name = "vecnormalize" if path.stem == "model" else f"{path.stem}_vecnormalize"
    return path.with_name(name + (PICKLED if pickled else PLAIN))
