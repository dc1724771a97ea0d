"""Builds the vectorized env of a run from the effective configuration, and collects facts about it for the plan."""

from __future__ import annotations

import copy
import dataclasses
import platform
import time
from collections import OrderedDict
from collections.abc import Callable
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
from fasttrain.envs.answers import MOST_REWARD, as_ends, as_reward, check_step
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.names import arguments, callable_at
from fasttrain.envs.probe import ProbeResult
from fasttrain.envs.retrace import RetraceFactory
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, EnvSpecError, FastTrainError, NoMasksError
from fasttrain.machine import bf16_units, usable_cores
from fasttrain.perf.report import EnvTimes
from fasttrain.runs.batches import check_batch, check_native_options, made_batch
from fasttrain.runs.spaces import check_policy, check_spaces, is_normalisable
from fasttrain.runs.survey import Survey
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.env_state import load_moments
from fasttrain.spec import plugins
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.policies import goals_of
from fasttrain.spec.reading import env_kwargs, has_monitor_wrapper, is_self_play, memory_inputs, uses_masks
from fasttrain.vec.base import SlotVecEnv
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.stock import ActionLogVecEnv, start_subproc
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_vec.process import Scout

Statistics = Path | VecNormalize
MOST_STATISTICS_BYTES = 1 << 30  # statistics hold three float64 for each number of an observation


def wrapped(env: VecEnv, config: Config, statistics: Statistics | None = None) -> VecEnv:
    """`env` with frame stacking and normalization. `statistics`: from a training's env or file, used unchanged."""
    if config.env.frame_stack > 1:
        env = VecFrameStack(env, config.env.frame_stack)
    if not config.env.normalize:
        return env
    return _learning(env, config) if statistics is None else with_statistics(env, config, statistics)


def _learning(env: VecEnv, config: Config) -> VecNormalize:
    space, norm_obs = env.observation_space, "obs" in config.env.normalize
    keys = None
    if norm_obs and isinstance(space, spaces.Dict):
        keys = [key for key, part in space.spaces.items() if is_normalisable(part)]
    normalised = VecNormalize(
        env,
        norm_obs=norm_obs,
        norm_reward="reward" in config.env.normalize,
        gamma=getattr(config.algo, "gamma", 0.99),  # VecNormalize's default for ARS, which has no gamma
        norm_obs_keys=keys,
    )
    if norm_obs:  # VecNormalize gives float32; with an integer space a buffer would cut off the fractions
        normalised.observation_space = _float_space(space, keys, normalised.clip_obs)
    return normalised


def _float_space(space: spaces.Space[Any], keys: list[str] | None, clip: float) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        return spaces.Dict(
            OrderedDict((key, _float_space(part, None, clip) if key in (keys or ()) else part) for key, part in parts)
        )
    return space if space.dtype == np.float32 else spaces.Box(-clip, clip, space.shape, np.float32)


def with_statistics(env: VecEnv, config: Config, statistics: Statistics) -> VecNormalize:
    """VecNormalize around `env` with the statistics of a training, which do not change any more."""
    if isinstance(statistics, VecNormalize):
        normalised = copy.deepcopy(statistics)  # VecNormalize leaves its env out of copies
        normalised.set_venv(env)
    elif statistics.suffix == ".npz":
        normalised = _learning(env, config)
        load_moments(normalised, read_arrays(statistics, MOST_STATISTICS_BYTES))
    else:  # SB3's own file, a pickle; only with --trust
        normalised = VecNormalize.load(str(statistics), env)
    normalised.training = normalised.norm_reward = False
    return normalised


