"""Measures the parts of a run for `fasttrain doctor`: it builds the run, trains for a moment, then times each part.

The run's clock gives the seconds per env step of collecting (envs, choosing actions, storing), of updating, and of the
whole training with logging. They are measured in windows of some tenths of a second. The windows of all parts and
configurations take turns, so that a machine that slows down slows all windows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from fasttrain.accelerators.compiled import untouched
from fasttrain.buffers.prefetch import Direct
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.stock import StockPhases, is_stock
from fasttrain.runs.calibration import updates_per_step
from fasttrain.runs.callbacks import callbacks_of
from fasttrain.runs.engine import set_threads
from fasttrain.runs.folders import DOCTOR_LOG
from fasttrain.runs.train import build
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.groups import StopConfig
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.stepping import WAITS_BELOW
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_studies.limits import Flow, Rates
from fasttrain_studies.statistics import interquartile_mean

FILLED = 20_000  # transitions in a replay buffer before updates are timed: more than the CPU cache holds
BUFFER = 50_000  # largest replay buffer, in transitions, because two configurations are in memory
WARMUP = 1_000
ROUNDS = 12  # short windows of each part, so that other programs disturb all parts alike; the first is not used
LEAST_ROUNDS, SLACK = 2, 1.5  # from round 3 on, a part is skipped after 1.5 times its `seconds`
Window = dict[str, float]  # part → seconds per env step
Samples = dict[str, list[float]]  # part → seconds per env step of each window


class IterationTimer(BaseCallback):
    """The last callback. It measures whole iterations, from the start of one rollout to the start of a later rollout,
    then stops the training. Work of `learn` before the first rollout and after the last rollout is not measured.
    """

    def __init__(self, seconds: float, clock: PhaseClock) -> None:
        super().__init__()
        self._wanted_s, self._clock = seconds, clock
        self._first: tuple[float, int, int] | None = None
        self.seconds, self.logging_s, self.steps = 0.0, 0.0, 0
        self.done = False

    def _on_rollout_start(self) -> None:
        now, steps, logging_ns = time.perf_counter(), self.model.num_timesteps, self._clock.snapshot()["log"]
        if self._first is None:
            self._first = now, steps, logging_ns
            return
        self.seconds, self.steps = now - self._first[0], steps - self._first[1]
        self.logging_s = (logging_ns - self._first[2]) / 1e9
        self.done = self.seconds >= self._wanted_s

    def _on_step(self) -> bool:
        return not self.done


def steady(config: Config) -> Config:
    """The configuration in the middle of training: after warm-up and exploration, and without rules that stop it."""
    changes: dict[str, Any] = {
        "stop": StopConfig(), "eval_every": 0, "checkpoint_every": 0, "live": "off",
        "report": False, "warmup_steps": min(config.warmup_steps, WARMUP),
    }  # fmt: skip
    if (algo := config.algo).spec.off_policy:
        of_algo: dict[str, Any] = {"buffer_size": min(algo.buffer_size, max(BUFFER, config.num_envs))}
        if hasattr(algo, "exploration_final_eps"):
            of_algo["exploration_initial_eps"] = algo.exploration_final_eps
        changes["algo"] = dataclasses.replace(algo, **of_algo)
    return dataclasses.replace(config, **changes)


class Rig:
    """A built run whose parts can be measured.

    Args:
        plan: the run's plan, whose configuration is changed by `steady`.
        folder: a new folder for the run's files and output (`said.txt`).
    """

    def __init__(self, plan: RunSpec, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._said = (folder / DOCTOR_LOG).open("w", encoding="utf-8")
        plan = plan._replace(config=steady(plan.config))
        with contextlib.redirect_stdout(self._said):  # loggers keep the stdout that is set when they are built
            self.run = build(plan, folder, Console(file=self._said, width=140))
        self.config: Config = self.run.plan.config
        model: Any = self.run.model
        self.model, self.stock = model, is_stock(model)
        self.off_policy, self.num_envs = self.config.algo.spec.off_policy, self.config.num_envs
        stepping = self.run.env if self.stock else model.collector.source_of(model.env)
        self.shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None  # None without worker processes
        self.games = stepping if isinstance(stepping, ExternalVecEnv) else None
        self.threads = torch.get_num_threads()
        self._callbacks = callbacks_of(self.run, users=False)
        self._begun = False
        self.slow_update = False  # True if one update takes longer than a window

    def close(self) -> None:
        self.model.logger.close()
        self.run.env.close()
        self._said.close()

    def train(self, seconds: float) -> Window:
        """Train for about `seconds` and at least one iteration; measures the training and its logging."""
        timer = IterationTimer(seconds, self.run.clock)
        more: dict[str, Any] = {"log_interval": None, "reset_num_timesteps": not self._begun}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rollout = getattr(self.model, "n_steps", 1) * self.num_envs
            enough = max(self.config.total_timesteps, 4 * rollout)  # `timer` needs the starts of two rollouts
            self.model.learn(enough, [*self._callbacks, timer], **more)
        self._begun = True
        steps = max(1, timer.steps)
        return {"train": timer.seconds / steps, "logging": timer.logging_s / steps}

    def warm_up(self, seconds: float) -> float | None:
        """Train for at most about `seconds`, so that kernels are compiled and the replay buffer is filled.

        Returns seconds per env step if a single iteration took longer than `seconds`, to be used as a measurement.
        """
        until = time.perf_counter() + seconds
        step_s = self.train(min(0.2, seconds / 4))["train"]
        slow = time.perf_counter() > until
        self.slow_update = slow and getattr(self.model, "target_kl", None) is None
        if self.off_policy:
            model, wanted = self.model, min(FILLED, self.config.algo.buffer_size, self.config.total_timesteps)
            starts, model.learning_starts = model.learning_starts, 2**62  # no updates in this loop
            try:
                while model.replay_buffer.size() * self.num_envs < wanted and time.perf_counter() < until:
                    self.train(seconds / 10)
            finally:
                model.learning_starts = starts
        return step_s if slow else None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Callable[[], None]]:
        """Yields a function that collects a rollout (DQN: a vector step) in lockstep. `num_timesteps` is restored.
        Games with external engines do not step in lockstep: each goes at its own pace, as in training.
        """
        model, clock = self.model, self.run.clock
        callback = CallbackList([StockPhases(clock)] if self.stock else [])
        callback.init_callback(model)
        steps = model.num_timesteps
        schedule = None if self.stock or self.games else model.collector.schedule

        def collect() -> None:
            if self.off_policy:
                more = {"learning_starts": 0, "log_interval": None}
                model.collect_rollouts(model.env, callback, model.train_freq, model.replay_buffer, **more)
            else:
                model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=model.n_steps)

        if schedule is not None:
            model.collector.schedule = "lockstep"
        try:
            yield collect
        finally:
            callback.on_training_end()
            model.num_timesteps = steps
            if schedule is not None:
                model.collector.schedule = schedule

    def engines(self, seconds: float) -> tuple[str, list[str]] | None:
        """The bottleneck of games with external engines during training, and overrides to try. None without engines."""
        if self.games is None:
            return None
        self.train(0.0)  # so that the pause before this call is not measured as waiting for the games
        return self.games.limits(lambda: self.train(seconds))

    def flow(self, facts: EnvFacts, machine: Machine) -> Flow:
        shared = self.shared
        groups = shared is not None and self.config.schedule != "lockstep"
        # On a busy machine the measured share contains waiting for a core. Therefore short waits are ignored.
        computing = facts.cpu_share if facts.cpu_share < WAITS_BELOW else 1.0
        env_cores = 1.0 if shared is None else min(machine.cores, shared.num_workers) * computing
        return Flow(groups, machine.cores, env_cores)


def collect_window(rig: Rig, seconds: float) -> Window:
    """Measure collecting in lockstep: stepping the envs and reading masks, choosing actions, storing.

    With workers and schedule=first_ready, `env` has the workers' mean time in place of the slowest worker's time.
    """
    model, clock, shared = rig.model, rig.run.clock, rig.shared
    times = shared.times_ns() if shared else {}
    with rig.collecting() as collect:
        before, begun = clock.snapshot(), model.num_timesteps
        until = time.perf_counter() + seconds
        while model.num_timesteps == begun or time.perf_counter() < until:
            collect()
        clock.enter("other")
        after, env_steps = clock.snapshot(), model.num_timesteps - begun
    phases = {"env": "env_step", "policy": "action", "storing": "buffer"}
    found = {part: (after[phase] - before[phase]) / 1e9 / env_steps for part, phase in phases.items()}
    if shared is None:
        return found
    spent = {name: (count - times[name]) / 1e9 / env_steps for name, count in shared.times_ns().items()}
    transport = max(0.0, found["env"] - spent["slowest"])
    if rig.config.schedule != "lockstep":
        return {**found, "env": transport + spent["envs"] / shared.num_workers}
    return {**found, "transport": transport}


def update_window(rig: Rig, seconds: float) -> Window:
    """Measure updates on the collected data. PPO begins with the same weights each time. A `train_freq` in episodes
    is read as the same number of steps.
    """
    if not rig.off_policy and not rig.model.rollout_buffer.full:
        with rig.collecting() as collect:
            collect()
    spent, calls, until = 0.0, 0, time.perf_counter() + seconds
    while not calls or time.perf_counter() < until:
        spent += _dqn_updates(rig) if rig.off_policy else _ppo_update(rig, seconds)
        calls += 1
    per_call = _round(rig)[1] if rig.off_policy else rig.model.n_steps * rig.num_envs
    return {"update": spent / calls / per_call}


def _round(rig: Rig) -> tuple[int, float]:
    """Gradient updates per call of `train` in DQN, and transitions that are collected for these updates."""
    updates = max(1, rig.model.gradient_steps)
    return updates, updates * rig.num_envs / updates_per_step(rig.model)


def _dqn_updates(rig: Rig) -> float:
    begun = time.perf_counter()
    rig.model.train(gradient_steps=_round(rig)[0], batch_size=rig.model.batch_size)
    return time.perf_counter() - begun


def _ppo_update(rig: Rig, seconds: float) -> float:
    """Seconds of one PPO update of all policies. If it takes longer than `seconds`, later calls time one epoch and
    multiply it."""
    with untouched(rig.model.policy):
        took = sum(_one_update(rig, model) for model in getattr(rig.model, "members", {"": rig.model}).values())
    rig.slow_update = took > seconds and rig.model.target_kl is None
    return took


def _one_update(rig: Rig, model: Any) -> float:
    epochs = model.n_epochs
    try:
        model.n_epochs = 1 if rig.slow_update else epochs
        begun = time.perf_counter()
        if rig.stock:
            model.train()
        elif len(model.rollout_buffer.storage.rows):  # empty if this policy made no decision
            model.update()
        return (time.perf_counter() - begun) * epochs / model.n_epochs  # type: ignore[no-any-return]
    finally:
        model.n_epochs = epochs


def replay_window(rig: Rig, seconds: float) -> Window:
    """Measure how long the training thread draws an iteration's batches from the replay buffer."""
    model, calls, until = rig.model, 0, time.perf_counter() + seconds
    storage, size, (updates, transitions) = model.replay_buffer, model.batch_size, _round(rig)
    normalizer = model.get_vec_normalize_env()
    in_blocks = not rig.stock and model.engine_now().kind == "kernels"
    begun = time.perf_counter()
    while not calls or time.perf_counter() < until:
        if in_blocks:
            Direct().block(storage, updates, size)
        elif rig.stock:
            for _ in range(updates):
                storage.sample(size, env=normalizer)
        else:
            list(Direct().batches(storage, updates, size, normalizer))
        calls += 1
    return {"replay": (time.perf_counter() - begun) / calls / transitions}


