"""The course of a run in [PERF] terms: at most 240 windows, however long it takes. They are `windows` of perf.json.

What is kept are marks, cumulative counters at the windows' ends; a window is the difference of two neighbours. Merging
two windows is leaving out the mark between them, so that a merged one is exactly what measuring over both would have
given. Windows end where a rollout begins, so that each holds whole turns of collecting and updating. `PerfMeter` cuts a
run's counters: since the last line, by time, and over the whole training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttrain.perf.clock import PHASES, PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow, perf_line
from fasttrain.perf.utilization import Utilization

MOST_WINDOWS = 240  # then neighbours are merged and the interval doubles: a run of ten hours ends at 256 s
FIRST_INTERVAL_S = 1.0
COST_SHARE = 0.002  # of the time, at most: reading CPU time and memory of 64 worker processes takes 3 ms
SHORTEST_CPU_S = 0.05  # the system's clock of CPU time ticks every 10 ms


class Mark(NamedTuple):
    """Counters since training began, and what memory is in use now."""

    env_steps: int = 0
    updates: int = 0
    phases_ns: Mapping[str, int] = dict.fromkeys(PHASES, 0)
    enemy_turn_ns: int = 0
    cpu_s: float = 0.0  # CPU time of the process and its children ÷ cores
    gpu_busy_ns: float | None = 0.0  # shares seen × the time they stand for; None without a GPU
    memory_bytes: int = 0

    @property
    def wall_ns(self) -> int:
        """The phases are disjoint and cover everything."""
        return sum(self.phases_ns.values())


class WindowLog:
    """Marks of one training; its times are seconds of the caller's clock.

    Args:
        cost_s: what making the first mark took.
    """

    def __init__(self, begin: Mark, now: float, cost_s: float = 0.0) -> None:
        self.interval_s = FIRST_INTERVAL_S
        self._marks = [begin]
        self._next = self._after(now, cost_s)

    @property
    def last(self) -> Mark:
        """The end of the last window."""
        return self._marks[-1]

    def due(self, now: float) -> bool:
        """Whether a window should end."""
        return now >= self._next

    def add(self, mark: Mark, now: float, cost_s: float) -> None:
        """End a window. The next one lasts long enough to pay for `cost_s`, what making this mark took."""
        self._next = self._after(now, cost_s)
        if mark.env_steps == self.last.env_steps:  # nothing to relate milliseconds to: goes on
            return
        if len(self._marks) > MOST_WINDOWS:
            del self._marks[1::2]
            self.interval_s *= 2
        self._marks.append(mark)

    def _after(self, now: float, cost_s: float) -> float:
        return now + max(self.interval_s, cost_s / COST_SHARE)

    def finish(self, mark: Mark) -> None:
        """The end of training; what came after the last step, an update say, belongs to the last window."""
        if len(self._marks) > 1 and mark.env_steps == self.last.env_steps:
            self._marks.pop()
        self.add(mark, 0.0, 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """What perf.json holds, in order of time."""
        return [_row(before, after) for before, after in zip(self._marks, self._marks[1:], strict=False)]


def _row(before: Mark, after: Mark) -> dict[str, Any]:
    env_steps, wall_ns = after.env_steps - before.env_steps, after.wall_ns - before.wall_ns
    phases = {
        f"{phase}_ms": round((after.phases_ns[phase] - before.phases_ns[phase]) / 1e3 / env_steps, 6)
        for phase in PHASES
    }
    cpu = max(0.0, after.cpu_s - before.cpu_s)  # less where a child has ended and taken its time along
    gpu = None
    if after.gpu_busy_ns is not None and before.gpu_busy_ns is not None and wall_ns:
        gpu = round((after.gpu_busy_ns - before.gpu_busy_ns) / wall_ns, 4)
    return {
        "env_steps": after.env_steps,
        "wall_s": after.wall_ns / 1e9,
        "steps_per_s": round(env_steps * 1e9 / wall_ns, 3) if wall_ns else 0.0,
        "updates": after.updates,
        **phases,
        "enemy_turn_ms": round((after.enemy_turn_ns - before.enemy_turn_ns) / 1e3 / env_steps, 6),
        "cpu": round(min(1.0, cpu * 1e9 / wall_ns), 4) if wall_ns > SHORTEST_CPU_S * 1e9 else None,
        "gpu": gpu,
        "memory_bytes": after.memory_bytes,
    }


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