class CheckedMonitor(Monitor[Any, Any]):
    """SB3's Monitor, which also checks what `step` returns. It makes rewards floats, ends bools and infos dicts.

    SB3's own class raises an error for a reward that is an array with one entry. A wrapper below it would cost a call
    per step.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.needs_reset:
            raise RuntimeError("Tried to step environment that needs reset")
        answer: Any = self.env.step(action)
        if type(answer) is not tuple or len(answer) != 5 or type(answer[4]) is not dict:
            check_step(answer)
            answer = (*answer[:4], dict(answer[4]))
        observation, reward, terminated, truncated, info = answer
        if type(reward) is not float or not -MOST_REWARD <= reward <= MOST_REWARD:
            reward = as_reward(reward)
        self.rewards.append(reward)
        self.total_steps += 1
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = as_ends(terminated, truncated)
        if terminated or truncated:
            self.needs_reset = True
            total, length, passed_s = sum(self.rewards), len(self.rewards), time.time() - self.t_start
            self.episode_returns.append(total)
            self.episode_lengths.append(length)
            self.episode_times.append(passed_s)
            info["episode"] = {"r": round(total, 6), "l": length, "t": round(passed_s, 6)}
        return observation, reward, terminated, truncated, info


class MonitoredEnv(EnvFactory):
    """Builds one env of the run in a Monitor, as a plain SB3 script does. Picklable."""

    def __call__(self) -> CheckedMonitor:
        return CheckedMonitor(super().__call__())


def this_machine() -> Machine:
    return Machine(usable_cores(), platform.system() == "Windows", torch.cuda.is_available(), bf16_units())


def env_spec(config: Config) -> EnvSpec:
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
        two_sided=is_self_play(config),
        memory_inputs=memory_inputs(config),
        goals=goals_of(config) if config.policies else None,
        tasks=config.curriculum.tasks,
    )


def survey_of(config: Config, console: Console) -> Survey:
    """The process that will build, check and time the env of a run."""
    compiled = config.env.spec.native is not None and config.env.backend == "gymnasium" and uses_masks(config)
    here = compiled and config.vec_env in ("auto", "native")
    return Survey(env_spec(config), config.env.step_timeout_s, console, here)


def env_facts(
    config: Config,
    survey: Survey | None = None,
    measure: Callable[[], ProbeResult | None] = lambda: None,
    look: Callable[[SlotVecEnv], object] = lambda _: None,
) -> EnvFacts:
    """Build the env once, so that a wrong env fails here with one clear message; time the env if the plan needs that.

    Raises EnvSpecError or ConfigError if the env cannot be built or does not suit the algorithm or an option.

    Args:
        survey: the process that builds and checks the env; a training uses it as a worker afterwards.
        measure: plays the env to find faults. If it returns the env's times, the env is not timed again.
        look: plays one game of an external engine to find faults.
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
            "ignores masks; use algo=maskable_ppo, or dqn with engine=fast, or vec_env=dummy"
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
        if built.mask_error:
            raise EnvSpecError(built.mask_error)
        images = policy.startswith("Cnn")
        measured = measure()
        if measured is None and native and survey is not None and config.fused_update == "auto":
            measured = asked.costs()  # costs() also measures the share of zeros in observations, which kernels skip
        if not times and (measured is None or config.vec_env != "shared"):  # only auto and shared need the costs
            density = measured.density if measured else (1.0, 1.0)
            return EnvFacts(native, None, images=images, shares=asked.shares, density=density)
        costs = measured or asked.costs()
        step_s = costs.step_s + costs.mask_s
        return EnvFacts(native, step_s, costs.cpu_share, images, shares=asked.shares, density=costs.density)


def build_vec_env(
    config: Config,
    num_envs: int,
    seed: int,
    statistics: Statistics | None = None,
    tell: Callable[[str], None] = lambda _: None,
    scout: Scout | None = None,
    folder: Path | None = None,
    reported: set[str] | None = None,
) -> VecEnv:
    """The vectorized env of the effective `vec_env` with `num_envs` copies; env i is seeded with `seed + i`.

    Args:
        statistics: those of `env.normalize` in a training. The envs use them unchanged.
        tell: is called with a text for the progress line (which env is being built).
        scout: a process that becomes the first worker.
        folder: for the logs of external engines. None: the envs are not those of a training.
        reported: process settings that envs changed, for which the user was warned already.
    """
    try:
        env = _unwrapped_env(config, num_envs, tell, scout, folder, reported)
    except EnvSpecError as error:
        if num_envs < 2 or error.__cause__ is None or isinstance(error, NoMasksError):
            raise
        raise EnvSpecError(
            f"{error}; num_envs={num_envs} are open at once; use num_envs=1 if the env cannot be open twice"
        ) from error
    env.seed(seed)
    return SelfPlayVecEnv(env) if is_self_play(config) else wrapped(env, config, statistics)


def _unwrapped_env(
    config: Config,
    num_envs: int,
    tell: Callable[[str], None],
    scout: Scout | None,
    folder: Path | None,
    reported: set[str] | None,
) -> VecEnv:
    if config.cluster.engine != "off" and folder is not None:
        return plugins.load(plugins.INTEGRATIONS, config.cluster.engine).env_of(config, num_envs)  # type: ignore[no-any-return]
    if config.env.backend != "gymnasium" or config.vec_env == "vector":
        return made_batch(config, num_envs, folder)
    if config.vec_env == "native":
        from fasttrain.vec.native import NativeVecEnv

        return NativeVecEnv(_native_game(config, num_envs), tasks=config.curriculum.tasks)
    if config.vec_env == "shared":
        return _shared(config, num_envs, scout)
    single = EnvFactory if has_monitor_wrapper(config) else MonitoredEnv
    spec = dataclasses.replace(env_spec(config), stagger=0 if folder is None else config.env.stagger)
    factory: Callable[[], Any] = RetraceFactory(single(spec), config.copy_final_observations)
    if config.vec_env == "subproc":
        return start_subproc([factory] * num_envs)

    def build(index: int) -> Any:
        tell(f"env {index + 1} of {num_envs}")
        return factory()

    return ActionLogVecEnv([partial(build, index) for index in range(num_envs)], reported)


