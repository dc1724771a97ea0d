"""What a run knows of itself while it goes: counters, the last episodes and the learning curve, which sums the returns
of training episodes in a thousand stretches of equal env steps. status.json shows the newest of it to `fasttrain
watch`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.perf.clock import UPDATE_PHASES, PhaseClock
from fasttrain.saving.files import FAILED_WRITES, write_whole
from fasttrain.spec.infos import SCORES, score_diff_of, win_of
from fasttrain.terminal import one_line, rate_text

STRETCHES = 1000  # of the horizon; 100 kB however many episodes there are
RECENT = 0.25  # of the training so far: what "now" means
MIN_STRETCHES, MIN_EPISODES = 5, 100  # fewer have no slope worth showing
MIN_PER_FIFTH = 10  # episodes


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of what was added (Welford's, exact for long runs)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two values."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else math.inf


class Line(NamedTuple):
    """The slope of a line through weighted points; `spread` of x and `residual` of y are weighted sums of squares."""

    slope: float
    spread: float
    residual: float

    def error(self, variance: float) -> float:
        """Standard error of the slope where a point's y has `variance` ÷ its weight."""
        return math.sqrt(max(0.0, variance) / self.spread)


def fit_line(points: Sequence[tuple[float, float, float]]) -> Line | None:
    """Through (x, y, weight), by least squares; None where all x are one."""
    total = sum(weight for _, _, weight in points)
    if not total:
        return None
    x_mean = sum(x * weight for x, _, weight in points) / total
    y_mean = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - x_mean) ** 2 for x, _, weight in points)
    if spread <= 0:
        return None
    slope = sum(weight * (x - x_mean) * (y - y_mean) for x, y, weight in points) / spread
    residual = sum(weight * (y - y_mean - slope * (x - x_mean)) ** 2 for x, y, weight in points)
    return Line(slope, spread, residual)


@dataclass(slots=True)
class _Stretch:
    """Sums over the episodes that ended in it; adding one costs 0.5 µs, and Skull King ends 2,500 a second."""

    index: int
    episodes: int = 0
    returns: float = 0.0
    wall_s: float = 0.0  # when they ended

    def add(self, episodes: int, returns: float, wall_s: float) -> None:
        """Sums over more of them."""
        self.episodes += episodes
        self.returns += returns
        self.wall_s += wall_s


