"""From the effective configuration to envs: what of `env.` fits what, the vector env, and what lies around it."""

from __future__ import annotations

import copy
import dataclasses
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
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from fasttrain.batch import OPPONENTS_TURN
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.names import arguments, callable_at
from fasttrain.envs.probe import ProbeResult
from fasttrain.envs.retrace import Retraced
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, EnvSpecError, FastTrainError, NoMasksError
from fasttrain.kernel_cache import KernelCall
from fasttrain.machine import bf16_units, usable_cores
from fasttrain.perf.report import EnvTimes
from fasttrain.runs.batches import check_batch, check_native_options, made_batch
from fasttrain.runs.spaces import check_policy, check_spaces, is_normalisable
from fasttrain.runs.survey import Survey
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.env_state import load_moments
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.reading import env_kwargs, memory_inputs, plays_itself, tells_games, uses_masks
from fasttrain.vec.base import SlotVecEnv
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.process import Scout
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.stock import NotedVecEnv, start_subproc

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
        maker=config.env.spec.env,
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
    compiled = config.env.spec.native is not None and config.env.backend == "gymnasium" and uses_masks(config)
    here = compiled and config.vec_env in ("auto", "native")
    return Survey(env_spec(config), config.env.step_timeout_s, console, here)


def env_facts(
    config: Config,
    survey: Survey | None = None,
    measure: Callable[[], ProbeResult | None] = lambda: None,
    look: Callable[[SlotVecEnv], object] = lambda _: None,
) -> EnvFacts:
    """Build the env once, so that a wrong one fails here with one clear message; time it where the plan must choose.

    `survey` belongs to a training that goes on with its process. `measure` plays the env for reasons of its own (the
    checkup); if it returns what the env costs, nothing is played twice. `look` does so with one of an engine's.

    Raises:
        EnvSpecError: the env cannot be built or does not fit the algorithm.
        ConfigError: a native batch was asked for with an algorithm that ignores masks, or with an option it lacks.
    """
    if config.env.backend != "gymnasium" or config.vec_env == "vector":
        what, actions, observations = check_batch(config, look)
        images = check_spaces(config, what, actions, observations).startswith("Cnn")
        check_policy(config, observations)
        return EnvFacts(True, None, images=images)
    native = config.env.spec.native is not None and uses_masks(config)
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
        check_policy(config, built.observation_space)
        if built.lacks_masks:
            raise EnvSpecError(built.lacks_masks)
        images = policy.startswith("Cnn")
        measured = measure()
        if not times and (measured is None or config.vec_env != "shared"):  # whose workers are fitted to envs that wait
            density = measured.density if measured else (1.0, 1.0)
            return EnvFacts(native, None, images=images, shares=asked.shares, density=density)
        found = measured or asked.costs()
        step_s = found.step_s + found.mask_s
        return EnvFacts(native, step_s, found.cpu_share, images, shares=asked.shares, density=found.density)


def build_vec_env(
    config: Config,
    num_envs: int,
    seed: int,
    statistics: Statistics | None = None,
    tell: Callable[[str], None] = lambda _: None,
    scout: Scout | None = None,
    folder: Path | None = None,
    told: set[str] | None = None,
) -> VecEnv:
    """`num_envs` copies as the (effective) `vec_env` says; env i is seeded with `seed + i`.

    `statistics` of a training: the envs are to be played with `env.normalize` as it was learned there. `tell` hears
    which env is being built, where that is known. `scout` is to be the first worker.
    `folder` is where engines' logs go. `told` is what envs changed in this process, as far as it was said.
    """
    try:
        env = _stepped(config, num_envs, tell, scout, folder, told)
    except EnvSpecError as error:
        if num_envs < 2 or error.__cause__ is None or isinstance(error, NoMasksError):
            raise
        raise EnvSpecError(
            f"{error}; num_envs={num_envs} are open at once, take num_envs=1 if one alone can be"
        ) from error
    env.seed(seed)
    return SelfPlayVecEnv(env) if plays_itself(config) else wrapped(env, config, statistics)


