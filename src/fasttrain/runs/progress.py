"""The progress of a running training: counters, the last episodes and the learning curve. The curve sums the
returns in each of a thousand intervals of equal env steps. status.json gives the newest values to `fasttrain watch`.
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

STRETCHES = 1000  # number of equal intervals of total_timesteps; all of them take 100 kB
RECENT = 0.25  # the displayed slope is that of the last quarter of the training so far
MIN_STRETCHES, MIN_EPISODES = 5, 100  # with fewer intervals or episodes no slope is shown
MIN_PER_FIFTH = 10  # episodes needed in the first and in the last fifth, for `reward_per_hour`


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of values, by Welford's algorithm."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two values."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else math.inf


class Line(NamedTuple):
    """A fitted line. `spread`, `residual`: weighted sums of squares of x - mean(x) and of the residuals."""

    slope: float
    spread: float
    residual: float

    def error(self, variance: float) -> float:
        """Standard error of the slope, if the variance of each y is `variance` ÷ its weight."""
        return math.sqrt(max(0.0, variance) / self.spread)


def fit_line(points: Sequence[tuple[float, float, float]]) -> Line | None:
    """Fit a line through points (x, y, weight) by least squares; None if all x are equal."""
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
    """Sums over the episodes that ended in one interval of env steps. Adding an episode takes 0.5 µs."""

    index: int
    episodes: int = 0
    returns: float = 0.0
    wall_s: float = 0.0  # sum of the times at which the episodes ended


class LearningCurve:
    """Collects every finished episode. The unit of slopes is return per hour of training."""

    def __init__(self, total_timesteps: int) -> None:
        self._total = max(1, total_timesteps)
        self._open = _Stretch(-1)
        self._stretches: list[_Stretch] = []

    def add(self, env_steps: int, wall_s: float, episode_return: float) -> None:
        """Add an episode that ended after `env_steps` and `wall_s`."""
        self.add_stretch(env_steps * STRETCHES // self._total, 1, episode_return, wall_s)

    def add_stretch(self, index: int, episodes: int, returns: float, wall_s: float) -> None:
        """Add the sums of several episodes that ended in interval `index`."""
        if self._open.index != index:
            self._open = _Stretch(index)
            self._stretches.append(self._open)
        self._open.episodes += episodes
        self._open.returns += returns
        self._open.wall_s += wall_s

    def slope_per_hour(self) -> float | None:
        """The slope of the last quarter; None if it is below two standard errors, or with too few episodes."""
        recent = self._between(1 - RECENT, 1.0)
        if len(recent) < MIN_STRETCHES or sum(stretch.episodes for stretch in recent) < MIN_EPISODES:
            return None
        points = [(s.wall_s / s.episodes / 3600, s.returns / s.episodes, float(s.episodes)) for s in recent]
        line = fit_line(points)
        if line is None:
            return None
        # The error is that of the scatter around the line, which includes changes of the policy.
        error = line.error(line.residual / (len(recent) - 2))
        return line.slope if abs(line.slope) > 2 * error else None

    def reward_per_hour(self) -> float | None:
        """The mean return of the training's last fifth minus that of its first, divided by the hours between them."""
        ends = []
        for stretches in (self._between(0.0, 0.2), self._between(0.8, 1.0)):
            episodes = sum(stretch.episodes for stretch in stretches)
            if episodes < MIN_PER_FIFTH:
                return None
            sums = sum(stretch.returns for stretch in stretches), sum(stretch.wall_s for stretch in stretches)
            ends.append([total / episodes for total in sums])
        (first, began_s), (last, ended_s) = ends
        hours = (ended_s - began_s) / 3600
        return (last - first) / hours if hours > 0 else None

    def _between(self, low: float, high: float) -> list[_Stretch]:
        """The intervals between the shares `low` and `high` of the training so far."""
        end = self._open.index + 1
        return [stretch for stretch in self._stretches if low * end <= stretch.index + 0.5 < high * end]


RECENT_S, MARK_EVERY_S = 60.0, 1.0


