"""Chooses the policy for an env's spaces, with its arguments. Spaces that Stable-Baselines3 does not support are
refused here, before envs start. Other errors appear only when the network is built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space

from fasttrain.buffers.hindsight import GOAL_KEYS
from fasttrain.envs.names import callable_at, resolve_argument
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.spec.algorithms import ALGORITHMS, LSTM
from fasttrain.spec.config import AlgoConfig, Config
from fasttrain.spec.setting import did_you_mean

OBSERVATION_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
SMALLEST_IMAGE = 36  # pixels per side: NatureCNN's three convolutions reduce 36 pixels to one
IN_A_WRAPPER = "in the env, or in a wrapper (env.wrappers)"
# Entries of `policy_kwargs` that SB3 calls → the class from which they must be derived. Functions are allowed too.
CLASSES = {
    "features_extractor_class": torch.nn.Module, "activation_fn": torch.nn.Module,
    "optimizer_class": torch.optim.Optimizer,
}  # fmt: skip


def check_spaces(config: Config, what: str, action: spaces.Space[Any], observation: spaces.Space[Any]) -> str:
    """SB3's name of the policy for the env's spaces. `what` names the env in messages. Raises EnvSpecError if the
    algorithm or SB3's policies do not support the spaces, ConfigError if the chosen policy or a wrapper does not.
    """
    _check_actions(config, what, action)
    check_observations(config, what, observation)
    spec, parts, own = config.algo.spec, _parts(observation), _own_network(config.algo)
    policy = policy_for(config.algo, observation, spec.policies).replace("Lstm", "")
    if policy not in (each.replace("Lstm", "") for each in spec.policies):
        raise EnvSpecError(f"{what} observes {_line(observation)}, algo={spec.name} has no {policy}; use another algo")
    if (policy == "MultiInputPolicy") != isinstance(observation, spaces.Dict):
        raise ConfigError(
            f"algo.policy={config.algo.policy} does not suit {what}, which observes {_line(observation)}; use auto"
        )
    scaled = _is_scaled(config.algo)
    if policy == "CnnPolicy" and not own and not is_image_space(observation, normalized_image=scaled):
        raise ConfigError(
            f"algo.policy={config.algo.policy} needs images: uint8 from 0 to 255, or other numbers, channels first, "
            f"with algo.policy_kwargs.normalize_images=false; {what} observes {_line(observation)}; use auto"
        )
    for image in [part for part in parts.values() if is_image_space(part, normalized_image=scaled)]:
        sides = sorted(image.shape)[1:] if is_image_space(image) else image.shape[1:]  # uint8 may have channels last
        if min(sides) < SMALLEST_IMAGE and policy != "MlpPolicy" and not own:
            flat = "" if isinstance(observation, spaces.Dict) else "use algo.policy=MlpPolicy, which flattens it, or "
            way_out = f"{flat}add gymnasium.wrappers:FlattenObservation to env.wrappers"
            raise ConfigError(f"{what}: {image} is too small for NatureCNN; {way_out}")
    _check_around(config, what, observation)
    return policy


def check_observations(config: Config, what: str, observation: spaces.Space[Any]) -> None:
    """Raises EnvSpecError for observations that no policy of SB3 reads, whatever the algorithm."""
    own, keyed = _own_network(config.algo), isinstance(observation, spaces.Dict)
    for key, part in _parts(observation).items():
        if unfit := _unread(part, own) or (_key_refused(key, own) if keyed else ""):
            place = f" under the key {key!r} of its observation" if keyed else ""
            raise EnvSpecError(f"{what} observes {_line(part)}{place}, {unfit}")
    if not _parts(observation):
        raise EnvSpecError(f"{what} observes a Dict without keys: give it a key")


def _own_network(algo: AlgoConfig) -> bool:
    return ":" in algo.policy or "features_extractor_class" in algo.policy_kwargs


def _check_actions(config: Config, what: str, action: Any) -> None:
    spec, has = config.algo.spec, f"{what} has {_line(action)} actions"
    wanted = spec.stock_actions if config.engine == "stock" and spec.stock_actions else spec.actions
    kind = next((name for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
                 if isinstance(action, getattr(spaces, name))), "")  # fmt: skip
    if kind not in wanted:
        others = ", ".join(name for name, one in ALGORITHMS.items() if kind in one.actions and name != spec.name)
        way_out = f"use another algo: {others}" if kind else f"turn them into MultiDiscrete or Box {IN_A_WRAPPER}"
        raise EnvSpecError(f"{has}, algo={spec.name} needs {' or '.join(wanted)}; {way_out}")
    if getattr(config.algo, "use_sde", False) and kind != "Box":
        raise ConfigError(f"algo.use_sde=true is for numbers (Box), {has}; remove it")
    if kind != "Box":
        if np.any(getattr(action, "start", 0)):
            counts = f"{what} counts its actions from {action.start}"
            raise EnvSpecError(f"{counts}; SB3 sends 0 to n - 1: shift them {IN_A_WRAPPER}")
        if len(action.shape) > 1:
            raise EnvSpecError(f"{has}, SB3 supports one dimension only: flatten them {IN_A_WRAPPER}")
        return
    if not np.isfinite([action.low, action.high]).all() or action.low.size == 0:
        raise EnvSpecError(
            f"{has}, SB3 needs at least one number and finite bounds: set them {IN_A_WRAPPER}, with "
            "gymnasium.wrappers:RescaleAction for example"
        )
    if issubclass(spec.load(False), TD3) and action.dtype.kind != "f":
        noise = f"algo={spec.name} adds noise to them, which whole numbers do not take"
        raise EnvSpecError(f"{has}, {noise}: use algo=sac")
    if spec.off_policy and (lacks := _torch_lacks(action.dtype)):
        raise EnvSpecError(f"{has}, {lacks}")


def check_same_spaces(model: object, own: object, whose: str) -> None:
    """Raises ConfigError if observations or actions of a model are not those of `own`, an env or another model."""
    for name in ("observation_space", "action_space"):
        both = [getattr(each, name) for each in (model, own)]
        if both[0] != both[1]:
            short = both[0].shape != both[1].shape  # then the limits do not matter
            its, mine = (f"{type(one).__name__} {one.shape}" if short and one.shape else _line(one) for one in both)
            raise ConfigError(f"its {name} is {its}, {whose} is {mine}")


def _parts(observation: spaces.Space[Any]) -> dict[Any, Any]:
    return dict(observation.spaces) if isinstance(observation, spaces.Dict) else {"": observation}


def _line(space: spaces.Space[Any]) -> str:
    return re.sub(r"<function (\S+) at 0x\w+>", r"\1", " ".join(str(space).split()))


def _unread(part: object, own: bool) -> str:
    """Why SB3 does not support the observation space `part`, and what to do; empty if SB3 supports it."""
    if not isinstance(part, OBSERVATION_SPACES):
        known = ", ".join(kind.__name__ for kind in OBSERVATION_SPACES)
        way_out = f"turn it into one {IN_A_WRAPPER}"
        if isinstance(part, (spaces.Dict, spaces.Tuple)):
            way_out = "add gymnasium.wrappers:FlattenObservation to env.wrappers, which makes one vector of all"
        return f"SB3's policies read {known} or a Dict of them: {way_out}"
    if np.any(getattr(part, "start", 0)):
        return f"SB3 reads 0 to n - 1: subtract the start {IN_A_WRAPPER}"
    if isinstance(part, spaces.MultiDiscrete) and len(part.shape) > 1:
        return f"SB3 reads one dimension of choices: flatten it {IN_A_WRAPPER}"
    if 0 in (part.shape or ()):
        return f"which holds nothing: remove it {IN_A_WRAPPER}"
    if isinstance(part, spaces.Box) and not part.shape and not own:
        return f"a number without a dimension: give it the shape (1,) {IN_A_WRAPPER}"
    return _torch_lacks(part.dtype)


def _torch_lacks(dtype: np.dtype[Any] | None) -> str:
    try:
        torch.from_numpy(np.zeros(1, dtype))
    except (TypeError, ValueError):
        return f"torch has no numbers of {np.dtype(dtype).str}: make them float32 {IN_A_WRAPPER}"
    return ""


def _key_refused(key: object, own: bool) -> str:
    """Why SB3 cannot use `key` as the name of a torch module; empty if it can. `own`: the network is the user's."""
    if isinstance(key, str) and key and (own or ("." not in key and not hasattr(torch.nn.ModuleDict(), key))):
        return ""
    return f"and torch takes no network of that name: rename the key {IN_A_WRAPPER}"


