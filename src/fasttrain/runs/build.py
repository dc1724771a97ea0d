"""From the effective configuration to envs and an algorithm. The only place that chooses classes."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.fast import Fast
from fasttrain.batch import OPPONENTS_TURN
from fasttrain.engines.q_networks import DUELING_POLICIES
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.probe import ProbeResult
from fasttrain.envs.retrace import Retraced
from fasttrain.envs.user_code import blame, look_up
from fasttrain.errors import ConfigError, EnvSpecError, FastTrainError
from fasttrain.kernel_cache import KernelCall
from fasttrain.machine import bf16_units, usable_cores
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.stock import TimedVecEnv
from fasttrain.runs.activity import telling
from fasttrain.runs.envs import Statistics, check_native_options, check_spaces, policy_for, wrapped
from fasttrain.runs.survey import Survey
from fasttrain.runs.torch_setup import pick_device
from fasttrain.spec.checks import parse_schedule
from fasttrain.spec.config import AlgoConfig, Config
from fasttrain.spec.flags import EnvFacts, Machine
from fasttrain.spec.reading import env_kwargs, plays_itself
from fasttrain.vec.process import Scout
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.stock import NotedVecEnv, start_subproc


class MonitoredEnv:
    """Builds one env of the run, as a plain SB3 script would: picklable, called in the process that steps it."""

    def __init__(self, spec: EnvSpec) -> None:
        self.factory = EnvFactory(spec)

    def __call__(self) -> Monitor[Any, Any]:
        return Monitor(self.factory())


def this_machine() -> Machine:
    """What the plan needs to know."""
    return Machine(usable_cores(), platform.system() == "Windows", torch.cuda.is_available(), bf16_units())


def env_spec(config: Config) -> EnvSpec:
    """The env a run asks for."""
    return EnvSpec(
        id=config.env.id,
        entry_point=config.env.entry_point,
        kwargs=env_kwargs(config),
        api=config.env.api,
        wrappers=config.env.wrappers,
        max_episode_steps=config.env.max_episode_steps,
        action_repeat=config.action_repeat,
        info_keys=config.env.info_keys,
        lean_info=config.lean_info,
        needs_masks=config.algo.spec.masks == "must",
        use_masks=uses_masks(config),
        two_sided=plays_itself(config),
    )


def uses_masks(config: Config) -> bool:
    """Whether the algorithm looks at action masks."""
    masks = config.algo.spec.masks
    return masks == "must" or (masks == "may" and config.engine == "fast" and config.algo.use_masking)


def survey_of(config: Config, console: Console) -> Survey:
    """What will look at the env of a run."""
    compiled = config.env.native_game is not None and config.env.backend == "gymnasium" and uses_masks(config)
    here = compiled and config.vec_env in ("auto", "native")
    return Survey(env_spec(config), config.checkup_timeout_s, console, here)


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
    if config.env.backend == "envpool":
        check_native_options(config)
        return EnvFacts(True, None, images=_check_envpool(config))
    native = config.env.native_game is not None and uses_masks(config)
    if config.vec_env == "native" and not native:
        raise ConfigError(
            f"vec_env=native with algo={config.algo.name}: the native game refuses illegal actions and this algorithm "
            "ignores masks; take algo=maskable_ppo, or dqn with engine=fast, or vec_env=dummy"
        )
    if native and config.vec_env in ("auto", "native"):
        check_native_options(config)
    times = config.vec_env == "auto" and not native and config.workers != 0
    plays = times or (survey is not None and (config.checkup != "off" or config.vec_env == "shared"))
    with nullcontext(survey) if survey else survey_of(config, Console(quiet=True)) as asked:
        built = asked.build() if plays else asked.build_here()
        check_spaces(config, asked.spec.option, built.action_space, built.observation_space)
        if built.lacks_masks:
            raise EnvSpecError(built.lacks_masks)
        images = policy_for(config.algo.policy, built.observation_space, config.algo.spec.policies).startswith("Cnn")
        measured = measure()
        if not times and (measured is None or config.vec_env != "shared"):  # whose workers are fitted to envs that wait
            return EnvFacts(native, None, images=images)
        found = measured or asked.costs()
        return EnvFacts(native, found.step_s + found.mask_s, found.cpu_share, images)


def _check_envpool(config: Config) -> bool:
    what = f"env.id={config.env.id} of EnvPool"
    if config.algo.spec.masks == "must":
        raise ConfigError(f"{what} has no action masks: take algo=ppo or dqn")
    env = _envpool(config, 1)
    check_spaces(config, what, env.action_space, env.observation_space)
    return policy_for(config.algo.policy, env.observation_space, config.algo.spec.policies).startswith("Cnn")


def build_vec_env(
    config: Config,
    num_envs: int,
    seed: int,
    statistics: Statistics | None = None,
    tell: Callable[[str], None] = lambda _: None,
    scout: Scout | None = None,
) -> VecEnv:
    """`num_envs` copies as the (effective) `vec_env` says; env i is seeded with `seed + i`.

    `statistics` of a training: the envs are to be played with `env.normalize` as it was learned there. `tell` hears
    which env is being built, where that is known. `scout` is to be the first worker.
    """
    env: VecEnv
    if config.env.backend == "envpool":
        env = _envpool(config, num_envs)
    elif config.vec_env == "native":
        from fasttrain.vec.native import NativeVecEnv

        env = NativeVecEnv(_native_game(config, num_envs))
    elif config.vec_env == "shared":
        env = _shared(config, num_envs, scout)
    else:
        factories: list[Callable[[], Any]] = [Retraced(MonitoredEnv(env_spec(config))) for _ in range(num_envs)]
        env = start_subproc(factories) if config.vec_env == "subproc" else NotedVecEnv(telling(factories, tell))
    env.seed(seed)
    return SelfPlayVecEnv(env) if plays_itself(config) else wrapped(env, config, statistics)


def _shared(config: Config, num_envs: int, scout: Scout | None) -> SharedMemoryVecEnv:
    """Workers build plain envs: returns, lengths and lean infos are the vector env's own work."""
    spec = dataclasses.replace(env_spec(config), lean_info=False)
    return SharedMemoryVecEnv(
        [Retraced(EnvFactory(spec))] * num_envs,
        config.workers if isinstance(config.workers, int) else None,
        info_keys=(*config.env.info_keys, *([OPPONENTS_TURN] if spec.two_sided else [])) if config.lean_info else None,
        on_env_error=config.env.on_env_error,
        step_timeout_s=config.env.step_timeout_s,
        max_restarts=config.env.max_restarts,
        use_masks=spec.use_masks,
        check_finite=config.nan_guard,
        scout=scout,
    )


