"""What of `env.` fits what: options against a compiled batch, spaces against algorithm, policy and wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from fasttrain.config import Config
from fasttrain.errors import ConfigError, EnvSpecError

ACTION_SPACES: dict[str, tuple[type[spaces.Space[Any]], ...]] = {
    "dqn": (spaces.Discrete, spaces.MultiDiscrete),  # the stock class: Discrete alone
    "maskable_ppo": (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
    "ppo": (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    "recurrent_ppo": (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
}
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
    name = config.algo.name
    kinds = (spaces.Discrete,) if name == "dqn" and config.engine == "stock" else ACTION_SPACES[name]
    if not isinstance(action, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise EnvSpecError(f"{what} has {action} actions, algo={name} needs {wanted}; take another algo")
    if isinstance(action, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(action.start):
        raise EnvSpecError(
            f"{what} counts its actions from {action.start}; SB3 sends 0 to n - 1: shift them in the env"
        )
    parts = list(observation.values()) if isinstance(observation, spaces.Dict) else [observation]
    if odd := next((part for part in parts if not isinstance(part, OBSERVATION_SPACES)), None):
        wanted = ", ".join(kind.__name__ for kind in OBSERVATION_SPACES)
        raise EnvSpecError(f"{what} observes {odd}; SB3's policies read {wanted} or a Dict of them")
    lstm = "Lstm" if name == "recurrent_ppo" else ""
    policy = policy_for(config.algo.policy, observation, lstm).replace("Lstm", "")
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


def policy_for(name: str, space: spaces.Space[Any], lstm: str = "") -> str:
    """SB3's alias for `auto`: by the kind of observations; `lstm` is "Lstm" for a policy that remembers."""
    if name != "auto":
        return name
    if isinstance(space, spaces.Dict):
        return f"MultiInput{lstm}Policy"
    return f"Cnn{lstm}Policy" if is_image_space(space) else f"Mlp{lstm}Policy"
