"""Cuts a run's counters into [PERF] windows: since the last line, and over the whole training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow, perf_line
from fasttrain.perf.utilization import Utilization


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

    def start(self) -> None:
        """Training begins now: forget what came before."""
        self.clock.reset()
        self._recent.reset()
        self._overall.reset()
        self._begin = _Mark(0, 0, self._env_times(), dict.fromkeys(self.clock.totals_ns, 0), 0)
        self._last = self._begin

    def line(self, env_steps: int, updates: int) -> str:
        """The [PERF] line since the last one (or since the start)."""
        now = self._mark(env_steps, updates)
        line = perf_line(self._window(self._last, now, self._recent))
        self.lines.append(f"{line} {self._more()}".rstrip())
        self._last = now
        self._recent.reset()
        return self.lines[-1]

    def overall(self, env_steps: int, updates: int) -> PerfWindow:
        """Everything since `start`."""
        return self._window(self._begin, self._mark(env_steps, updates), self._overall)

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