def _is_scaled(algo: AlgoConfig) -> bool:
    """Whether `normalize_images=false` is set: images are scaled already, and any Box of three axes is an image."""
    return not algo.policy_kwargs.get("normalize_images", True)


def _check_around(config: Config, what: str, observation: spaces.Space[Any]) -> None:
    parts = _parts(observation).values()
    if getattr(config.algo, "her", "off") != "off":
        _check_goals(config, what, observation)
    if config.env.frame_stack > 1 and not all(isinstance(part, spaces.Box) for part in parts):
        raise ConfigError(
            f"env.frame_stack={config.env.frame_stack} stacks arrays (Box), {what} observes {_line(observation)}; "
            "use env.frame_stack=1"
        )
    if "obs" in config.env.normalize and not any(is_normalisable(part) for part in parts):
        raise ConfigError(
            f"env.normalize=[obs] is for numbers (Box) but not for images, which the policy scales itself; {what} "
            f"observes {_line(observation)}; remove obs"
        )


def _check_goals(config: Config, what: str, observation: spaces.Space[Any]) -> None:
    her = f"algo.her={config.algo.her}"
    if missing := [key for key in GOAL_KEYS if key not in _parts(observation)]:
        raise ConfigError(
            f"{her} needs a goal env, which observes a Dict of {', '.join(GOAL_KEYS)}; {what} observes "
            f"{_line(observation)}, without {' and '.join(missing)}: use algo.her=off"
        )
    for key, value in (("algo.n_steps", getattr(config.algo, "n_steps", 1)), ("action_repeat", config.action_repeat),
                       ("env.frame_stack", config.env.frame_stack)):  # fmt: skip
        if value > 1:
            raise ConfigError(f"{her} computes the reward of one step from one state: use {key}=1, not {value}")