WINDOWS: dict[str, Callable[[Rig, float], Window]] = {
    "collect": collect_window,
    "update": update_window,
    "replay": replay_window,
    "train": Rig.train,
}
OF_WINDOW = {"env": "collect", "transport": "collect", "policy": "collect", "storing": "collect", "logging": "train"}
WITH = {"env": "transport", "policy": "storing"}  # part → the second part that the same window measures


def windows_of(rig: Rig, wanted: Sequence[str]) -> list[str]:
    """Names of the windows that measure the parts `wanted`, if the run has them."""
    names = dict.fromkeys(OF_WINDOW.get(part, part) for part in wanted)
    return [name for name in names if name != "replay" or rig.off_policy]


def measure(
    rigs: Mapping[str, Rig],
    names: Sequence[str],
    seconds: float,
    samples: Mapping[str, Samples],
    tell: Callable[[str], None] = lambda _: None,
    rounds: int = ROUNDS,
) -> None:
    """Run the windows in rounds. A round has one window for each part and configuration.

    Args:
        seconds: time for each part and configuration, all rounds together.
        samples: configuration → part → measured values. New values are added here, so that they are kept if the
            measurement is interrupted. Short windows of the first round are not stored.
        tell: is called with the name of the next window.
    """
    spent = dict.fromkeys(((name, key) for name in names for key in rigs), 0.0)
    for turn in range(rounds):
        for name in names:
            for key, rig in rigs.items():
                if turn >= LEAST_ROUNDS and spent[name, key] > SLACK * seconds:
                    continue
                tell(f"{name} {turn + 1}/{rounds}")
                set_threads(rig.threads)  # another run in this process may have changed the number
                begun = time.perf_counter()
                found = WINDOWS[name](rig, seconds / rounds)
                took = time.perf_counter() - begun
                spent[name, key] += took
                if turn or took > seconds / 2:  # the first round is not stored, unless windows are long
                    for part, value in found.items():
                        samples[key].setdefault(part, []).append(value)


def typical(values: Sequence[float]) -> float:
    """The lower quartile of the values, because other programs can only add time.

    On two busy cores the phases' times differed in sum from the time of training by 40 % with medians, 10 % with these.
    """
    return float(np.quantile(values, 0.25))


def rates_of(samples: Samples) -> Rates:
    """The typical value of each part. Logging: mean of the middle half, because only some windows log."""
    found = {part: typical(values) for part, values in samples.items() if part in Rates._fields}
    if "logging" in samples:
        found["logging"] = float(interquartile_mean(np.array(samples["logging"])))
    return Rates(**found)


def ratios_of(changed: Samples, base: Samples) -> dict[str, float]:
    """Typical time after the change ÷ before it, for the parts that both have."""
    both = [part for part in changed if part in base and typical(base[part]) > 0]
    return {part: typical(changed[part]) / typical(base[part]) for part in both}