@dataclass(slots=True)
class Progress:
    """Counters and recent results. The callback writes them, the live view and the summary read them."""

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
    reward_terms: dict[str, deque[float]] = field(
        default_factory=dict
    )  # term of the reward → sums of the last episodes
    scores: dict[str, deque[float]] = field(default_factory=dict)  # name in `env.result.scores` → its last values
    ticks: float = 0  # ticks of the games' clocks, summed over all episodes that report them
    first_update_s: float | None = None  # seconds from the start of the process to the end of its first update
    before_s: float = 0.0  # seconds of training before the last resume
    tasks: Callable[[], str] | None = None  # returns the results by task of a curriculum: `early 62 %, late 31 %`
    max_s: float | None = None  # stop.max_minutes in seconds
    curve: LearningCurve = field(init=False)
    _marks: deque[tuple[float, int]] = field(default_factory=deque)  # (time, env steps) at starts of rollouts

    def __post_init__(self) -> None:
        self.curve = LearningCurve(self.total_timesteps)

    def add_episode(self, episode_return: float, info: dict[str, Any]) -> None:
        """Record a finished episode. `info`: the last info of the episode, from `InfoReader.read`."""
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
        for recent, named in ((self.reward_terms, "reward_terms"), (self.scores, SCORES)):
            for name, value in info.get(named, {}).items():
                recent.setdefault(name, deque(maxlen=1000)).append(float(value))

    def mark(self) -> None:
        """Store the time at the start of a rollout, so that rates cover whole rollouts and updates.

        They begin with the first update: before it, DQN and SAC only collect, which is much faster than learning.
        """
        now = time.perf_counter()
        if not self.updates:
            self._marks.clear()
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
        """`61,234 steps/s`, `310 episodes/s` after the first episode, `4,000 ticks/s` if the env reports ticks."""
        counts = {"steps": self.env_steps, "episodes": self.episodes, "ticks": self.ticks}
        return [f"{rate_text(self._per_s(n))} {name}/s" for name, n in counts.items() if n or name == "steps"]

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds at the rate of about the last minute; None before the first steps, and until the rate of
        learning is known, a second after the first update."""
        if self.updates and len(self._marks) == 1:
            return None
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
        """` +1.2/h`: the present gain of the mean return per hour; empty if it is not known."""
        slope = self.curve.slope_per_hour()
        return "" if slope is None else f" {slope:+,.0f}/h" if abs(slope) >= 1000 else f" {slope:+.2g}/h"

    def mean_terms(self) -> dict[str, float]:
        """Mean sum of each reward term over an episode, if the env reports them (`reward_debug`)."""
        return {one_line(name): sum(values) / len(values) for name, values in self.reward_terms.items()}

    def shares(self) -> dict[str, float]:
        """Shares (0..1) of the time so far: `env`, `act`, `update` and `rest` (all else)."""
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
        percent = min(100.0, 100 * self.env_steps / self.total_timesteps)
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
MOST_SHARE = 0.001  # most time spent on writing, as a share; a slow disk gets fewer writes
LONGEST = 300  # most characters of `last_line`


class StatusFile:
    """Writes status.json. Failures are ignored, because no run needs the file. `last_line`: the last printed line."""

    def __init__(self, folder: Path, progress: Progress, last_line: Callable[[], str]) -> None:
        self._file, self._progress, self._last_line = folder / STATUS, progress, last_line
        self._phase, self._due = TRAINING, -math.inf
        self._who = {"pid": os.getpid(), "host": platform.node()}

    def tick(self, now: float) -> float:
        """Write the file if it is due. Returns the time when it is due next (`time.perf_counter`)."""
        if now >= self._due:
            self.write()
        return self._due

    def now(self, phase: str) -> None:
        """Set the phase and write the file."""
        self._phase = phase
        self.write()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        before = self._phase
        self.now(phase)
        try:
            yield
        finally:
            self._phase = before

    def write(self) -> None:
        began = time.perf_counter()
        with suppress(*FAILED_WRITES, ValueError):  # ValueError: a value is NaN
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
            "said": one_line(self._last_line(), LONGEST),
            "time": time.time(),
            **self._who,
        }