def is_normalisable(space: spaces.Space[Any]) -> bool:
    """Whether `env.normalize` applies to observations of `space`."""
    return isinstance(space, spaces.Box) and not is_image_space(space)


# --- the policy and its arguments


def policy_for(algo: AlgoConfig, space: spaces.Space[Any], policies: Sequence[str]) -> str:
    """SB3's alias of the policy, from `policies`. For `auto` and a user's class the observation space decides."""
    if algo.policy != "auto" and ":" not in algo.policy:
        return algo.policy
    is_image = is_image_space(space, normalized_image=_is_scaled(algo))
    kind = "MultiInput" if isinstance(space, spaces.Dict) else "Cnn" if is_image else "Mlp"
    return next((policy for policy in policies if policy.startswith(kind)), f"{kind}Policy")


def is_fast(config: Config) -> bool:
    """Whether the run uses fasttrain's class of the algorithm."""
    return config.engine == "fast" and config.algo.spec.fast is not None


def policy_class(config: Config, observation: spaces.Space[Any]) -> Any:
    """The policy's class: SB3's, or the user's. Raises EnvSpecError if the user's class is no policy."""
    algo = config.algo
    if ":" in algo.policy:
        return callable_at(algo.policy, f"algo.policy={algo.policy}", only=BasePolicy)
    return algo.spec.load(is_fast(config)).policy_aliases[policy_for(algo, observation, algo.spec.policies)]


def check_policy(config: Config, observation: spaces.Space[Any]) -> None:
    """Raises ConfigError or EnvSpecError for an entry of `algo.policy_kwargs` that the policy does not take."""
    known, kind = set[str](), policy_class(config, observation)
    for each in kind.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters.values()
            known |= {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    known -= {"self", "observation_space", "action_space", "lr_schedule"}
    policy_kwargs(config.algo)  # raises an error for a class that cannot be imported
    for name in config.algo.policy_kwargs:
        if name not in known:
            hint = did_you_mean(name, known) or f"; {kind.__name__} takes {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key 'algo.policy_kwargs.{name}'{hint}")


def policy_kwargs(algo: AlgoConfig) -> dict[str, Any]:
    """SB3's `policy_kwargs`: `algo.policy_kwargs`, and settings that have a key of their own."""
    kwargs: dict[str, Any] = {name: getattr(algo, name) for name in LSTM if algo.spec.recurrent}
    kwargs |= {"cell": algo.cell} if getattr(algo, "cell", "lstm") != "lstm" else {}  # stock policies have no `cell`
    for name, value in algo.policy_kwargs.items():
        option, kind = f"algo.policy_kwargs.{name}", CLASSES.get(name)
        named = kind is not None and isinstance(value, str)
        kwargs[name] = callable_at(value, f"{option}={value}", kind=kind) if named else resolve_argument(value, option)
    if algo.net_arch is not None:
        arch = algo.net_arch
        kwargs["net_arch"] = {k: list(v) for k, v in arch.items()} if isinstance(arch, dict) else list(arch)
    if algo.activation_fn is not None:
        names = {name.lower(): name for name in ("Tanh", "ReLU", "ELU", "GELU", "SiLU")} | {"leaky_relu": "LeakyReLU"}
        kwargs["activation_fn"] = getattr(torch.nn, names[algo.activation_fn])
    return kwargs
