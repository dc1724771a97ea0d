"""From the effective configuration to envs: what of `env.` fits what, the vector env, and what lies around it."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from fasttrain.batch import OPPONENTS_TURN
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.probe import ProbeResult
from fasttrain.envs.retrace import Retraced
from fasttrain.envs.user_code import blame, look_up
from fasttrain.errors import ConfigError, EnvSpecError, FastTrainError
from fasttrain.kernel_cache import KernelCall
from fasttrain.machine import bf16_units, usable_cores
from fasttrain.runs.batches import check_batch, check_native_options, made_batch
from fasttrain.runs.survey import Survey
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.env_state import load_moments
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.reading import env_kwargs, memory_inputs, plays_itself, tells_games, uses_masks
from fasttrain.vec.process import Scout
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.stock import NotedVecEnv, start_subproc

OBSERVATION_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
SMALLEST_IMAGE = 36  # what NatureCNN's three convolutions leave one pixel of


def check_spaces(config: Config, what: str, action: spaces.Space[Any], observation: spaces.Space[Any]) -> str:
    """Whether the spaces of the env named `what` suit the algorithm, the policy and what lies around the env; SB3's
    name of that policy.

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
    if getattr(config.algo, "use_sde", False) and not isinstance(action, spaces.Box):
        raise ConfigError(f"algo.use_sde=true is for numbers (Box), {what} has {action} actions; leave it out")
    if isinstance(action, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(action.start):
        raise EnvSpecError(
            f"{what} counts its actions from {action.start}; SB3 sends 0 to n - 1: shift them in the env"
        )
    parts = list(observation.values()) if isinstance(observation, spaces.Dict) else [observation]
    if odd := next((part for part in parts if not isinstance(part, OBSERVATION_SPACES)), None):
        known = ", ".join(kind.__name__ for kind in OBSERVATION_SPACES)
        raise EnvSpecError(f"{what} observes {odd}; SB3's policies read {known} or a Dict of them: see env.wrappers")
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
    small = [f"{part}" for part in parts if is_image_space(part) and sorted(part.shape or ())[1] < SMALLEST_IMAGE]
    own = ":" in config.algo.policy or "features_extractor_class" in config.algo.policy_kwargs
    if small and policy != "MlpPolicy" and not own:
        raise ConfigError(
            f"{what}: {small[0]} is too small for NatureCNN; add gymnasium.wrappers:FlattenObservation to env.wrappers"
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
    return policy


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
    return _learning(env, config) if statistics is None else settled(env, config, statistics)


def _learning(env: VecEnv, config: Config) -> VecNormalize:
    space, norm_obs = env.observation_space, "obs" in config.env.normalize
    keys = None
    if norm_obs and isinstance(space, spaces.Dict):
        keys = [key for key, part in space.spaces.items() if is_normalisable(part)]
    normalised = VecNormalize(
        env,
        norm_obs=norm_obs,
        norm_reward="reward" in config.env.normalize,
        gamma=getattr(config.algo, "gamma", 0.99),  # ARS discounts nothing; VecNormalize's own
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


def settled(env: VecEnv, config: Config, statistics: Statistics) -> VecNormalize:
    """`env.normalize` as it was learned in a training, around other envs; it learns nothing more."""
    if isinstance(statistics, VecNormalize):
        normalised = copy.deepcopy(statistics)  # VecNormalize leaves its env out of copies
        normalised.set_venv(env)
    elif statistics.suffix == ".npz":
        normalised = _learning(env, config)
        load_moments(normalised, read_arrays(statistics, MOST_STATISTICS_BYTES))
    else:  # SB3's own file, a pickle: who names it trusts it (models.find_statistics)
        normalised = VecNormalize.load(str(statistics), env)
    normalised.training = normalised.norm_reward = False
    return normalised


class MonitoredEnv(EnvFactory):
    """Builds one env of the run, as a plain SB3 script would: picklable, called in the process that steps it."""

    def __call__(self) -> Monitor[Any, Any]:
        return Monitor(super().__call__())


def this_machine() -> Machine:
    """What the plan needs to know."""
    return Machine(usable_cores(), platform.system() == "Windows", torch.cuda.is_available(), bf16_units())


def env_spec(config: Config) -> EnvSpec:
    """The env a run asks for."""
    return EnvSpec(
        id=config.env.id,
        entry_point=config.env.entry_point,
        kwargs=env_kwargs(config),
        wrappers=config.env.wrappers,
        max_episode_steps=config.env.max_episode_steps,
        action_repeat=config.action_repeat,
        info_keys=config.env.info_keys,
        lean_info=config.lean_info,
        needs_masks=config.algo.spec.masks == "must",
        use_masks=uses_masks(config),
        masks=config.env.masks,
        two_sided=plays_itself(config),
        memory_inputs=memory_inputs(config),
    )


def survey_of(config: Config, console: Console) -> Survey:
    """What will look at the env of a run."""
    compiled = config.env.native_game is not None and config.env.backend == "gymnasium" and uses_masks(config)
    here = compiled and config.vec_env in ("auto", "native")
    return Survey(env_spec(config), config.env.step_timeout_s, console, here)


def env_facts(
    config: Config, survey: Survey | None = None, measure: Callable[[], ProbeResult | None] = lambda: None
) -> EnvFacts:
    """Build the env once, so that a wrong one fails here with one clear message; time it where the plan must choose.

    `survey` belongs to a training that goes on with its process. `measure` plays the env for reasons of its own (the
    checkup); if it returns what the env costs, nothing is played twice.

    Raises:
        EnvSpecError: the env cannot be built or does not fit the algorithm.
        ConfigError: a native batch was asked for with an algorithm that ignores masks, or with an option it lacks.
    """
    if config.env.backend != "gymnasium" or config.vec_env == "vector":
        images = check_spaces(config, *check_batch(config)).startswith("Cnn")
        return EnvFacts(True, None, images=images)
    native = config.env.native_game is not None and uses_masks(config)
    if config.vec_env == "native" and not native:
        raise ConfigError(
            f"vec_env=native with algo={config.algo.name}: the native game refuses illegal actions and this algorithm "
            "ignores masks; take algo=maskable_ppo, or dqn with engine=fast, or vec_env=dummy"
        )
    native = native and not (config.vec_env == "auto" and memory_inputs(config))
    if native and config.vec_env in ("auto", "native"):
        check_native_options(config)
    times = config.vec_env == "auto" and not native and config.workers != 0
    plays = times or (survey is not None and (config.checkup != "off" or config.vec_env == "shared"))
    with nullcontext(survey) if survey else survey_of(config, Console(quiet=True)) as asked:
        built = asked.build() if plays else asked.build_here()
        policy = check_spaces(config, asked.spec.option, built.action_space, built.observation_space)
        if built.lacks_masks:
            raise EnvSpecError(built.lacks_masks)
        images = policy.startswith("Cnn")
        measured = measure()
        if not times and (measured is None or config.vec_env != "shared"):  # whose workers are fitted to envs that wait
            return EnvFacts(native, None, images=images, shares=asked.shares)
        found = measured or asked.costs()
        return EnvFacts(native, found.step_s + found.mask_s, found.cpu_share, images, shares=asked.shares)


def build_vec_env(
    config: Config,
    num_envs: int,
    seed: int,
    statistics: Statistics | None = None,
    tell: Callable[[str], None] = lambda _: None,
    scout: Scout | None = None,
    folder: Path | None = None,
) -> VecEnv:
    """`num_envs` copies as the (effective) `vec_env` says; env i is seeded with `seed + i`.

    `statistics` of a training: the envs are to be played with `env.normalize` as it was learned there. `tell` hears
    which env is being built, where that is known. `scout` is to be the first worker.
    `folder` is where engines' logs go.
    """
    env: VecEnv
    if config.env.backend != "gymnasium" or config.vec_env == "vector":
        env = made_batch(config, num_envs, folder)
    elif config.vec_env == "native":
        from fasttrain.vec.native import NativeVecEnv

        env = NativeVecEnv(_native_game(config, num_envs))
    elif config.vec_env == "shared":
        env = _shared(config, num_envs, scout)
    else:
        single = EnvFactory if tells_games(config) else MonitoredEnv
        factories: list[Callable[[], Any]] = [
            Retraced(single(env_spec(config)), config.copy_final_observations) for _ in range(num_envs)
        ]
        env = start_subproc(factories) if config.vec_env == "subproc" else NotedVecEnv(telling(factories, tell))
    env.seed(seed)
    return SelfPlayVecEnv(env) if plays_itself(config) else wrapped(env, config, statistics)


def _shared(config: Config, num_envs: int, scout: Scout | None) -> SharedMemoryVecEnv:
    """Workers build plain envs: returns, lengths and lean infos are the vector env's own work."""
    spec = dataclasses.replace(env_spec(config), lean_info=False)
    env = SharedMemoryVecEnv(
        [Retraced(EnvFactory(spec))] * num_envs,
        config.workers if isinstance(config.workers, int) else None,
        info_keys=(*config.env.info_keys, *([OPPONENTS_TURN] if spec.two_sided else [])) if config.lean_info else None,
        on_env_error=config.env.on_env_error,
        step_timeout_s=config.env.step_timeout_s,
        use_masks=spec.use_masks,
        check_finite=config.nan_guard,
        scout=scout,
    )
    env.keeps_records = not tells_games(config)
    return env


def _native_game(config: Config, num_envs: int) -> Any:
    game = users(str(config.env.native_game), "env.native_game")
    try:
        made = game(num_envs, **env_kwargs(config))
    except FastTrainError:
        raise
    except Exception as error:
        what = f"env.native_game={config.env.native_game} could not be made for {num_envs} envs"
        raise ConfigError(f"{what} with env.kwargs={config.env.kwargs}: {blame(error)}") from error
    if hasattr(made, "max_threads") and not config.overlap:  # else the second core is the update's
        made.max_threads = usable_cores()
    return made


def game_calls(config: Config) -> list[KernelCall]:
    """The kernels of the native game, if the env is one that lists them."""
    if config.env.native_game is None or config.env.backend != "gymnasium":
        return []
    from fasttrain.vec.native import NativeVecEnv

    try:
        env = NativeVecEnv(_native_game(config, 1), seed=0)
    except FastTrainError:  # is told where the env is looked at
        return []
    if hasattr(env.game, "kernel_calls"):
        return list(env.game.kernel_calls())
    env.reset()  # of one that lists none, what a step compiles comes before training all the same
    env.step(RandomOpponent(env.action_space).act(None, np.stack(env.env_method("action_masks")), np.arange(1)))
    return []


def users(name: str, key: str) -> Any:
    """What the user's `module:Name` leads to, from a package or from the working directory.

    Raises:
        EnvSpecError: nowhere; says what is there.
    """
    return look_up(name, f"{key}={name}", os.getcwd(), f"{key}=my_game.networks:Mine")


def telling(factories: Sequence[Callable[[], Any]], tell: Callable[[str], None]) -> list[Callable[[], Any]]:
    """Functions that build envs, each saying first which one it is: `env 3 of 12`."""

    def build(index: int) -> Any:
        tell(f"env {index + 1} of {len(factories)}")
        return factories[index]()

    return [partial(build, index) for index in range(len(factories))]
