"""From the effective configuration to an algorithm, its device and threads. The only place that chooses its classes."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from fasttrain.algos.fast import Fast
from fasttrain.engines.q_networks import DUELING_POLICIES
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.stock import TimedVecEnv
from fasttrain.runs.envs import policy_for, users
from fasttrain.spec.checks import parse_schedule
from fasttrain.spec.config import AlgoConfig, Config


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


def pick_device(requested: str, policy: str) -> str:
    """`auto`: a small MLP is faster on the CPU (SB3 warns of the GPU there), images belong on the GPU.

    Raises:
        ConfigError: a device was asked for that is not there.
    """
    if requested == "auto":
        return "cuda" if policy.startswith("Cnn") and torch.cuda.is_available() else "cpu"
    if requested == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine (or this torch build) has no MPS; take device=cpu")
    kind, _, number = requested.partition(":")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={requested}: this machine (or this torch build) has no CUDA; take device=cpu")
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if number and requested not in there:
            raise ConfigError(f"device={requested}: this machine has {', '.join(there)}")
    return requested


WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


DISABLED = "__dynamo_disable"  # where torch keeps the form of a method that its compiler would leave alone


STEPPING = (Adam, AdamW, RMSprop, SGD)


def leave_compiler_out() -> None:
    """Let optimizers be built, saved and stepped without `torch._dynamo`: 800 modules, 1.2 s of every start on 2 cores.

    Those methods import it only to be left alone by it. Here each is told that it has been left alone already, and
    `step` sets gradients on or off without a word to the compiler. Another version of torch may do that elsewhere: then
    the start, or the first update, takes the second longer, and nothing else changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in WRAPPED:
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, DISABLED):
            setattr(method, DISABLED, method)
    for optimizer in STEPPING:
        step: Any = optimizer.step
        if step.__code__.co_name == "_use_grad":
            optimizer.step = _without_compiler(step.__wrapped__)  # type: ignore[method-assign]


def _without_compiler(step: Any) -> Any:
    """As torch's `_use_grad_for_differentiable`, less the compiler's graph breaks."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain
