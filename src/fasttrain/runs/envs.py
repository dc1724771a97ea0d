"""What lies around a run's envs, and what of `env.` fits what: options, spaces, frame stacks, running statistics."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.checkpoints import array_writer
from fasttrain.saving.env_state import load_moments, moments
from fasttrain.spec.config import Config

OBSERVATION_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_native_options(config: Config) -> None:
    """Refuse what a compiled batch of envs cannot honour: nothing of Python goes into it.

    Raises:
        ConfigError: names the option and the way out.
    """
    env = config.env
    asked: dict[str, Any] = {
        "env.wrappers": list(env.wrappers),
        "env.api": env.api if env.api != "gymnasium" else None,
        "action_repeat": config.action_repeat if config.action_repeat > 1 else None,
    }
    if env.backend == "envpool":
        asked["env.entry_point"] = env.entry_point
        batch, way_out = "env.backend=envpool: EnvPool's envs are C++", "env.backend=gymnasium"
    else:
        asked["env.max_episode_steps"] = env.max_episode_steps
        batch, way_out = f"the native batch of {env.id}: its kernels know no such option", "vec_env=dummy or shared"
    for key, value in asked.items():
        if value:
            raise ConfigError(f"{key}={value} does not go with {batch}; leave it out, or take {way_out}")


def check_spaces(config: Config, what: str, action: spaces.Space[Any], observation: spaces.Space[Any]) -> None:
    """Whether the spaces of the env named `what` suit the algorithm, the policy and what lies around the env.

    Raises:
        EnvSpecError: the algorithm has no such actions.
        ConfigError: the policy or a wrapper is not for such observations.
    """
    spec = config.algo.spec
    wanted = spec.stock_actions if config.engine == "stock" and spec.stock_actions else spec.actions
    if not isinstance(action, tuple(getattr(spaces, kind) for kind in wanted)):
        raise EnvSpecError(
            f"{what} has {action} actions, algo={spec.name} needs {' or '.join(wanted)}; take another algo"
        )
    if isinstance(action, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(action.start):
        raise EnvSpecError(
            f"{what} counts its actions from {action.start}; SB3 sends 0 to n - 1: shift them in the env"
        )
    parts = list(observation.values()) if isinstance(observation, spaces.Dict) else [observation]
    if odd := next((part for part in parts if not isinstance(part, OBSERVATION_SPACES)), None):
        known = ", ".join(kind.__name__ for kind in OBSERVATION_SPACES)
        raise EnvSpecError(f"{what} observes {odd}; SB3's policies read {known} or a Dict of them")
    policy = policy_for(config.algo.policy, observation, spec.policies).replace("Lstm", "")
    if policy not in (each.replace("Lstm", "") for each in spec.policies):
        raise EnvSpecError(f"{what} observes {observation}, algo={spec.name} has no {policy}; take another algo")
    if (policy == "MultiInputPolicy") != isinstance(observation, spaces.Dict):
        raise ConfigError(
            f"algo.policy={config.algo.policy} does not suit {what}, which observes {observation}; take auto"
        )
    if policy == "CnnPolicy" and not is_image_space(observation):
        raise ConfigError(
            f"algo.policy={config.algo.policy} needs images (uint8, 0 to 255), {what} observes {observation}; take auto"
        )
    if config.env.frame_stack > 1 and not all(isinstance(part, spaces.Box) for part in parts):
        raise ConfigError(
            f"env.frame_stack={config.env.frame_stack} stacks arrays (Box), {what} observes {observation}; "
            "take env.frame_stack=1"
        )
    if "obs" in config.env.normalize and not any(is_normalisable(part) for part in parts):
        raise ConfigError(
            f"env.normalize=[obs] is for numbers (Box) other than images, which the policy scales itself; {what} "
            f"observes {observation}; leave obs out"
        )


def is_normalisable(space: spaces.Space[Any]) -> bool:
    """Whether running statistics of such observations make sense."""
    return isinstance(space, spaces.Box) and not is_image_space(space)


def policy_for(name: str, space: spaces.Space[Any], policies: Sequence[str]) -> str:
    """SB3's alias for `auto` and for a class of the user's own, by the kind of observations.

    `policies` are the algorithm's own, which may remember.
    """
    if name != "auto" and ":" not in name:
        return name
    kind = "MultiInput" if isinstance(space, spaces.Dict) else "Cnn" if is_image_space(space) else "Mlp"
    return next((policy for policy in policies if policy.startswith(kind)), f"{kind}Policy")


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
