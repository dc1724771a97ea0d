"""Compiled kernels or PyTorch, and on how many threads: measured on this machine, for the networks of this run.

Small models of each kind act and learn for a moment on random numbers, with the run's spaces, layers, minibatches and
envs; the faster one has the run. For `fused_update=auto` the result is stored beside the compiled kernels, for this
processor, these versions and this shape, so that it is measured once. `torch_threads=auto` of networks that torch
computes compares one thread with one per core: a rule by size was wrong by half for convolutions, and no rule knows how
busy the machine is.
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

from fasttrain.algos.fast import Fast
from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import each_array
from fasttrain.kernel_cache import recall, remember
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
from fasttrain.vec.base import slots_of

PAYS_FROM_S = 30.0  # of updates in the whole run: below, the rule decides
MOST_S, MOST_TURNS, LEAST_TURNS = 3.0, 10, 2  # of measuring
CLEAR = 1.5  # what takes so many times as long as the best gets no more turns
STEADY = 1.15  # ratio of the two best turns, up to which nothing else at work disturbed them
STEPS = 8  # vector steps of a turn with replay
MUST_GAIN = 1.1  # more threads than one must be so many times as fast: one leaves the other cores alone
MOST_ROWS = 128  # of a minibatch where only threads are compared: more take longer and tell no more
UPDATE_S, FLOPS = 7e-4, 4e10  # about what torch takes per update besides computing; floating point operations a second

KERNELS = "kernels"
VERSION = ".3.nbc"  # of what is kept

Density = tuple[float, float]
Costs = Mapping[str, float]  # milliseconds of acting and learning per 1,000 env steps, by `ways`


def calibrated(
    plan: RunSpec, model: BaseAlgorithm, console: Console, density: Density = (1.0, 1.0), begun: bool = False
) -> RunSpec:
    """The plan with the faster of kernels and torch where the plan left that open; for torch, with its threads too.
    `deterministic=true` keeps the rule's choice and a resumed run its stored one, because a measurement may differ the
    next time.

    Args:
        density: as in `EnvFacts`: kernels skip inputs that are 0 and actions that are illegal.
        begun: the run began on torch, and its kernels are compiled now.
    """
    if not isinstance(model, Fast) or not _is_open(plan, model):
        return plan
    ways = ways_of(plan, model)
    calls = learner_calls(ways[KERNELS].config)
    waits = begun or switch_step(plan) == 0  # else they are compiled beside training
    if not (waits or all(call.is_kept for call in calls)):
        return plan
    name = _name(plan, model, ways, density)
    costs = _recalled(name, ways)
    if costs is None:
        if not begun and expected_s(plan.config, model) < PAYS_FROM_S:
            return plan
        try:
            if begun:
                say(console, f"trying compiled kernels against PyTorch, about {MOST_S:.0f} s")
            else:
                compile_shown(calls, console)
            costs, steady = measured(ways, model, density)
        except Exception as error:  # a policy or an extractor of the user's that cannot be there twice
            reason = f"{plan.row('fused_update').reason}; not measured: {type(error).__name__}"
            return plan.after("fused_update", plan.config.fused_update, reason)
        if steady:
            remember(name, VERSION, json.dumps(costs).encode())
    return _decided(plan, ways, costs)


def chosen_at_switch(plan: RunSpec, model: Fast, console: Console, density: Density) -> tuple[RunSpec, str]:
    """The plan once the kernels are compiled beside training; why torch stays, if it does, which is at work then."""
    plan = calibrated(plan, model, console, density, begun=True)
    if plan.config.fused_update == "on":
        return plan, ""
    model.use_engine(engine_settings(plan))
    return plan, plan.row("fused_update").reason


def settle_threads(plan: RunSpec, model: BaseAlgorithm) -> RunSpec:
    """Set torch's threads to what was fastest, where the plan left that open and nothing must be deterministic."""
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
    ways = {f"torch on {_counted(count)}": _with(small, "off", config.use_amp, count) for count in (1, threads)}
    try:
        costs, _ = measured(ways, model)
    except Exception as error:  # a policy of the user's that cannot be there twice, or is called otherwise
        return plan.after("torch_threads", threads, f"one per core; not tried out: {type(error).__name__}")
    one, several = costs.values()
    chosen = threads if one > MUST_GAIN * several else 1
    set_threads(chosen)
    return plan.after("torch_threads", chosen, _told(costs))


def _counted(threads: int | str) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _told(costs: Costs) -> str:
    figures = ", ".join(f"{name} {cost:,.0f} ms" for name, cost in costs.items())
    return f"{MEASURED}: {figures} per 1,000 env steps"


def _is_open(plan: RunSpec, model: Fast) -> bool:
    """Whether it is for us to decide, and kernels could do it."""
    config = plan.config
    asked = {flag: plan.row(flag).requested for flag in ("fused_update", "use_amp")}
    wide = plan.row("use_amp").effective != "off" and asked["use_amp"] == "auto"
    return (
        asked["fused_update"] == "auto"
        and not switch_step(plan)  # a run is repeated that switched in its middle
        and (config.fused_update == "on" or wide)
        and not (config.deterministic or config.algo.spec.recurrent or config.algo.entry_point)
        and model.device.type == "cpu"
        and model.unsupported_reason() is None
    )


def ways_of(plan: RunSpec, model: Fast) -> dict[str, RunSpec]:
    """The plans among which to choose: kernels, and torch with each number of threads that may be."""
    threads, amp = _threads(plan, model), plan.config.use_amp
    ways = {KERNELS: _with(plan, "on", "off", 1)}
    for count in threads:
        on = "" if len(threads) == 1 else f" on {_counted(count)}"
        ways[f"torch{on}"] = _with(plan, "off", "off", count)
        if amp != "off":
            ways[f"torch in {amp}{on}"] = _with(plan, "off", amp, count)
    return ways


