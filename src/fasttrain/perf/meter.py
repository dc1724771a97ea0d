"""Cuts a run's counters into [PERF] windows: since the last line, by time (`windows`), and over the whole training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow, perf_line
from fasttrain.perf.utilization import Utilization
from fasttrain.perf.windows import Mark, WindowLog


class _Mark(NamedTuple):
    env_steps: int
    updates: int
    envs: EnvTimes
    phases_ns: dict[str, int]
    background_ns: int


class PerfMeter:
    """Reads the clock and the machine; `lines` keeps every [PERF] line of the run.

    Args:
        env_times: what the envs report of their time so far.
        more: words for the end of a line, `name value name value …`.
    """

    def __init__(
        self, clock: PhaseClock, env_times: Callable[[], EnvTimes], more: Callable[[], str] = lambda: ""
    ) -> None:
        self.clock, self._more = clock, more
        self.lines: list[str] = []
        self._env_times = env_times
        self._recent = Utilization()
        self._overall = Utilization()
        self.start()

    def start(self, env_steps: int = 0, updates: int = 0) -> None:
        """Training begins now, or goes on from these counts: forget what came before."""
        begun = time.perf_counter()
        self._recent.reset()
        self._overall.reset()
        self._cpu_s = self._overall.usage()[0]
        gpu = None if self._overall.gpu_share() is None else 0.0
        now = time.perf_counter()
        self.windows = WindowLog(Mark(env_steps, updates, gpu_busy_ns=gpu), now, cost_s=now - begun)
        self.clock.reset()
        self._begin = _Mark(env_steps, updates, self._env_times(), dict.fromkeys(self.clock.totals_ns, 0), 0)
        self._last = self._begin

    def tick(self, env_steps: int, updates: int) -> None:
        """Where a rollout begins: end a window of `windows` if it is time. 0.1 µs if not; that is phase `log` if so."""
        now = time.perf_counter()
        if self.windows.due(now):
            with self.clock.phase("log"):
                mark = self._window_mark(self._mark(env_steps, updates))
                self.windows.add(mark, now, time.perf_counter() - now)

    def line(self, env_steps: int, updates: int) -> str:
        """The [PERF] line since the last one (or since the start)."""
        now = self._mark(env_steps, updates)
        line = perf_line(self._window(self._last, now, self._recent))
        self.lines.append(f"{line} {self._more()}".rstrip())
        self._last = now
        self._recent.reset()
        return self.lines[-1]

    def overall(self, env_steps: int, updates: int) -> PerfWindow:
        """Everything since `start`, when training has ended; `windows` end there too."""
        end = self._mark(env_steps, updates)
        self.windows.finish(self._window_mark(end))
        return self._window(self._begin, end, self._overall)

    def _window_mark(self, now: _Mark) -> Mark:
        last, wall_ns = self.windows.last, sum(now.phases_ns.values())
        cpu_s, memory_bytes = self._overall.usage()
        gpu = None if last.gpu_busy_ns is None else self._overall.gpu_share()
        busy_ns = None if gpu is None or last.gpu_busy_ns is None else last.gpu_busy_ns + gpu * (wall_ns - last.wall_ns)
        opponents_ns = now.envs.opponents_ns - self._begin.envs.opponents_ns
        return Mark(now.env_steps, now.updates, now.phases_ns, opponents_ns, cpu_s - self._cpu_s, busy_ns, memory_bytes)

    def _mark(self, env_steps: int, updates: int) -> _Mark:
        return _Mark(env_steps, updates, self._env_times(), self.clock.snapshot(), self.clock.background_ns)

    def _window(self, since: _Mark, now: _Mark, utilization: Utilization) -> PerfWindow:
        return PerfWindow(
            env_steps=now.env_steps - since.env_steps,
            updates=now.updates - since.updates,
            phases_ns={name: now.phases_ns[name] - since.phases_ns[name] for name in now.phases_ns},
            background_ns=now.background_ns - since.background_ns,
            envs=now.envs.since(since.envs),
            cpu_share=utilization.cpu_share(),
            gpu_share=utilization.gpu_share(),
            memory_bytes=utilization.memory_bytes(),
        )