def _stepped(
    config: Config,
    num_envs: int,
    tell: Callable[[str], None],
    scout: Scout | None,
    folder: Path | None,
    told: set[str] | None,
) -> VecEnv:
    if config.env.backend != "gymnasium" or config.vec_env == "vector":
        return made_batch(config, num_envs, folder)
    if config.vec_env == "native":
        from fasttrain.vec.native import NativeVecEnv

        return NativeVecEnv(_native_game(config, num_envs))
    if config.vec_env == "shared":
        return _shared(config, num_envs, scout)
    single = EnvFactory if tells_games(config) else MonitoredEnv
    factories: list[Callable[[], Any]] = [
        Retraced(single(env_spec(config)), config.copy_final_observations) for _ in range(num_envs)
    ]
    return start_subproc(factories) if config.vec_env == "subproc" else NotedVecEnv(telling(factories, tell), told)


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
        check_finite=config.nan_guard != "off",
        scout=scout,
    )
    env.keeps_records = not tells_games(config)
    return env


def _native_game(config: Config, num_envs: int) -> Any:
    native = str(config.env.spec.native)
    game = callable_at(native, f"the native form of env.game={config.env.game}, {native}")
    kwargs = arguments(env_kwargs(config), "env.kwargs.")
    try:
        made = game(num_envs, **kwargs)
    except FastTrainError:
        raise
    except Exception as error:
        what = f"{native}, the native form of env.game={config.env.game}, could not be made for {num_envs} envs"
        raise ConfigError(f"{what} with env.kwargs={config.env.kwargs}: {blame(error)}") from error
    if hasattr(made, "max_threads"):
        made.max_threads = usable_cores()
    return made


def game_calls(config: Config) -> list[KernelCall]:
    """The kernels of the native game, if the env is one that lists them."""
    if config.env.spec.native is None or config.env.backend != "gymnasium":
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


def telling(factories: Sequence[Callable[[], Any]], tell: Callable[[str], None]) -> list[Callable[[], Any]]:
    """Functions that build envs, each saying first which one it is: `env 3 of 12`."""

    def build(index: int) -> Any:
        tell(f"env {index + 1} of {len(factories)}")
        return factories[index]()

    return [partial(build, index) for index in range(len(factories))]


# --- what envs tell of a run


def env_times(env: VecEnv, config: Config, opponents_ns: int, counted: bool) -> EnvTimes:
    """What they report: opponents' time, and where workers or engines spent theirs.

    Args:
        opponents_ns: what info["perf"] said of it.
        counted: whether the envs count it themselves, as `opponents_ns`.
    """
    itself = env if isinstance(env, SelfPlayVecEnv) else None
    stepping = env.unwrapped if itself is None else itself.inner
    if itself is not None:  # the trainer decides for them; what the envs count lies within
        opponents_ns = itself.opponents_ns
    if isinstance(stepping, ExternalVecEnv):
        return EnvTimes(opponents_ns, in_step=config.schedule != "first_ready", **stepping.env_times())
    shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None
    if counted and itself is None:
        counts = env.get_attr("opponents_ns")
        opponents_ns = int(counts[0] if config.vec_env == "native" else sum(counts))
    if shared is None:
        return EnvTimes(opponents_ns)
    times = shared.times_ns()
    of_workers = (times["opponents"] or opponents_ns) // shared.num_workers  # side by side
    return EnvTimes(
        opponents_ns=of_workers if itself is None else opponents_ns,
        num_workers=shared.num_workers,
        envs_ns=times["envs"],
        slowest_ns=times["slowest"],
        waiting_ns=times["waiting"],
        in_step=config.schedule != "first_ready",
        restarts=shared.restarts,
        lost_steps=shared.lost_steps,
    )


def engines_of(env: VecEnv) -> ExternalVecEnv | None:
    """The vectorized env whose games external engines play, if `env` is one."""
    games = env.inner if isinstance(env, SelfPlayVecEnv) else env.unwrapped
    return games if isinstance(games, ExternalVecEnv) else None
