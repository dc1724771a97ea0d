"""Names, units and number forms of what studies measure, and intervals as JSON holds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fasttrain.report.charts import Kind, Row
from fasttrain.report.page import Cell
from fasttrain.report.words import (
    NOTHING,
    as_mapping,
    as_number,
    interval,
    number,
    percent,
    seconds,
    size,
    times,
)

Form = Callable[[Any], str]


class Metric(NamedTuple):
    """How a figure is called and written."""

    title: str
    form: Form = number
    kind: Kind = "number"


METRICS = {
    "steps_per_s": Metric("env steps/s"),
    "speed_up": Metric("speed-up", times),
    "mean_reward": Metric("mean reward"),
    "win_rate": Metric("win rate", percent, "share"),
    "draw_rate": Metric("draws", percent, "share"),
    "score_diff": Metric("score difference"),
    "mean_turns": Metric("mean turns"),
    "tail": Metric("last fifth of training"),
    "time_to_threshold_s": Metric("training time to the threshold", seconds, "seconds"),
    "time_to_threshold_steps": Metric("env steps to the threshold"),
    "reward_per_hour": Metric("reward per hour"),
    "sample_efficiency": Metric("sample efficiency"),
    "elo": Metric("Elo of the learner", number),
    "env_steps": Metric("env steps"),
    "updates": Metric("gradient updates"),
    "update_ratio": Metric("updates per env step"),
    "added": Metric("speed-up when added", times),
    "within": Metric("profile ÷ profile without it", times),
    "quality": Metric("difference in quality with it"),
    "memory_bytes": Metric("memory (bytes)", size),
    "wall_s": Metric("training time", seconds, "seconds"),
    "startup_s": Metric("start-up", seconds, "seconds"),
}


class Found(NamedTuple):
    """A value with its interval; None is what the file does not say."""

    value: float | None
    low: float | None = None
    high: float | None = None
    never: bool = False  # a missing value says that it did not come about

    def row(self, name: str, metric: Metric, color: int) -> Row:
        """For a chart."""
        text = "not reached" if self.never and self.value is None else metric.form(self.value)
        both = self.low is not None and self.high is not None
        return Row(name=name, value=self.value, low=self.low if both else None, high=self.high if both else None,
                   color=color, text=text)  # fmt: skip

    def cell(self, metric: Metric) -> Cell:
        """For a table."""
        if self.value is None:
            return Cell("not reached" if self.never else NOTHING, tone="dim")
        return Cell(metric.form(self.value), interval(self.low, self.high, metric.form))


def metric_of(name: str) -> Metric:
    """Known ones by `METRICS`; others by what their names end in."""
    if name in METRICS:
        return METRICS[name]
    if name.endswith(("_rate", "_share")):
        return Metric(name.replace("_", " "), percent, "share")
    if name.endswith("_s") and not name.endswith("per_s"):
        return Metric(name.removesuffix("_s").replace("_", " "), seconds, "seconds")
    return Metric(name.replace("_", " "))


def found(value: Any) -> Found:
    """A number, or `{"value" (or "difference"), "low", "high"}`; an open bound is null in JSON."""
    if isinstance(value, Mapping):
        return Found(
            as_number(value.get("value", value.get("difference"))),
            as_number(value.get("low")),
            as_number(value.get("high")),
        )
    return Found(as_number(value))


def quality_of(summary: Mapping[str, Any], name: str) -> Found:
    """Of a run's final greedy policy, from its summary.json."""
    quality = as_mapping(summary.get("quality"))
    bounds = as_mapping(quality.get("ci95")).get(name)
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, None)
    return Found(as_number(quality.get(name)), as_number(low), as_number(high))


def cells_title(count: int) -> str:
    """Over the table of a study's runs."""
    return (
        "1 cell, a run in a process of its own" if count == 1 else f"{count} cells, each a run in a process of its own"
    )


def link_to(cell: Path, folder: Path) -> str:
    """From the page in `folder` to a run's own page or folder; empty where it is not below it."""
    try:
        relative = Path(os.path.relpath(cell.resolve(), folder.resolve()))
        if not cell.is_dir() or ".." in relative.parts:
            return ""
        target = relative / "report.html" if (cell / "report.html").is_file() else relative
    except (OSError, ValueError):  # a name no file can have; another drive
        return ""
    return "./" + quote(target.as_posix())