def _threads(plan: RunSpec, model: Fast) -> list[Any]:
    """Of torch: as asked for, or one and as many as there are cores; one where workers need them, or for small nets."""
    config, asked = plan.config, plan.row("torch_threads").requested
    if asked != "auto":
        return [asked]
    wide = max(max(parameter.shape[:1], default=0) for parameter in model.policy.parameters()) > 128
    free = wide and config.vec_env != "subproc" and config.schedule != "first_ready"
    return sorted({1, min(usable_cores(), MAX_TORCH_THREADS) if free else 1})


def _with(plan: RunSpec, fused_update: str, use_amp: str, threads: Any) -> RunSpec:
    changes = {"fused_update": fused_update, "use_amp": use_amp, "torch_threads": threads}
    return plan._replace(config=dataclasses.replace(plan.config, **changes))


def _decided(plan: RunSpec, ways: Mapping[str, RunSpec], costs: Costs) -> RunSpec:
    def weighed(name: str) -> float:
        return costs[name] * (1.0 if ways[name].config.torch_threads == 1 else MUST_GAIN)

    config, told = ways[min(costs, key=weighed)].config, _told(costs)
    plan = plan.after("use_amp", config.use_amp, told) if config.use_amp != plan.config.use_amp else plan
    if config.fused_update == "on":
        return plan.after("fused_update", "on", told)
    set_threads(config.torch_threads)
    plan = plan.after("torch_threads", config.torch_threads, told)
    return plan.after("fused_update", "off", f"{told}; {ADAM}")


def expected_s(config: Config, model: Fast) -> float:
    """About what torch would take to update in the whole run."""
    size = sum(parameter.numel() for parameter in model.policy.parameters())
    updates = config.total_timesteps / config.num_envs * updates_per_step(model)
    return float(updates * (UPDATE_S + 6 * size * (config.batch_size or 0) / FLOPS))


def _name(plan: RunSpec, model: Any, ways: Mapping[str, RunSpec], density: Density) -> str:
    """Of the file: all that the costs depend on."""
    config, space = plan.config, model.action_space
    files = [call.file for call in learner_calls(ways[KERNELS].config)]  # processor, versions and code
    shapes = {name: list(parameter.shape) for name, parameter in model.policy.named_parameters()}
    of_run = [config.algo.name, config.num_envs, config.batch_size, updates_per_step(model), str(space)]
    tenths = [round(10 * share) for share in density]
    facts = [files, torch.__version__, usable_cores(), shapes, of_run, tenths, list(ways), slots_of(model.env).masked]
    return f"calibration-{hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]}"


def _recalled(name: str, ways: Mapping[str, RunSpec]) -> Costs | None:
    """What was measured before; None where nothing was, or not all of it, or it cannot be read."""
    try:
        costs = json.loads(recall(name + VERSION) or b"")
        return {way: float(costs[way]) for way in ways}
    except (ValueError, KeyError, TypeError):
        return None


def updates_per_step(model: Any) -> float:
    """Gradient updates per vector step."""
    if isinstance(model, OffPolicyAlgorithm):
        if model.gradient_steps < 0:  # one per transition
            return float(model.n_envs)
        frequency: Any = model.train_freq  # a number, or a pair, until training begins; of episodes: as if of steps
        count = frequency[0] if isinstance(frequency, tuple) else frequency
        return float(model.gradient_steps / max(1, count))
    return float(model.n_epochs * math.ceil(model.n_steps * model.n_envs / (model.batch_size or 1)) / model.n_steps)


def measured(ways: Mapping[str, RunSpec], model: BaseAlgorithm, density: Density = (1.0, 1.0)) -> tuple[Costs, bool]:
    """Measure each way in turn for a few seconds and take its best turn; the costs, and whether another run may rely on
    them: every way had its turns, and the two best of each were alike. Random streams and torch's threads stay.
    """
    threads = torch.get_num_threads()
    try:
        with own_random_state(0):
            times = _times(ways, {name: _turn(way, model, density) for name, way in ways.items()})
    finally:
        torch.set_num_threads(threads)
    steady = all(len(took := times.get(name, [])) > 1 and took[1] <= STEADY * took[0] for name in ways)
    return {name: took[0] for name, took in times.items()}, steady


def _times(ways: Mapping[str, RunSpec], turns: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What the turns of each way took, the best first."""
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
    """A small model of the same kind, computed that way, and what it takes at every call."""
    config, clock = way.config, PhaseClock()
    algo, num_envs = config.algo, config.num_envs
    on_policy = algo.spec.on_policy
    size = config.batch_size or algo.rollout_size
    rows = num_envs * (-(-size // num_envs) if on_policy else STEPS)
    of_algo: dict[str, Any] = (
        {"rollout_size": rows, "n_steps": None, "n_epochs": 1} if on_policy else {"buffer_size": 8 * rows}
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
        took_ns = clock.snapshot()  # what the envs' own Python takes is the same either way
        updating_ns = sum(took_ns[phase] for phase in UPDATE_PHASES) * getattr(algo, "n_epochs", 1)
        return (took_ns["action"] + updating_ns) / 1e3 / rows

    return play


class _Blank(gym.Env[Any, Any]):
    """Shows random observations of a space with the zeros and legal actions that were seen; an episode has 64 steps."""

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
