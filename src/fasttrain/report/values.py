"""What the JSON files of runs and studies hold, read with patience: numbers, lists, figures with intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fasttrain.intervals import student


def as_number(value: Any) -> float | None:
    """A finite number, else None: files may be cut or come from another version."""
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def as_rows(value: object) -> list[dict[str, Any]]:
    """The objects of a list, empty where there is none."""
    return [dict(row) for row in as_list(value) if isinstance(row, Mapping)]


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


class Estimate(NamedTuple):
    """A value with its interval; None is what the file does not say."""

    value: float | None
    low: float | None = None
    high: float | None = None
    never: bool = False  # stored, but without a value: it did not come about

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends of the interval, if it has two."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @classmethod
    def of(cls, value: object) -> Estimate:
        """A number, or `{"value" (or "difference"), "low", "high"}`; an open bound is null in JSON."""
        if not isinstance(value, Mapping):
            return cls(as_number(value))
        middle = as_number(value.get("value", value.get("difference")))
        return cls(middle, as_number(value.get("low")), as_number(value.get("high")), middle is None)

    def interval(self, form: Callable[[float], str]) -> str:
        """`[2.03, 2.49]`; a missing bound is an open one, and without both there is nothing to say."""
        if self.low is None and self.high is None:
            return ""
        ends = zip((self.low, self.high), ("−∞", "∞"), strict=True)
        return f"[{', '.join(no if end is None else form(end).rstrip(' %×') for end, no in ends)}]"


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean and Student's 95 % interval; one value has none."""
    mean, half = map(float, student(np.array(values, dtype=np.float64)))
    return Estimate(mean, mean - half, mean + half) if len(values) > 1 else Estimate(mean)


def over_seeds(figures: Iterable[Estimate]) -> Estimate:
    """Mean and interval over runs; of a single one its own over episodes."""
    known = [(each, each.value) for each in figures if each.value is not None]
    return mean_interval([value for _, value in known]) if len(known) > 1 else known[0][0] if known else Estimate(None)


def quality_of(summary: Mapping[str, Any], name: str) -> Estimate:
    """A figure of a run's final greedy policy, from its summary.json."""
    return quality_in(as_mapping(summary.get("quality")), name)


def quality_in(result: Mapping[str, Any], name: str) -> Estimate:
    """The figure `name` of one evaluation's results, with the interval that stands apart in them."""
    bounds = as_list(as_mapping(result.get("ci95")).get(name))
    low, high = map(as_number, bounds if len(bounds) == 2 else (None, None))
    return Estimate(as_number(result.get(name)), low, high)
