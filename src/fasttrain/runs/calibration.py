"""Measures whether compiled kernels or PyTorch, and how many threads, are fastest here for a run's networks.

Small models act and learn for a moment on random numbers, with the run's spaces, layers, minibatch size and number of
envs. The fastest way of computing is used for the run. For `fused_update=auto` the times are stored beside the compiled
kernels, for this processor, these versions and these shapes, and are not measured again. `torch_threads=auto` compares
one thread with one per core: a rule by network size chose wrongly for convolutions, and no rule knows how busy the
machine is.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.algos.engine import Fast
from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import each_array
from fasttrain.machine import usable_cores
from fasttrain.perf.clock import UPDATE_PHASES, PhaseClock
from fasttrain.perf.stock import StockPhases
from fasttrain.runs.engine import ADAM, compile_shown, engine_settings, learner_calls, set_threads, switch_step
from fasttrain.runs.models import build_algorithm
from fasttrain.runs.view import say
from fasttrain.saving.env_state import own_random_state
from fasttrain.spec.computing import MEASURED
from fasttrain.spec.config import MAX_TORCH_THREADS, Config
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.policies import own_config
from fasttrain.vec.base import slots_of
from fasttrain_kernels.kernel_cache import recall, remember

PAYS_FROM_S = 30.0  # if all updates of a run take less time than this, nothing is measured: the plan's rule decides
MOST_S, MOST_TURNS, LEAST_TURNS = 3.0, 10, 2  # limits: seconds in all; most and fewest measurements of each candidate
CLEAR = 1.5  # a candidate that is slower than the fastest one by this factor is not measured again
STEADY = 1.15  # if a candidate's two shortest times differ by less than this factor, nothing disturbed them
STEPS = 8  # vector steps in one measurement of an off-policy algorithm
MUST_GAIN = 1.1  # several threads must be faster than one by this factor, because they occupy more cores
MOST_ROWS = 128  # most rows of an on-policy minibatch in comparing threads; more rows give the same choice
UPDATE_S, FLOPS = 7e-4, 4e10  # torch's overhead of one update in seconds; floating point operations per second

KERNELS = "kernels"
VERSION = ".3.nbc"  # ending of the stored files' names

Density = tuple[float, float]  # shares of non-zero numbers in observations, and of legal actions
Costs = Mapping[str, float]  # name of a candidate → milliseconds of acting and learning per 1,000 env steps


def calibrate(
    plan: RunSpec, model: BaseAlgorithm, console: Console, density: Density = (1.0, 1.0), begun: bool = False
) -> RunSpec:
    """If `fused_update=auto`, measure kernels and torch with each thread count. Returns the plan with the fastest way.

    With `deterministic=true` the plan's rule decides, because a second measurement may give another result. A resumed
    run keeps its stored choice for the same reason.

    Args:
        density: shares of non-zero numbers in observations and of legal actions. Kernels skip all other entries.
        begun: True if the run began on torch and its kernels have just been compiled.
    """
    if not isinstance(model, Fast) or not _is_open(plan, model):
        return plan
    ways = ways_of(plan, model)
    calls = learner_calls(ways[KERNELS].config)
    waits = begun or switch_step(plan) == 0  # True: training goes on only when the kernels are compiled
    if not (waits or all(call.is_kept for call in calls)):
        return plan
    name = _name(plan, model, ways, density)
    costs = _stored_costs(name, ways)
    if costs is None:
        if not begun and expected_s(plan.config, model) < PAYS_FROM_S:
            return plan
        try:
            if begun:
                say(console, f"trying compiled kernels against PyTorch, about {MOST_S:.0f} s")
            else:
                compile_shown(calls, console)
            costs, steady = measured(ways, model, density)
        except Exception as error:  # for example: a policy of the user cannot be built a second time
            reason = f"{plan.row('fused_update').reason}; not measured: {type(error).__name__}"
            return plan.after("fused_update", plan.config.fused_update, reason)
        if steady:
            remember(name, VERSION, json.dumps(costs).encode())
    return _with_fastest(plan, ways, costs)


def calibrate_at_switch(plan: RunSpec, model: Fast, console: Console, density: Density) -> tuple[RunSpec, str]:
    """The plan after kernels were compiled during training, and why torch is kept (empty: kernels are used)."""
    plan = calibrate(plan, model, console, density, begun=True)
    if plan.config.fused_update == "on":
        return plan, ""
    model.use_engine(engine_settings(plan))
    return plan, plan.row("fused_update").reason


def settle_threads(plan: RunSpec, model: BaseAlgorithm) -> RunSpec:
    """Measure how many torch threads are fastest and set them, if `torch_threads=auto` and not `deterministic`."""
    config, row = plan.config, plan.row("torch_threads")
    threads, open_ = config.torch_threads, row.requested == "auto" and not row.reason.startswith(MEASURED)
    if not open_ or threads == 1 or config.deterministic or model.device.type != "cpu":
        return plan
    if config.fused_update == "on":
        set_threads(1)
        return plan.after(
            "torch_threads", 1, "the networks are computed by compiled kernels, with threads of their own"
        )
    rows = min(MOST_ROWS, config.batch_size or MOST_ROWS) if config.algo.spec.on_policy else config.batch_size
    small = plan._replace(config=dataclasses.replace(config, batch_size=rows, use_compile="off"))
    ways = {f"torch on {_threads_text(count)}": _with(small, "off", config.use_amp, count) for count in (1, threads)}
    try:
        costs, _ = measured(ways, model)
    except Exception as error:  # for example: a policy of the user cannot be built a second time
        return plan.after("torch_threads", threads, f"one per core; not tried out: {type(error).__name__}")
    one, several = costs.values()
    chosen = threads if one > MUST_GAIN * several else 1
    set_threads(chosen)
    return plan.after("torch_threads", chosen, _costs_text(costs))


def _threads_text(threads: int | str) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _costs_text(costs: Costs) -> str:
    figures = ", ".join(f"{name} {cost:,.0f} ms" for name, cost in costs.items())
    return f"{MEASURED}: {figures} per 1,000 env steps"


def _is_open(plan: RunSpec, model: Fast) -> bool:
    """Whether measurements decide between kernels and torch, and kernels support the policy."""
    config = plan.config
    asked = {flag: plan.row(flag).requested for flag in ("fused_update", "use_amp")}
    wide = plan.row("use_amp").effective != "off" and asked["use_amp"] == "auto"
    return (
        asked["fused_update"] == "auto"
        and not switch_step(plan)  # set in a rerun, which must change to kernels where the run did
        and (config.fused_update == "on" or wide)
        and not (config.deterministic or config.algo.spec.recurrent or config.algo.entry_point)
        and model.device.type == "cpu"
        and model.unsupported_reason() is None
    )


def ways_of(plan: RunSpec, model: Fast) -> dict[str, RunSpec]:
    """The plans to try, by name: kernels; torch with each number of threads, without and with mixed precision."""
    threads, amp = _threads(plan, model), plan.config.use_amp
    ways = {KERNELS: _with(plan, "on", "off", 1)}
    for count in threads:
        on = "" if len(threads) == 1 else f" on {_threads_text(count)}"
        ways[f"torch{on}"] = _with(plan, "off", "off", count)
        if amp != "off":
            ways[f"torch in {amp}{on}"] = _with(plan, "off", amp, count)
    return ways


def _threads(plan: RunSpec, model: Fast) -> list[Any]:
    """Numbers of torch threads to try. Only 1 if workers need the cores, or if the networks are small."""
    config, asked = plan.config, plan.row("torch_threads").requested
    if asked != "auto":
        return [asked]
    wide = max(max(parameter.shape[:1], default=0) for parameter in model.policy.parameters()) > 128
    free = wide and config.vec_env != "subproc" and config.schedule == "lockstep"
    return sorted({1, min(usable_cores(), MAX_TORCH_THREADS) if free else 1})


def _with(plan: RunSpec, fused_update: str, use_amp: str, threads: Any) -> RunSpec:
    changes = {"fused_update": fused_update, "use_amp": use_amp, "torch_threads": threads}
    return plan._replace(config=dataclasses.replace(plan.config, **changes))


def _with_fastest(plan: RunSpec, ways: Mapping[str, RunSpec], costs: Costs) -> RunSpec:
    def weighed(name: str) -> float:
        return costs[name] * (1.0 if ways[name].config.torch_threads == 1 else MUST_GAIN)

    config, reason = ways[min(costs, key=weighed)].config, _costs_text(costs)
    plan = plan.after("use_amp", config.use_amp, reason) if config.use_amp != plan.config.use_amp else plan
    if config.fused_update == "on":
        return plan.after("fused_update", "on", reason)
    set_threads(config.torch_threads)
    plan = plan.after("torch_threads", config.torch_threads, reason)
    return plan.after("fused_update", "off", f"{reason}; {ADAM}")


def expected_s(config: Config, model: Fast) -> float:
    """Estimated seconds that torch would take for all updates of the run."""
    size = sum(parameter.numel() for parameter in model.policy.parameters())
    updates = config.total_timesteps / config.num_envs * updates_per_step(model)
    return float(updates * (UPDATE_S + 6 * size * (config.batch_size or 0) / FLOPS))


def _name(plan: RunSpec, model: Any, ways: Mapping[str, RunSpec], density: Density) -> str:
    """Name of the file with the costs: a hash of everything that the costs depend on."""
    config, space = plan.config, model.action_space
    files = [call.file for call in learner_calls(ways[KERNELS].config)]  # named by processor, versions and code
    shapes = {name: list(parameter.shape) for name, parameter in model.policy.named_parameters()}
    of_run = [config.algo.name, config.num_envs, config.batch_size, updates_per_step(model), str(space)]
    tenths = [round(10 * share) for share in density]
    facts = [files, torch.__version__, usable_cores(), shapes, of_run, tenths, list(ways), slots_of(model.env).masked]
    return f"calibration-{hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]}"


def _stored_costs(name: str, ways: Mapping[str, RunSpec]) -> Costs | None:
    """The stored costs of all candidates; None if a candidate is missing or the file cannot be read."""
    try:
        costs = json.loads(recall(name + VERSION) or b"")
        return {way: float(costs[way]) for way in ways}
    except (ValueError, KeyError, TypeError):
        return None


def updates_per_step(model: Any) -> float:
    if isinstance(model, OffPolicyAlgorithm):
        if model.gradient_steps < 0:  # a gradient step per transition
            return float(model.n_envs)
        # `train_freq` is a number or a pair until training begins. Episodes are counted as if they were steps.
        frequency: Any = model.train_freq
        count = frequency[0] if isinstance(frequency, tuple) else frequency
        return float(model.gradient_steps / max(1, count))
    return float(model.n_epochs * math.ceil(model.n_steps * model.n_envs / (model.batch_size or 1)) / model.n_steps)


def measured(ways: Mapping[str, RunSpec], model: BaseAlgorithm, density: Density = (1.0, 1.0)) -> tuple[Costs, bool]:
    """Measure all candidates alternately for a few seconds. The cost of a candidate is its shortest time.

    Returns the costs, and whether they may be stored: each candidate was measured twice or more, and its two shortest
    times are close. Random state and torch's threads are restored.
    """
    threads = torch.get_num_threads()
    try:
        with own_random_state(0):
            times = _times(ways, {name: _turn(way, model, density) for name, way in ways.items()})
    finally:
        set_threads(threads)
    steady = all(len(took := times.get(name, [])) > 1 and took[1] <= STEADY * took[0] for name in ways)
    return {name: took[0] for name, took in times.items()}, steady


def _times(ways: Mapping[str, RunSpec], turns: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Name of a candidate → its measured times, the shortest first."""
    begun, times = time.perf_counter(), dict[str, list[float]]()
    for number in range(MOST_TURNS):
        least = min((took[0] for took in times.values()), default=0.0)
        close = [name for name in ways if number < LEAST_TURNS or times[name][0] < CLEAR * least]
        for name in close if len(close) > 1 else ():
            if len(times) > 1 and time.perf_counter() - begun > MOST_S:
                return times
            set_threads(ways[name].config.torch_threads)
            times[name] = sorted([*times.get(name, ()), round(turns[name](), 3)])
    return times