def _envpool(config: Config, num_envs: int) -> VecEnv:
    from fasttrain.vec.envpool import EnvPoolVecEnv

    return EnvPoolVecEnv(str(config.env.id), num_envs, config.env.max_episode_steps, config.env.kwargs)


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


def build_algorithm(config: Config, env: VecEnv, clock: PhaseClock) -> BaseAlgorithm:
    """The algorithm of the (effective) configuration: stock classes under `engine=stock`, ours under `fast`.

    Either way `clock` will know the phases: a stock class is watched from outside, ours moves it itself.
    """
    algo, spec = config.algo, config.algo.spec
    fast = config.engine == "fast" and spec.has_fast
    alias = policy_for(algo.policy, env.observation_space, spec.policies)
    policy: Any = users(algo.policy, "algo.policy") if ":" in algo.policy else alias
    arguments = {
        **_arguments(config, env.action_space),
        "policy_kwargs": _policy_kwargs(algo),
        "seed": config.seed,
        "device": pick_device(config.device, alias),
        "verbose": 0,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You have specified a mini-batch size", UserWarning)  # the plan says it
        if not fast:
            model = _made(config, fast, policy, TimedVecEnv(env, clock), arguments)
            if isinstance(model, Fast):
                model.time_with(clock)  # of bare models; a run refuses it where the plan is made
            return model
        if spec.off_policy:
            policy, more = _of_ours(algo, policy)
            arguments |= more
        model = _made(config, fast, policy, env, arguments)
    _put_to_work(model, config, clock)
    return model


def algorithm_class(config: Config, fast: bool) -> Any:
    """The algorithm's class, or the user's own that is derived from it.

    Raises:
        ConfigError: it is derived from another.
    """
    base, own = config.algo.spec.load(fast), config.algo.entry_point
    if own is None:
        return base
    found = users(own, "algo.entry_point")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"algo.entry_point={own}: algo={config.algo.name} with engine={config.engine} takes a class derived from "
            f"{base.__module__.partition('.')[0]}.{base.__name__}, it is {found!r:.80}"
        )
    return found


def _made(config: Config, fast: bool, policy: Any, env: VecEnv, arguments: dict[str, Any]) -> BaseAlgorithm:
    kind = algorithm_class(config, fast)
    if config.algo.entry_point is None:
        return kind(policy, env, **arguments)  # type: ignore[no-any-return]
    try:
        return kind(policy, env, **arguments, **config.algo.kwargs)  # type: ignore[no-any-return]
    except TypeError as error:
        given = f"algo.entry_point={config.algo.entry_point} with algo.kwargs={config.algo.kwargs}"
        raise ConfigError(f"{given}: {blame(error)}") from error


