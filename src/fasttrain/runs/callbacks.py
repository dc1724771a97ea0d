"""One SB3 callback that joins a run's parts to `learn()`: counters, episodes, live view, [PERF], evaluation, stop."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from fasttrain.algos.fast import Collector, Fast
from fasttrain.buffers.prefetch import Prefetching
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.engines.guard import check_step
from fasttrain.machine import process_age_s
from fasttrain.perf.stock import optimizers_of
from fasttrain.perf.windows import PerfMeter
from fasttrain.runs.loggers import UsersCallbacks
from fasttrain.runs.logs import EpisodeLog
from fasttrain.runs.progress import Progress, QualityKeys
from fasttrain.runs.stopping import Stop, Stopping
from fasttrain.runs.view import LiveView
from fasttrain.saving.files import Saving
from fasttrain.saving.rests import Checkpoints
from fasttrain.spec.config import Config

ONE_S = 0.5


HANG_UP = getattr(signal, "SIGHUP", None)  # a terminal that closes


class StopFlag:
    """Set by SIGINT, SIGTERM, or a terminal that closes (unless under nohup).

    The run then ends after the current update (`Checkpoints`). A second signal kills; one that comes within
    `ONE_S` is the first once more: a signal to the whole group reaches a study and its cell, and the study passes it
    on.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Handle the signals inside the block; only the main thread may, elsewhere nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if HANG_UP is not None and signal.getsignal(HANG_UP) is signal.SIG_DFL:
            numbers.append(HANG_UP)
        previous = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == HANG_UP:
            silence_terminals()
        if not self.requested:
            self.requested, self._since = True, now
        elif now - self._since > ONE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def silence_terminals() -> None:
    """What goes to a terminal goes nowhere from now on: one that has closed makes every line an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # `isatty` says no of one that has closed
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class Interval:
    """Says when a counter has passed the next multiple of `every` (0 = never)."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._next = every

    def due(self, count: int) -> bool:
        if not self.every or count < self._next:
            return False
        self._next = (count // self.every + 1) * self.every
        return True


@dataclass(slots=True)
class Parts:
    """What the callback serves."""

    progress: Progress
    episodes: EpisodeLog
    live: LiveView
    meter: PerfMeter
    stop: StopFlag
    stopping: Stopping
    evaluate: Callable[[], None]  # called every `eval_every` env steps
    collect_evaluations: Callable[[], None]  # of those beside training, at every rollout's start
    checkpoints: Checkpoints
    change_engine: Callable[[], None]  # at a rollout's start, after the checkpoint
    users: UsersCallbacks
    saving: Saving
    say: Callable[[str], None]


class RunCallback(BaseCallback):
    """Its own time is phase `log`, evaluation and checkpoints have theirs."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.enemy_turn_ms = 0.0  # of Python envs that report info["perf"]["enemy_turn_ms"]
        self._log = Interval(config.log_every)
        self.stopped: Stop | None = None  # before the horizon, by a rule of `stop` or a signal
        self.at_rest = True  # False: stopped within a rollout
        self._evaluate = Interval(config.eval_every)
        self._evaluates_beside = bool(config.eval_every and config.eval_async)
        self._checkpoint = Interval(config.checkpoint_every)
        self._to_console = config.train_log_to_console
        self._enabled = config.train_log_enabled if config.loggers is None else bool(config.loggers)
        self._nan_guard = config.nan_guard
        self._logged_updates = 0
        self._keys = QualityKeys.of(config.env)

    def _on_training_start(self) -> None:
        # Ours count their own updates: a hook on the optimizer would keep the fused kernels away.
        self._ours: Any = self.model if isinstance(self.model, Fast) else None
        self._checks_steps = self._nan_guard and self._ours is None  # a stock class; ours look for themselves
        if self._ours is not None and self._ours.engine.guard is not None:
            self._ours.engine.guard.say = self.parts.say
        self._counts_itself = isinstance(self.model, OffPolicyAlgorithm)
        watched = [] if self._ours is not None or self._counts_itself else optimizers_of(self.model)[:1]
        self._hooks = [optimizer.register_step_post_hook(self._count_update) for optimizer in watched]
        progress = self.parts.progress
        self._updates_before = progress.updates
        self.parts.meter.start(progress.env_steps, progress.updates)
        progress.started = time.perf_counter() - progress.before_s

    def _count_update(self, *_: Any) -> None:
        self.parts.progress.updates += 1

    def _take_updates(self) -> None:
        """How many there were so far. Between updates, so that the first one has just ended."""
        progress = self.parts.progress
        if self._ours is not None:
            progress.updates = self._ours.engine.gradient_updates
        elif self._counts_itself:
            progress.updates = int(self.model._n_updates)
        if progress.first_update_s is None and progress.updates > self._updates_before:
            progress.first_update_s = round(process_age_s(), 3)

    def _on_rollout_start(self) -> None:
        self._take_updates()
        self.parts.progress.mark()
        if self._log.due(self.parts.progress.updates):
            with self.parts.meter.clock.phase("log"):
                self._write_logs()
        self.parts.meter.tick(self.parts.progress.env_steps, self.parts.progress.updates)
        if self._evaluates_beside:
            with self.parts.meter.clock.phase("eval"):
                self.parts.collect_evaluations()
        env_steps = self.model.num_timesteps  # the callback's own is that of the last step it saw
        stopping = self.stopped is not None or self.parts.stop.requested
        self.parts.checkpoints.rest(env_steps, self._checkpoint.due(env_steps), stopping)
        self.parts.change_engine()

    def _write_logs(self) -> None:
        progress = self.parts.progress
        self._logged_updates = progress.updates
        line = self.parts.meter.line(progress.env_steps, progress.updates)
        if self._to_console:
            self.parts.say(line)
        if self._enabled:
            with self.parts.saving.of("progress.csv"):
                _dump_logs(self.model)

    def _on_step(self) -> bool:
        parts = self.parts
        with parts.meter.clock.phase("log"):
            if self._checks_steps:
                seen = self.locals
                check_step(seen["new_obs"], seen["rewards"], (), self.num_timesteps, self.model._vec_normalize_env)
            parts.progress.env_steps = self.num_timesteps
            self._collect_episodes()
            parts.live.tick()
        if self._evaluate.due(self.num_timesteps):
            with parts.meter.clock.phase("eval"):
                parts.evaluate()
        return self._goes_on()

    def _goes_on(self) -> bool:
        """False once there is a reason to stop, said in one line, and nothing to wait for: `Checkpoints.may_stop`.

        Evaluations and checkpoints count as training.
        """
        parts = self.parts
        if self.stopped is None:
            self.stopped = self._reason()
        if self.stopped is None or not parts.checkpoints.may_stop(for_signal=parts.stop.requested):
            return True
        self.at_rest = False
        parts.say(f"stopped at {self.num_timesteps:,} steps: {self.stopped.text.partition(': ')[2]}")
        return False

    def _reason(self) -> Stop | None:
        parts = self.parts
        if parts.stop.requested:
            return Stop("signal", f"stopped at {self.num_timesteps:,} steps: by a signal")
        if parts.users.stopped_by:
            return Stop("callback", f"stopped at {self.num_timesteps:,} steps: by {parts.users.stopped_by}")
        if not parts.stopping.active:
            return None
        with parts.meter.clock.phase("log"):
            wall_s = time.perf_counter() - parts.progress.started
            return parts.stopping.reason(self.num_timesteps, wall_s)

    def _collect_episodes(self) -> None:
        infos: list[dict[str, Any]] = self.locals["infos"]
        if "perf" in infos[0]:  # under lean_info only of envs that have just ended; but then the workers count it
            told = (info["perf"] for info in infos if isinstance(info.get("perf"), Mapping))
            self.enemy_turn_ms += sum(perf.get("enemy_turn_ms", 0.0) for perf in told)
        progress, dones = self.parts.progress, self.locals["dones"]
        for index in np.flatnonzero(dones) if dones.any() else ():
            info = infos[index]
            episode = info.get("episode")
            if episode is None:
                continue
            info = self._keys.read(info)
            progress.add_episode(float(episode["r"]), info)
            if self.parts.stopping.active:
                self.parts.stopping.add(self.num_timesteps, float(episode["r"]))
            wall_s = round(time.perf_counter() - progress.started, 3)
            fixed = (progress.episodes, self.num_timesteps, int(index), episode["r"], episode["l"], wall_s)
            self.parts.episodes.add(fixed, info)

    def _on_training_end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._take_updates()
        if self.at_rest:  # whatever wanted to stop it, the horizon came first
            self.stopped = None
        with self.parts.meter.clock.phase("log"):
            if self.parts.progress.updates > self._logged_updates:  # the last stretch is rarely a whole interval
                self._write_logs()
            self.parts.episodes.flush()


def _dump_logs(model: BaseAlgorithm) -> None:
    """SB3's own table and progress.csv row. Its two families of algorithms differ in the argument."""
    if isinstance(model, OnPolicyAlgorithm):
        model.dump_logs(iteration=0)
    elif isinstance(model, OffPolicyAlgorithm):
        model.dump_logs()


def replay_dict(model: BaseAlgorithm) -> dict[str, Any] | None:
    """Fill and size of the buffer, and how often prefetched batches were ready; None for other algorithms."""
    storage, ours = getattr(model, "replay_buffer", None), getattr(model, "collector", None)
    if not isinstance(ours, Collector) or not isinstance(storage, ReplayStorage):
        return None
    sampler = ours.sampler
    facts: dict[str, Any] = {
        "transitions": storage.size() * storage.n_envs,
        "capacity": storage.buffer_size * storage.n_envs,
        "memory_bytes": storage.memory_bytes,
    }
    if isinstance(sampler, Prefetching):
        facts["prefetch"] = {"hits": sampler.hits, "waits": sampler.waits, "wait_s": sampler.wait_ns / 1e9}
    return facts


def replay_words(model: BaseAlgorithm) -> str:
    """For the [PERF] line: `buffer 34% prefetch_hits 120 prefetch_waits 3`, of the whole run so far."""
    facts = replay_dict(model)
    if facts is None:
        return ""
    words = f"buffer {100 * facts['transitions'] / facts['capacity']:.0f}%"
    if (prefetch := facts.get("prefetch")) is not None:
        words += f" prefetch_hits {prefetch['hits']} prefetch_waits {prefetch['waits']}"
    return words


def replay_line(facts: dict[str, Any]) -> str:
    """One line for the console."""
    size = f"{facts['memory_bytes'] / 1e6:,.0f} MB when full"
    line = f"replay buffer: {facts['transitions']:,} of {facts['capacity']:,} transitions, {size}"
    if (prefetch := facts.get("prefetch")) is not None:
        line += f"; prefetched batches: {prefetch['hits']:,} were ready, {prefetch['waits']:,} were waited for "
        line += f"({prefetch['wait_s']:.1f} s)"
    return line
