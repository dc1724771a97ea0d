"""The learning curve of a run: returns of training episodes, summed up in a thousand stretches of equal env steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """Sums over the episodes that ended in it; adding one costs 0.4 µs, and Skull King ends 2,500 a second."""

    index: int
    episodes: int = 0
    returns: float = 0.0
    wall_s: float = 0.0  # when they ended


class LearningCurve:
    """Fed with every finished episode; slopes are returns per hour of training."""

    def __init__(self, total_timesteps: int) -> None:
        self._total = max(1, total_timesteps)
        self._open = _Stretch(-1)
        self._stretches: list[_Stretch] = []

    def add(self, env_steps: int, wall_s: float, episode_return: float) -> None:
        """One episode, at that point of the training."""
        index = env_steps * STRETCHES // self._total
        stretch = self._open
        if stretch.index != index:
            self._open = stretch = _Stretch(index)
            self._stretches.append(stretch)
        stretch.episodes += 1
        stretch.returns += episode_return
        stretch.wall_s += wall_s

    def add_stretch(self, index: int, episodes: int, returns: float, wall_s: float) -> None:
        """Sums over episodes of a run that goes on here."""
        if self._open.index != index:
            self._open = _Stretch(index)
            self._stretches.append(self._open)
        self._open.episodes += episodes
        self._open.returns += returns
        self._open.wall_s += wall_s

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
        first, last = (_joined(self._between(*bounds)) for bounds in ((0.0, 0.2), (0.8, 1.0)))
        if min(first.episodes, last.episodes) < MIN_PER_FIFTH:
            return None
        hours = (last.wall_s / last.episodes - first.wall_s / first.episodes) / 3600
        return (last.returns / last.episodes - first.returns / first.episodes) / hours if hours > 0 else None

    def _between(self, low: float, high: float) -> list[_Stretch]:
        """Stretches between these shares of the training so far."""
        end = self._open.index + 1
        return [stretch for stretch in self._stretches if low * end <= stretch.index + 0.5 < high * end]


def _joined(stretches: Sequence[_Stretch]) -> _Stretch:
    joined = _Stretch(-1)
    for stretch in stretches:
        joined.episodes += stretch.episodes
        joined.returns += stretch.returns
        joined.wall_s += stretch.wall_s
    return joined
