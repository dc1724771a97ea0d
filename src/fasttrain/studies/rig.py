"""A run on the bench: built as training builds it, trained for a moment, then its parts measured one by one.

A part's cost is what the run's own clock says of it, in windows of some tenths of a second, as seconds per env step:
collecting (envs, choosing actions, storing), updating, and training as a whole with its logging. Windows of all parts,
and of configurations that are compared, take turns, so that a machine that slows down slows all of them.
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
from fasttrain.runs.folders import PART
from fasttrain.runs.train import build
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.groups import StopConfig
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.stepping import WAITS_BELOW
from fasttrain.studies.limits import Flow, Rates
from fasttrain.studies.statistics import interquartile_mean
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv

FILLED = 20_000  # transitions in a replay buffer before its updates are timed: more than a cache line of each
BUFFER = 50_000  # at most so large: two configurations are there at once
WARMUP = 1_000
ROUNDS = 12  # the first is not counted; short windows in many rounds, so that what else the machine does hits all alike
LEAST_ROUNDS, SLACK = 2, 1.5  # of parts whose iterations take long: so many windows, or this times what was asked for
Window = dict[str, float]  # part → seconds per env step
Samples = dict[str, list[float]]  # the same, window by window


class Beat(BaseCallback):
    """Stands last among the callbacks: measures whole iterations, from one rollout's start to another's, then stops.

    What `learn` does before the first and after the last belongs to no iteration.
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
    """The configuration in the steady state of its training: nothing stops it, warm-up and exploring are over."""
    changes: dict[str, Any] = {
        "stop": StopConfig(), "eval_every": 0, "checkpoint_every": 0, "live": "off",
        "report": False, "warmup_steps": min(config.warmup_steps, WARMUP),
    }  # fmt: skip
    if (algo := config.algo).spec.off_policy:
        settled: dict[str, Any] = {"buffer_size": min(algo.buffer_size, max(BUFFER, config.num_envs))}
        if hasattr(algo, "exploration_final_eps"):
            settled["exploration_initial_eps"] = algo.exploration_final_eps
        changes["algo"] = dataclasses.replace(algo, **settled)
    return dataclasses.replace(config, **changes)


class Rig:
    """One configuration, built.

    Args:
        plan: the configuration as it is planned; trained in its steady state.
        folder: made anew; what the run writes and says goes there (`said.txt`).
        torch_threads: torch's own number, for a configuration that leaves it alone.
    """

    def __init__(self, plan: RunSpec, folder: Path, torch_threads: int | None = None) -> None:
        folder.mkdir(parents=True)
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self._said = (folder / PART).open("w", encoding="utf-8")
        plan = plan._replace(config=steady(plan.config))
        with contextlib.redirect_stdout(self._said):  # a logger keeps the stream it was made with
            self.run = build(plan, folder, Console(file=self._said, width=140))
        self.config: Config = self.run.plan.config
        model: Any = self.run.model
        self.model, self.stock = model, is_stock(model)
        self.off_policy, self.num_envs = self.config.algo.spec.off_policy, self.config.num_envs
        stepping = self.run.env if self.stock else model.collector.source_of(model.env)
        self.shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None  # the workers, where there are any
        self.games = stepping if isinstance(stepping, ExternalVecEnv) else None
        self._threads = torch.get_num_threads()
        self._callbacks = callbacks_of(self.run, users=False)
        self._begun = False
        self.slow_update = False  # one takes longer than a window

    def activate(self) -> None:
        """Restore torch's number of threads, which configurations that are built at the same time share."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def close(self) -> None:
        """End workers; files are flushed."""
        self.model.logger.close()
        self.run.env.close()
        self._said.close()

    def train(self, seconds: float) -> Window:
        """Train for about `seconds`, an iteration at least: the run itself, and what logging takes of it."""
        beat = Beat(seconds, self.run.clock)
        more: dict[str, Any] = {"log_interval": None, "reset_num_timesteps": not self._begun}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rollout = getattr(self.model, "n_steps", 1) * self.num_envs
            enough = max(self.config.total_timesteps, 4 * rollout)  # an iteration ends where the next rollout begins
            self.model.learn(enough, [*self._callbacks, beat], **more)
        self._begun = True
        steps = max(1, beat.steps)
        return {"train": beat.seconds / steps, "logging": beat.logging_s / steps}

    def warm_up(self, seconds: float) -> float | None:
        """Train until everything that is compiled, chosen or filled on the way is so; at most about `seconds`.

        Returns seconds per env step where a single iteration took longer than that: then it was no warm-up alone.
        """
        until = time.perf_counter() + seconds
        step_s = self.train(min(0.2, seconds / 4))["train"]
        slow = time.perf_counter() > until
        if self.off_policy:
            model, wanted = self.model, min(FILLED, self.config.algo.buffer_size, self.config.total_timesteps)
            starts, model.learning_starts = model.learning_starts, 2**62  # it only collects
            try:
                while model.replay_buffer.size() * self.num_envs < wanted and time.perf_counter() < until:
                    self.train(seconds / 10)
            finally:
                model.learning_starts = starts
        return step_s if slow else None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Callable[[], None]]:
        """Yields what collects a rollout in lockstep, of DQN a vector step; the count of env steps stays as it was.

        Games with engines go each at its own pace, as they train: waiting for the slowest is no part of them.
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
        """What limits the games with engines while it trains, and the overrides that would show it."""
        if self.games is None:
            return None
        self.train(0.0)  # the wait since the last time is none of the games'
        return self.games.limits(lambda: self.train(seconds))

    def flow(self, facts: EnvFacts, machine: Machine) -> Flow:
        """How the run overlaps its parts."""
        shared = self.shared
        groups = shared is not None and self.config.schedule == "first_ready"
        # A probe on a busy machine takes waiting for a core for waiting: only envs that mostly wait leave cores free.
        computing = facts.cpu_share if facts.cpu_share < WAITS_BELOW else 1.0
        env_cores = 1.0 if shared is None else min(machine.cores, shared.num_workers) * computing
        return Flow(groups, machine.cores, env_cores)