def _arguments(config: Config, action_space: Any) -> dict[str, Any]:
    """The stock class's constructor arguments, from `algo.` and from the flags that stand for some of them."""
    algo, spec = config.algo, config.algo.spec
    found: dict[str, Any] = {}
    for name, (kind, _) in spec.arguments().items():
        if name in spec.keys():  # noqa: SIM118 - a method
            value = getattr(algo, name)
            is_schedule = kind.startswith("schedule") and value is not None
            found[name] = _schedule(value, f"algo.{name}") if is_schedule else value
    if (noise := getattr(algo, "action_noise", None)) is not None:
        found["action_noise"] = _noise(noise, action_space)
    if spec.minibatches:
        found["batch_size"] = config.batch_size
    if spec.on_policy:
        found["n_steps"] = algo.rollout_size // config.num_envs
    if spec.off_policy:
        found |= {"learning_starts": config.warmup_steps, "train_freq": 1, "gradient_steps": config.updates_per_step}
    return found


def _noise(text: str, action_space: Any) -> NormalActionNoise:
    """`normal_0.1`: what TD3 and DDPG explore by, scaled as the actions are (-1 to 1).

    Raises:
        ConfigError: it is nothing of the kind.
    """
    kind, _, number = text.partition("_")
    sigma = float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else -1.0
    if kind != "normal" or sigma < 0:
        raise ConfigError(f"algo.action_noise={text}: expected normal_0.1, Gaussian noise of that standard deviation")
    return NormalActionNoise(np.zeros(action_space.shape), np.full(action_space.shape, sigma))


def _of_ours(algo: AlgoConfig, policy: str) -> tuple[Any, dict[str, Any]]:
    """The policy and the arguments that our DQN takes besides stock's."""
    prioritized = {"alpha": algo.per_alpha, "beta": algo.per_beta} if algo.prioritized else None
    more = {"double_q": algo.double_q, "loss": algo.loss, "prioritized": prioritized, "use_masking": algo.use_masking}
    return DUELING_POLICIES[policy] if algo.dueling else policy, more


def _put_to_work(model: Any, config: Config, clock: PhaseClock) -> None:
    """What flags ask of the env's side of our classes; the engine's is `settle_engine`."""
    model.time_with(clock)
    collector = model.collector
    collector.lends_observations = True  # the run's own callback keeps none
    if config.algo.spec.off_policy:
        collector.local_random_actions = config.local_random_actions
        if config.prefetch == "on":
            model.prefetch_batches(config.deterministic)
        return
    collector.schedule = config.schedule


def users(name: str, key: str) -> Any:
    """What the user's `module:Name` leads to, from a package or from the working directory.

    Raises:
        EnvSpecError: nowhere; says what is there.
    """
    return look_up(name, f"{key}={name}", os.getcwd(), f"{key}=my_game.networks:Mine")


def _policy_kwargs(algo: AlgoConfig) -> dict[str, Any]:
    kwargs: dict[str, Any] = {name: getattr(algo, name) for name in algo.spec.extras if algo.spec.recurrent}
    for name, value in algo.policy_kwargs.items():
        is_class = isinstance(value, str) and ":" in value
        kwargs[name] = users(value, f"algo.policy_kwargs.{name}") if is_class else value
    if algo.net_arch is not None:
        arch = algo.net_arch
        kwargs["net_arch"] = {k: list(v) for k, v in arch.items()} if isinstance(arch, dict) else list(arch)
    if algo.activation_fn is not None:
        kwargs["activation_fn"] = {
            "tanh": torch.nn.Tanh,
            "relu": torch.nn.ReLU,
            "elu": torch.nn.ELU,
            "gelu": torch.nn.GELU,
            "silu": torch.nn.SiLU,
            "leaky_relu": torch.nn.LeakyReLU,
        }[algo.activation_fn]
    return kwargs


def _schedule(value: float | str, key: str) -> Any:
    """A number, or SB3's own linear schedule from that number to 0 (a stock class, so that the zip stays stock)."""
    kind, number = parse_schedule(value, key)
    return number if kind == "constant" else LinearSchedule(number, 0.0, 1.0)


def set_threads(threads: int | str) -> int:
    """Set torch's intra-op threads; `default` leaves them alone. Returns what is in force."""
    if isinstance(threads, int):
        torch.set_num_threads(threads)
    return torch.get_num_threads()