def _shared(config: Config, num_envs: int, scout: Scout | None) -> SharedMemoryVecEnv:
    """Workers build envs without Monitor: the vectorized env counts returns and lengths, and drops most infos."""
    spec = dataclasses.replace(env_spec(config), lean_info=False, stagger=config.env.stagger)
    env = SharedMemoryVecEnv(
        [RetraceFactory(EnvFactory(spec))] * num_envs,
        config.workers if isinstance(config.workers, int) else None,
        info_keys=(*config.env.info_keys, *([OPPONENTS_TURN] if spec.two_sided else [])) if config.lean_info else None,
        on_env_error=config.env.on_env_error,
        step_timeout_s=config.env.step_timeout_s,
        use_masks=spec.use_masks,
        check_finite=config.nan_guard != "off",
        scout=scout,
        restart_hint="env.on_env_error=restart",
    )
    env.keeps_records = not has_monitor_wrapper(config)
    return env


def _native_game(config: Config, num_envs: int) -> Any:
    native = str(config.env.spec.native)
    game = callable_at(native, f"the native form of env.game={config.env.game}, {native}")
    try:
        made = game(num_envs, **arguments(env_kwargs(config), "env.kwargs."))
    except FastTrainError:
        raise
    except Exception as error:
        what = f"{native}, the native form of env.game={config.env.game}, could not be made for {num_envs} envs"
        raise ConfigError(f"{what} with env.kwargs={config.env.kwargs}: {blame(error)}") from error
    if hasattr(made, "max_threads"):
        made.max_threads = usable_cores()
    return made


def game_calls(config: Config) -> list[KernelCall]:
    """The kernels of the run's native game; empty for other envs, and for a game that does not list them."""
    if config.env.spec.native is None or config.env.backend != "gymnasium":
        return []
    from fasttrain.vec.native import NativeVecEnv

    try:
        env = NativeVecEnv(_native_game(config, 1), seed=0)
    except FastTrainError:  # `env_facts` reports the error
        return []
    if hasattr(env.game, "kernel_calls"):
        return list(env.game.kernel_calls())
    env.reset()  # a game that lists no kernels compiles them in its first step, which happens here
    env.step(RandomOpponent(env.action_space).act(None, np.stack(env.env_method("action_masks")), np.arange(1)))
    return []


# --- times and engines of the vectorized env


def env_times(env: VecEnv, config: Config, opponents_ns: int, counted: bool) -> EnvTimes:
    """The times of the envs, for [PERF]. `opponents_ns`: sum from infos. `counted`: envs have `opponents_ns`."""
    self_play, in_step = env if isinstance(env, SelfPlayVecEnv) else None, config.schedule == "lockstep"
    stepping = env.unwrapped if self_play is None else self_play.inner
    if self_play is not None:  # opponents act in this process, and `self_play` measures their turns
        opponents_ns = self_play.opponents_ns
    elif counted and not isinstance(stepping, ExternalVecEnv):
        counts = env.get_attr("opponents_ns")
        counts = [count for count in counts if isinstance(count, (int, np.integer))]  # a user's env may use this name
        opponents_ns = int(sum(counts[:1] if config.vec_env == "native" else counts))
    if isinstance(stepping, ExternalVecEnv):
        return EnvTimes(opponents_ns, in_step=in_step, **stepping.env_times())
    if isinstance(stepping, ActionLogVecEnv) or getattr(stepping, "fill", None) is not None:
        return EnvTimes(opponents_ns, **replaced(stepping))
    if not isinstance(stepping, SharedMemoryVecEnv):
        return EnvTimes(opponents_ns)
    times = stepping.times_ns()
    if self_play is None:
        opponents_ns = (times["opponents"] or opponents_ns) // stepping.num_workers  # workers run in parallel
    own: dict[str, Any] = {f"{name}_ns": times[name] for name in ("envs", "slowest", "waiting")}
    return EnvTimes(opponents_ns, stepping.num_workers, in_step=in_step, **own, **replaced(stepping))


def replaced(env: Any) -> dict[str, Any]:
    """The fields `restarts`, `causes` and `lost_steps` of `EnvTimes`, for a vectorized env that replaces envs."""
    return {"restarts": env.replacements.count, "causes": env.replacements.why, "lost_steps": env.lost_steps}


def engines_of(env: VecEnv) -> ExternalVecEnv | None:
    """The vectorized env of games with external engines inside `env`; None if there is none."""
    games = env.inner if isinstance(env, SelfPlayVecEnv) else env.unwrapped
    return games if isinstance(games, ExternalVecEnv) else None
