"""Turns numbers and texts of envs into short texts. Has the names and formats of all figures. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

from fasttrain.terminal import one_line
from fasttrain_report.values import Estimate, as_number

LABEL_CHARACTERS = 34  # number of characters that fit beside a bar
NOTHING = "–"

Form = Callable[..., str]


def label(text: object) -> str:
    """One short line for a chart. It never begins with an underscore, because matplotlib hides such legend entries."""
    line = one_line(text, LABEL_CHARACTERS)
    return "\N{THIN SPACE}" + line if line.startswith("_") else line or NOTHING


def _form(write: Callable[..., str]) -> Form:
    """`write`, but with `–` for a value that is no number, and with a minus sign for a hyphen."""

    @wraps(write)
    def text(value: object, *more: object) -> str:
        found = as_number(value)
        written = NOTHING if found is None else write(found, *more)
        return f"−{written[1:]}" if written.startswith("-") else written

    return text


@_form
def number(value: float, digits: int = 3) -> str:
    """`256,648`, `2.26`, `0.0039`, `1.2e-07`."""
    if value and abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


@_form
def compact(value: float) -> str:
    """For ticks: `0`, `1,250`, `15k`, `200k`, `1M`."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.4g}"


@_form
def percent(value: float, digits: int = 1) -> str:
    """`50.7 %` for 0.507."""
    return f"{100 * value:.{digits}f} %"


@_form
def times(value: float) -> str:
    """`2.41×`."""
    return f"{value:.2f}×"


@_form
def seconds(value: float) -> str:
    """`3.96 s`, `12 min 34 s`, `1 h 02 min`."""
    if value < 59.95:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02} min"


@_form
def size(value: float) -> str:
    """`563 MB`, `2.9 GB`."""
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def value_text(value: object) -> str:
    """Any value of a configuration: `true`, `1,024`, `[64, 64]`, `–` for null."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return number(value, 4) if isinstance(value, float) else one_line(value)


class Metric(NamedTuple):
    """The name of a figure and the format of its values."""

    title: str
    form: Form = number
    never: str = NOTHING  # text for a value that was stored as infinite

    def text(self, found: Estimate) -> str:
        return self.never if found.value is None and found.never else self.form(found.value)

    @property
    def heading(self) -> str:
        """The title above a picture."""
        return self.title[:1].upper() + self.title[1:]


METRICS = {
    "steps_per_s": Metric("env steps/s"),
    "speed_up": Metric("speed-up", times),
    "mean_reward": Metric("mean reward"),
    "win_rate": Metric("win rate", percent),
    "draw_rate": Metric("draws", percent),
    "score_diff": Metric("score difference"),
    "distinct_episodes": Metric("distinct episodes"),
    "mean_length": Metric("mean length"),
    "mean_turns": Metric("mean turns"),
    "tail": Metric("last fifth of training"),
    "time_to_threshold_s": Metric("training time to the threshold", seconds, "not reached"),
    "time_to_threshold_steps": Metric("env steps to the threshold", never="not reached"),
    "reward_per_hour": Metric("reward per hour"),
    "elo": Metric("Elo of the learner"),
    "env_steps": Metric("env steps"),
    "updates": Metric("gradient updates"),
    "update_ratio": Metric("updates per env step"),
    "added": Metric("speed-up when added", times),
    "within": Metric("profile ÷ profile without it", times),
    "quality": Metric("difference in quality with it"),
    "memory_bytes": Metric("memory (bytes)", size),
}


def metric_of(name: str) -> Metric:
    """The metric `name`. For figures of a game the ending of the name decides the format."""
    title = name.replace("_", " ")
    if name.endswith(("_rate", "_share")):
        return METRICS.get(name, Metric(title, percent))
    return METRICS.get(name, Metric(title.removesuffix(" s"), seconds) if name.endswith("_s") else Metric(title))