class LearningCurve:
    """Fed with every finished episode; slopes are returns per hour of training."""

    def __init__(self, total_timesteps: int) -> None:
        self._total = max(1, total_timesteps)
        self._open = _Stretch(-1)
        self._stretches: list[_Stretch] = []

    def add(self, env_steps: int, wall_s: float, episode_return: float) -> None:
        """One episode, at that point of the training."""
        self.add_stretch(env_steps * STRETCHES // self._total, 1, episode_return, wall_s)

    def add_stretch(self, index: int, episodes: int, returns: float, wall_s: float) -> None:
        """Sums over episodes of a run that goes on here."""
        if self._open.index != index:
            self._open = _Stretch(index)
            self._stretches.append(self._open)
        self._open.add(episodes, returns, wall_s)

    def slope_per_hour(self) -> float | None:
        """Of the last quarter of the training so far; None where it cannot be told from 0, or from too few episodes."""
        recent = self._between(1 - RECENT, 1.0)
        if len(recent) < MIN_STRETCHES or sum(stretch.episodes for stretch in recent) < MIN_EPISODES:
            return None
        points = [(s.wall_s / s.episodes / 3600, s.returns / s.episodes, float(s.episodes)) for s in recent]
        line = fit_line(points)
        if line is None:
            return None
        # The scatter of stretches around the line, not of episodes: policies go up and down between updates.
        error = line.error(line.residual / (len(recent) - 2))
        return line.slope if abs(line.slope) > 2 * error else None

    def reward_per_hour(self) -> float | None:
        """Mean of the last fifth of the training minus that of the first, by the hours between their middles."""
        first, last = _Stretch(-1), _Stretch(-1)
        for joined, bounds in ((first, (0.0, 0.2)), (last, (0.8, 1.0))):
            for stretch in self._between(*bounds):
                joined.add(stretch.episodes, stretch.returns, stretch.wall_s)
        if min(first.episodes, last.episodes) < MIN_PER_FIFTH:
            return None
        hours = (last.wall_s / last.episodes - first.wall_s / first.episodes) / 3600
        return (last.returns / last.episodes - first.returns / first.episodes) / hours if hours > 0 else None

    def _between(self, low: float, high: float) -> list[_Stretch]:
        """Stretches between these shares of the training so far."""
        end = self._open.index + 1
        return [stretch for stretch in self._stretches if low * end <= stretch.index + 0.5 < high * end]


RECENT_S, MARK_EVERY_S = 60.0, 1.0


@dataclass(slots=True)
class Progress:
    """Written by the callback, read by the live view and the summary."""

    total_timesteps: int
    clock: PhaseClock
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    started: float = field(default_factory=time.perf_counter)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    wins: deque[bool] = field(default_factory=lambda: deque(maxlen=1000))
    draws: deque[bool] = field(default_factory=lambda: deque(maxlen=1000))
    score_diffs: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    reward_terms: dict[str, deque[float]] = field(default_factory=dict)  # sums of the last episodes, by term
    scores: dict[str, deque[float]] = field(default_factory=dict)  # of the last episodes, by `env.result.scores`
    ticks: float = 0  # of the games' own clocks, over all episodes that told
    first_update_s: float | None = None  # from the creation of the process to the end of its first update
    before_s: float = 0.0  # of the training that a resumed run continues
    tasks: Callable[[], str] | None = None  # how the tasks of a curriculum are played: `early 62 %, late 31 %`
    max_s: float | None = None  # the training ends after so many seconds, if not before
    curve: LearningCurve = field(init=False)
    _marks: deque[tuple[float, int]] = field(default_factory=deque)  # when, and env steps by then

    def __post_init__(self) -> None:
        self.curve = LearningCurve(self.total_timesteps)

    def add_episode(self, episode_return: float, info: dict[str, Any]) -> None:
        """Count one finished episode; `info` as `InfoReader.read` gives it."""
        self.episodes += 1
        self.returns.append(episode_return)
        self.curve.add(self.env_steps, time.perf_counter() - self.started, episode_return)
        won = win_of(info)
        if won is not None:
            self.wins.append(won)
        if "is_draw" in info:
            self.draws.append(info["is_draw"])
        self.ticks += info.get("ticks", 0)
        score_diff = score_diff_of(info)
        if score_diff is not None:
            self.score_diffs.append(score_diff)
        for kept, named in ((self.reward_terms, "reward_terms"), (self.scores, SCORES)):
            for name, value in info.get(named, {}).items():
                kept.setdefault(name, deque(maxlen=1000)).append(float(value))

    def mark(self) -> None:
        """Called where a rollout begins: between two marks lie whole turns of collecting and updating."""
        now = time.perf_counter()
        if not self._marks or now - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append((now, self.env_steps))
            while len(self._marks) > 2 and now - self._marks[1][0] > RECENT_S:
                self._marks.popleft()

    @property
    def steps_per_s(self) -> float:
        return self._per_s(self.env_steps)

    def _per_s(self, count: float) -> float:
        elapsed = time.perf_counter() - self.started
        return count / elapsed if elapsed > 0 else 0.0

    def rates(self) -> list[str]:
        """`61,234 steps/s`, `310 episodes/s` once one has ended, `4,000 ticks/s` of an env that tells them."""
        counts = {"steps": self.env_steps, "episodes": self.episodes, "ticks": self.ticks}
        return [f"{rate_text(self._per_s(n))} {name}/s" for name, n in counts.items() if n or name == "steps"]

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the rate of the last minute or so; None before anything is known."""
        rate = self.steps_per_s
        if len(self._marks) > 1:
            (began, first), (ended, last) = self._marks[0], self._marks[-1]
            rate = (last - first) / (ended - began) or rate
        if rate <= 0:
            return None
        left = (self.total_timesteps - self.env_steps) / rate
        if self.max_s is not None:
            left = min(left, self.max_s - (time.perf_counter() - self.started))
        return max(0.0, left)

    @property
    def mean_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def win_rate(self) -> float | None:
        return sum(self.wins) / len(self.wins) if self.wins else None

    def trend(self) -> str:
        """` +1.2/h`: what the mean return gains per hour now; empty where that is not known."""
        slope = self.curve.slope_per_hour()
        return "" if slope is None else f" {slope:+,.0f}/h" if abs(slope) >= 1000 else f" {slope:+.2g}/h"

    def mean_terms(self) -> dict[str, float]:
        """Means per episode of the reward's terms, of envs that tell them (`reward_debug`)."""
        return {one_line(name): sum(values) / len(values) for name, values in self.reward_terms.items()}

    def shares(self) -> dict[str, float]:
        """Shares of the time so far: env, act, update, rest."""
        totals = self.clock.snapshot()
        wall = sum(totals.values()) or 1
        groups = {
            "env": totals["env_step"] / wall,
            "act": totals["action"] / wall,
            "update": sum(totals[name] for name in UPDATE_PHASES) / wall,
        }
        return {**groups, "rest": 1.0 - sum(groups.values())}

    def line(self) -> str:
        """`1,200,000/3,000,000 steps 40 % · 61,234 steps/s · 310 episodes/s · ETA 0:29 · reward 0.52 · win 31 % …`."""
        percent = min(100.0, 100 * self.env_steps / self.total_timesteps)  # SB3 finishes the rollout it is in
        parts = [f"{self.env_steps:,}/{self.total_timesteps:,} steps {percent:.0f} %", *self.rates()]
        if self.eta_s is not None:
            parts.append(f"ETA {clock_text(self.eta_s)}")
        if self.mean_return is not None:
            parts.append(f"reward {self.mean_return:.3g}{self.trend()}")
        if self.win_rate is not None:
            draws = f", draw {100 * sum(self.draws) / len(self.draws):.1f} %" if any(self.draws) else ""
            parts.append(f"win {100 * self.win_rate:.1f} %{draws}")
        if self.score_diffs:
            parts.append(f"score {sum(self.score_diffs) / len(self.score_diffs):+.3g}")
        parts += [f"{one_line(name)} {sum(values) / len(values):.3g}" for name, values in self.scores.items()]
        if self.tasks is not None and (told := self.tasks()):
            parts.append(f"tasks: {one_line(told)}")
        parts.append(" ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares().items()))
        return " · ".join(parts)


def clock_text(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- status.json

STATUS = "status.json"
TRAINING, EVALUATING = "training", "evaluating"
EVERY_S = 2.0
MOST_SHARE = 0.001  # of the time, however slow the disk is: a write of 0.1 ms every two seconds is a twentieth of it
LONGEST = 300  # characters of the line said last


class StatusFile:
    """Written whole or not at all; no run needs it, so failures are not reported. `said`: the newest line."""

    def __init__(self, folder: Path, progress: Progress, said: Callable[[], str]) -> None:
        self._file, self._progress, self._said = folder / STATUS, progress, said
        self._phase, self._due = TRAINING, -math.inf
        self._who = {"pid": os.getpid(), "host": platform.node()}

    def tick(self, now: float) -> float:
        """Write if it is time; `now` and what is returned, when it will be again, are of `time.perf_counter`."""
        if now >= self._due:
            self.write()
        return self._due

    def now(self, phase: str) -> None:
        """Another phase begins, which the file says at once."""
        self._phase = phase
        self.write()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Another phase while the block runs."""
        before = self._phase
        self.now(phase)
        try:
            yield
        finally:
            self._phase = before

    def write(self) -> None:
        """What is known now."""
        began = time.perf_counter()
        with suppress(*FAILED_WRITES, ValueError):  # a number that is none; the next time may be better
            write_whole(self._file, json.dumps(self._content(), allow_nan=False) + "\n")
        took = time.perf_counter() - began
        self._due = began + max(EVERY_S, took / MOST_SHARE)

    def _content(self) -> dict[str, Any]:
        progress = self._progress
        figures = {
            "steps_per_s": progress.steps_per_s, "reward": progress.mean_return, "win_rate": progress.win_rate,
            "eta_s": progress.eta_s if self._phase == TRAINING else None,
        }  # fmt: skip
        return {
            "phase": self._phase,
            "env_steps": progress.env_steps,
            "total_timesteps": progress.total_timesteps,
            **{name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()},
            "said": one_line(self._said(), LONGEST),
            "time": time.time(),
            **self._who,
        }