def collect_window(rig: Rig, seconds: float) -> Window:
    """The run collecting in lockstep: stepping the envs with reading their masks, choosing actions, storing.

    Of workers that are served as they are ready (first_ready) the mean one's work counts, else the slowest one's.
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
    if rig.config.schedule == "first_ready":
        return {**found, "env": transport + spent["envs"] / shared.num_workers}
    return {**found, "transport": transport}


def update_window(rig: Rig, seconds: float) -> Window:
    """The run's own `train` on what was collected last. PPO begins with the same weights every time.

    Rounds of episodes count as if of steps.
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
    """Updates of a round, and the transitions before it."""
    updates = max(1, rig.model.gradient_steps)
    return updates, updates * rig.num_envs / updates_per_step(rig.model)


def _dqn_updates(rig: Rig) -> float:
    begun = time.perf_counter()
    rig.model.train(gradient_steps=_round(rig)[0], batch_size=rig.model.batch_size)
    return time.perf_counter() - begun


def _ppo_update(rig: Rig, seconds: float) -> float:
    """One update. Where it takes longer than `seconds`, the next are of one epoch, counted as so many."""
    model, epochs = rig.model, rig.model.n_epochs
    with untouched(model.policy):
        try:
            model.n_epochs = 1 if rig.slow_update else epochs
            begun = time.perf_counter()
            if rig.stock:
                model.train()
            else:
                model.update()
            took: float = (time.perf_counter() - begun) * epochs / model.n_epochs
            rig.slow_update = took > seconds and model.target_kl is None
            return took
        finally:
            model.n_epochs = epochs


def replay_window(rig: Rig, seconds: float) -> Window:
    """Drawing an iteration's batches from the replay buffer, in the trainer."""
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
WITH = {"env": "transport", "policy": "storing"}  # what is told with a part


def windows_of(rig: Rig, wanted: Sequence[str]) -> list[str]:
    """Names of the windows that measure the parts `wanted`, of those that exist for this run."""
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
    """Run windows in turn: round by round, part by part, configuration by configuration.

    Args:
        seconds: per part and configuration, all rounds together.
        samples: configuration → part → what was measured; added to, so that an interrupted measurement leaves what it
            has. The first round is not in it.
        tell: is told what comes next.
    """
    spent = dict.fromkeys(((name, key) for name in names for key in rigs), 0.0)
    for turn in range(rounds):
        for name in names:
            for key, rig in rigs.items():
                if turn >= LEAST_ROUNDS and spent[name, key] > SLACK * seconds:
                    continue
                tell(f"{name} {turn + 1}/{rounds}")
                rig.activate()
                begun = time.perf_counter()
                found = WINDOWS[name](rig, seconds / rounds)
                took = time.perf_counter() - begun
                spent[name, key] += took
                if turn or took > seconds / 2:  # what took so long has warmed up on the way
                    for part, value in found.items():
                        samples[key].setdefault(part, []).append(value)


def typical(values: Sequence[float]) -> float:
    """The lower quartile: what else the machine does can only add time.

    On two cores at load 10 the medians of five parts and of the whole drifted apart by up to 40 %, these by 10 %.
    """
    return float(np.quantile(values, 0.25))


def rates_of(samples: Samples) -> Rates:
    """Typical windows; of logging the middle half's mean, whose lines fall due in some of them only."""
    found = {part: typical(values) for part, values in samples.items() if part in Rates._fields}
    if "logging" in samples:
        found["logging"] = float(interquartile_mean(np.array(samples["logging"])))
    return Rates(**found)


def ratios_of(changed: Samples, base: Samples) -> dict[str, float]:
    """Typical changed ÷ typical base, of the parts that both have."""
    both = [part for part in changed if part in base and typical(base[part]) > 0]
    return {part: typical(changed[part]) / typical(base[part]) for part in both}
