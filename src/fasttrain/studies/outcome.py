"""What a finished cell says: its quality, its training curve, how fast it was and by how much faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fasttrain.runs.logs import read_episodes
from fasttrain.runs.progress import WIN_KEYS
from fasttrain.saving.files import read_json
from fasttrain.studies.cells import Cell
from fasttrain.studies.statistics import Floats, Interval, learning_curve, ratio_interval, trail

LEAST_WINDOWS = 3  # fewer are no steady state that the first could be left out of
SLIGHT = 0.05  # a gain that is not worth a flag
NOISE = 0.03  # by which the medians of a few short cells on a shared machine differ without a cause


def steady_rate(cell: Cell) -> float:
    """Steps/s without the first window, in which caches are cold; of a very short run, of all of it."""
    windows = read_json(cell.folder / "perf.json").get("windows") or []
    if len(windows) >= LEAST_WINDOWS:
        first, last = windows[0], windows[-1]
        seconds = last["wall_s"] - first["wall_s"]
        if seconds > 0:
            return float((last["env_steps"] - first["env_steps"]) / seconds)
    return float(cell.summary.get("steps_per_s") or 0.0)


class Ratio(NamedTuple):
    """Speed of one setting ÷ speed of another, from cells that ran in turn."""

    interval: Interval
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the two differ by more than noise: every turn says so, and by enough. One turn says nothing."""
        if self.pairs < 2:
            return False
        return (self.interval.low > 1 or self.interval.high < 1) and abs(self.interval.value - 1) > NOISE

    @property
    def alike(self) -> bool:
        """Whether the first is surely not faster by more than `SLIGHT`."""
        return self.pairs > 1 and self.interval.high <= 1 + SLIGHT

    def text(self) -> str:
        """`1.31× [1.28, 1.36]`."""
        low, high = self.interval.low, self.interval.high
        bounds = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) else ""
        return f"{self.interval.value:.2f}×{bounds}"


def ratio(ours: Mapping[int, Cell], theirs: Mapping[int, Cell]) -> Ratio | None:
    """Of cells by seed; None where no seed is finished on both sides."""
    first, second = (
        {seed: rate for seed, cell in cells.items() if (rate := steady_rate(cell))} for cells in (ours, theirs)
    )
    pairs = first.keys() & second.keys()
    return Ratio(ratio_interval(first, second), len(pairs)) if pairs else None


TAIL = 0.2  # the last fifth of a training curve: what was learned, without the luck of one final policy
EVERY_BYTE = 10**12  # a verdict takes no sample
WINDOW = 100  # episodes whose mean is a point of the curve, as in the live view


@dataclass(frozen=True)
class Outcome:
    """One run. Episodes in the order in which they ended."""

    seed: int
    summary: dict[str, Any]
    curve_of: str  # "win rate" where the env tells who won, else "return"
    env_steps: Floats  # (E,) when each training episode ended
    wall_s: Floats  # (E,)
    values: Floats  # (E,) 0 or 1 of a win rate, else returns

    @property
    def steps_per_s(self) -> float:
        return float(self.summary["steps_per_s"])

    def quality(self, name: str) -> float | None:
        """Of the final greedy policy: win_rate, mean_reward, score_diff, draw_rate, mean_turns; None: not told."""
        value = self.summary["quality"].get(name)
        return None if value is None else float(value)

    def tail(self) -> float | None:
        """Mean over the last fifth of the training curve; None without an episode."""
        curve = learning_curve(self.env_steps, self.values, self.total)  # type: ignore[arg-type]
        return float(np.mean(curve[-round(len(curve) * TAIL) :])) if curve else None

    @property
    def total(self) -> float:
        return float(self.summary["env_steps"])

    def efficiency(self, env_steps: float) -> float | None:
        """Mean of the training curve up to `env_steps`: how much was had of so many steps."""
        within = self.env_steps <= env_steps
        curve = learning_curve(self.env_steps[within], self.values[within], env_steps)  # type: ignore[arg-type]
        return float(np.mean(curve)) if curve else None

    def begins_with(self) -> float | None:
        """Mean of the first 100 episodes; None with fewer."""
        return float(self.values[:WINDOW].mean()) if len(self.values) >= WINDOW else None

    def time_to(self, threshold: float) -> tuple[float, float] | None:
        """(env steps, seconds of training) when the mean of 100 episodes first reached it; None: never."""
        for index, best in trail(self.values, WINDOW, levels=1000):  # type: ignore[arg-type]
            if best >= threshold:
                return float(self.env_steps[index]), float(self.wall_s[index])
        return None


def read_outcome(cell: Cell) -> Outcome:
    """The outcome of a cell that is done."""
    episodes = read_episodes(cell.folder / "episodes.csv", whole_bytes=EVERY_BYTE)
    numbers = episodes.numbers
    won = next((numbers[name] for name in WIN_KEYS if name in numbers), None)
    by_wins = won is not None and cell.summary["quality"].get("win_rate") is not None
    nothing = np.zeros(0)
    return Outcome(
        seed=cell.seed or 0,
        summary=cell.summary,
        curve_of="win rate" if by_wins else "return",
        env_steps=numbers.get("env_steps", nothing),
        wall_s=numbers.get("wall_s", nothing),
        values=won if by_wins and won is not None else numbers.get("return", nothing),
    )
