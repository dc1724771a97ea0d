"""What of `env.` fits what: options against a compiled batch, spaces against algorithm, policy and wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space

from fasttrain.errors import ConfigError, EnvSpecError
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
