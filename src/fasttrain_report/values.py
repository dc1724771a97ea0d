"""Reads numbers, lists and figures with intervals from JSON files that may be incomplete or wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fasttrain.intervals import student


def as_number(value: Any) -> float | None:
    """The value as a finite number, else None."""
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
    """The objects of a list; empty if the value is no list."""
    return [dict(row) for row in as_list(value) if isinstance(row, Mapping)]


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


class Estimate(NamedTuple):
    """A value with its interval. A number that the run's file lacks is None."""

    value: float | None
    low: float | None = None
    high: float | None = None
    never: bool = False  # True: stored without a value, for example because a threshold was never reached

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends of the interval, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @classmethod
    def of(cls, value: object) -> Estimate:
        """A number, or `{"value" (or "difference"), "low", "high"}`; an infinite bound is null in JSON."""
        if not isinstance(value, Mapping):
            return cls(as_number(value))
        middle = as_number(value.get("value", value.get("difference")))
        return cls(middle, as_number(value.get("low")), as_number(value.get("high")), middle is None)

    def interval(self, form: Callable[[float], str]) -> str:
        """A text such as `[2.03, 2.49]`. A missing bound is infinite; without both bounds the text is empty."""
        if self.low is None and self.high is None:
            return ""
        ends = zip((self.low, self.high), ("−∞", "∞"), strict=True)
        return f"[{', '.join(no if end is None else form(end).rstrip(' %×') for end, no in ends)}]"


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean and Student's 95 % interval; a single value has no interval."""
    mean, half = map(float, student(np.array(values, dtype=np.float64)))
    return Estimate(mean, mean - half, mean + half) if len(values) > 1 else Estimate(mean)


def over_seeds(figures: Iterable[Estimate]) -> Estimate:
    """Mean and interval over runs; a single run keeps its interval over episodes."""
    known = [(each, each.value) for each in figures if each.value is not None]
    return mean_interval([value for _, value in known]) if len(known) > 1 else known[0][0] if known else Estimate(None)


def quality_of(summary: Mapping[str, Any], name: str) -> Estimate:
    """A figure of a run's final greedy policy, from its summary.json."""
    return quality_in(as_mapping(summary.get("quality")), name)


def quality_in(result: Mapping[str, Any], name: str) -> Estimate:
    """The figure `name` of an evaluation's results, with its interval in `ci95`."""
    bounds = as_list(as_mapping(result.get("ci95")).get(name))
    low, high = map(as_number, bounds if len(bounds) == 2 else (None, None))
    return Estimate(as_number(result.get(name)), low, high)
