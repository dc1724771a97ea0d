"""How [PERF] changes in the course of a run: at most 240 windows of time, which are `windows` in perf.json.

A mark has all counters at the end of a window; a window is the difference of two marks. Two windows are merged by
removing the mark between them, without any loss. Windows end where a rollout begins, so that each has whole cycles of
collecting and updating. `PerfMeter` takes the marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import psutil

from fasttrain.machine import usable_cores
from fasttrain.perf.clock import PHASES, PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow, perf_line, phases_dict

MOST_WINDOWS = 240  # if there are more, neighbours are merged and the interval doubles: 256 s after ten hours
FIRST_INTERVAL_S = 1.0
COST_SHARE = 0.002  # marks may take this share of the run's time: reading the counters of 64 workers takes 3 ms
SHORTEST_CPU_NS = 50_000_000  # shorter windows have no CPU share, because the clock of CPU time ticks every 10 ms


class Mark(NamedTuple):
    """Counters since training began, and the memory in use now."""

    env_steps: int = 0
    updates: int = 0
    phases_ns: Mapping[str, int] = dict.fromkeys(PHASES, 0)
    envs: EnvTimes = EnvTimes()
    cpu_s: float = 0.0  # CPU time of the process and its children ÷ cores
    gpu_busy_ns: float | None = 0.0  # busy time of the GPU so far; None without a GPU
    memory_bytes: int = 0

    @property
    def wall_ns(self) -> int:
        """The sum of the phases."""
        return sum(self.phases_ns.values())

    def since(self, before: Mark) -> PerfWindow:
        """The window since an earlier mark."""
        wall_ns = self.wall_ns - before.wall_ns
        cpu = gpu = None
        if wall_ns > SHORTEST_CPU_NS:
            used_s = max(0.0, self.cpu_s - before.cpu_s)  # CPU time may decrease when a child process ends
            cpu = min(1.0, used_s * 1e9 / wall_ns)
        if self.gpu_busy_ns is not None and before.gpu_busy_ns is not None and wall_ns:
            gpu = (self.gpu_busy_ns - before.gpu_busy_ns) / wall_ns
        return PerfWindow(
            env_steps=self.env_steps - before.env_steps,
            updates=self.updates - before.updates,
            phases_ns={name: ns - before.phases_ns[name] for name, ns in self.phases_ns.items()},
            envs=self.envs.since(before.envs),
            cpu_share=cpu,
            gpu_share=gpu,
            memory_bytes=self.memory_bytes,
        )


class WindowLog:
    """The marks of one training, with times in seconds. `cost_s`: the time that making a mark took."""

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
        """End a window, unless there was no env step in it. A large `cost_s` makes the next window longer."""
        self._next = self._after(now, cost_s)
        if mark.env_steps == self.last.env_steps:
            return
        if len(self._marks) > MOST_WINDOWS:
            del self._marks[1::2]
            self.interval_s *= 2
        self._marks.append(mark)

    def _after(self, now: float, cost_s: float) -> float:
        return now + max(self.interval_s, cost_s / COST_SHARE)

    def finish(self, mark: Mark) -> None:
        """End the training. Time after the last env step, for example of an update, belongs to the last window."""
        if len(self._marks) > 1 and mark.env_steps == self.last.env_steps:
            self._marks.pop()
        self.add(mark, 0.0, 0.0)

    def rows(self) -> list[dict[str, Any]]:
        """The windows as in perf.json."""
        windows = [(after, after.since(before)) for before, after in pairwise(self._marks)]
        return [
            {
                "env_steps": mark.env_steps,
                "wall_s": mark.wall_ns / 1e9,
                "steps_per_s": round(window.steps_per_s, 3),
                "updates": mark.updates,
                **phases_dict(window),
                "cpu": None if window.cpu_share is None else round(window.cpu_share, 4),
                "gpu": None if window.gpu_share is None else round(window.gpu_share, 4),
                "memory_bytes": window.memory_bytes,
            }
            for mark, window in windows
        ]


class PerfMeter:
    """Reads the clock and the machine's counters. `lines` has all [PERF] lines; each ends with the text of `more()`."""

    def __init__(
        self, clock: PhaseClock, env_times: Callable[[], EnvTimes], more: Callable[[], str] = lambda: ""
    ) -> None:
        self.clock, self._more = clock, more
        self.lines: list[str] = []
        self._env_times = env_times
        self.start()

    def start(self, env_steps: int = 0, updates: int = 0) -> None:
        """Begin or continue training with these counts. Earlier measurements are forgotten."""
        began = time.perf_counter()
        cpu_s, memory_bytes = usage()
        busy_ns = None if gpu_share() is None else 0.0
        now = time.perf_counter()
        self.clock.reset()
        self._begin = self._line = self._latest = Mark(
            env_steps, updates, envs=self._env_times(), cpu_s=cpu_s, gpu_busy_ns=busy_ns, memory_bytes=memory_bytes
        )
        self.windows = WindowLog(self._begin, now, cost_s=now - began)

    def tick(self, env_steps: int, updates: int) -> None:
        """End the measuring window if it is long enough. Called where a rollout begins, in phase `log`."""
        now = time.perf_counter()
        if self.windows.due(now):
            with self.clock.phase("log"):
                mark = self._mark(env_steps, updates)
                self.windows.add(mark, now, time.perf_counter() - now)

    def line(self, env_steps: int, updates: int) -> str:
        """The [PERF] line for the time since the last line, or since the start."""
        before, self._line = self._line, self._mark(env_steps, updates)
        self.newest = self._line.since(before)
        self.lines.append(f"{perf_line(self.newest)} {self._more()}".rstrip())
        return self.lines[-1]

    def overall(self, env_steps: int, updates: int) -> PerfWindow:
        """The window since `start`, at the end of training."""
        end = self._mark(env_steps, updates)
        self.windows.finish(end)
        return end.since(self._begin)

    def _mark(self, env_steps: int, updates: int) -> Mark:
        last, phases_ns = self._latest, self.clock.snapshot()
        cpu_s, memory_bytes = usage()
        share, busy_ns = None if last.gpu_busy_ns is None else gpu_share(), None
        if share is not None and last.gpu_busy_ns is not None:
            busy_ns = last.gpu_busy_ns + share * (sum(phases_ns.values()) - last.wall_ns)
        self._latest = Mark(env_steps, updates, phases_ns, self._env_times(), cpu_s, busy_ns, memory_bytes)
        return self._latest


def usage() -> tuple[float, int]:
    """CPU seconds so far ÷ cores, and resident memory, both with child processes. Takes 0.8 ms, and 60 µs per child."""
    process = psutil.Process()
    cpu_s, memory_bytes = 0.0, 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # a child may have ended meanwhile
            times = each.cpu_times()
            memory_bytes += each.memory_info().rss
            cpu_s += sum(times[:4])  # user and system time, also of its children that have ended
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else usable_cores()
    return cpu_s / cores, memory_bytes


def gpu_share() -> float | None:
    """Utilisation of the first CUDA device, 0..1; None without one or without NVIDIA's library."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return float(torch.cuda.utilization()) / 100
    except (ModuleNotFoundError, RuntimeError):
        return None