def _turn(way: RunSpec, model: Any, density: Density) -> Callable[[], float]:
    """Build a small model for a candidate. Each call of the returned function trains the model and returns its cost."""
    config, clock = way.config, PhaseClock()
    config = own_config(config, [*config.policies][-1]) if config.policies else config  # only the last policy is tried
    algo, num_envs = config.algo, config.num_envs
    on_policy = algo.spec.on_policy
    size = config.batch_size or algo.rollout_size
    rows = num_envs * (-(-size // num_envs) if on_policy else STEPS)
    of_algo: dict[str, Any] = (
        {"rollout_size": rows, "n_steps": None, "n_epochs": 1} if on_policy else {"buffer_size": 8 * rows, "her": "off"}
    )
    if algo.spec.stretches:
        of_algo["exploration_fraction"] = 1e-9
    own = {name: value for name, value in of_algo.items() if hasattr(algo, name)}
    small: dict[str, Any] = {"schedule": "lockstep", "prefetch": "off", "warmup_steps": num_envs}
    spaces, masked = copy.deepcopy((model.observation_space, model.action_space)), slots_of(model.env).masked
    env = DummyVecEnv([lambda: _Blank(*spaces, masked, density)] * num_envs)
    trial: Any = build_algorithm(
        dataclasses.replace(config, algo=dataclasses.replace(algo, **own), **small), env, clock
    )
    trial.set_logger(Logger(None, []))
    watching = None if isinstance(trial, Fast) else StockPhases(clock)
    if isinstance(trial, Fast):
        trial.use_engine(engine_settings(way))

    def play() -> float:
        clock.reset()
        trial.learn(rows, watching, log_interval=None, reset_num_timesteps=not trial.num_timesteps)
        took_ns = clock.snapshot()  # the envs' own time is left out: it is the same for all candidates
        updating_ns = sum(took_ns[phase] for phase in UPDATE_PHASES) * getattr(algo, "n_epochs", 1)
        return (took_ns["action"] + updating_ns) / 1e3 / rows

    return play


class _Blank(gym.Env[Any, Any]):
    """An env of random observations and masks with the shares in `density`. Its episodes have 64 steps."""

    def __init__(self, observation_space: Any, action_space: Any, masked: bool, density: Density) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        space = observation_space
        space.seed(0)
        random, (seen, legal) = np.random.default_rng(0), density
        thinned = lambda part: (part * (random.random(part.shape) < seen)).astype(part.dtype)  # noqa: E731
        self._shown = [each_array(thinned, space.sample()) if seen < 1.0 else space.sample() for _ in range(16)]
        self._steps = 0
        if masked:
            masks = random.random((16, sum(action_dims(action_space)))) < legal
            masks[:, np.cumsum(action_dims(action_space)) - 1] = True
            self.action_masks = lambda: masks[self._steps % 16]

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._shown[0], {}

    def step(self, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._shown[self._steps % 16], 0.0, self._steps % 64 == 0, False, {}
