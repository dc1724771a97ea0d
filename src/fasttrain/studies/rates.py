"""How fast a cell was once it ran, and by how much faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fasttrain.runs.files import read_json
from fasttrain.studies.cells import Cell
from fasttrain.studies.statistics import Interval, ratio_interval

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
