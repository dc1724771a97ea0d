"""From many episodes to a curve: equal groups of them, their mean and spread. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_BINS = 100  # more points than a 420 pt wide chart resolves make the page larger, not clearer
EPISODES_PER_BIN = 20
QUANTILES = (0.1, 0.9)
Z_95 = 1.959964


class Curve(NamedTuple):
    """A value over x with the bounds of its band."""

    x: Floats
    y: Floats
    low: Floats
    high: Floats


def groups(count: int, most: int = MOST_BINS) -> list[slice]:
    """Consecutive stretches of `count` observations, each of about `EPISODES_PER_BIN` or more; at most `most`."""
    if count == 0:
        return []
    bins = max(min(count, 8), min(most, count // EPISODES_PER_BIN))
    edges = np.linspace(0, count, bins + 1).astype(int).tolist()
    return [slice(low, high) for low, high in pairwise(edges)]


def spread_curve(x: Floats, y: Floats, most: int = MOST_BINS) -> Curve:
    """Mean and the middle 80 % of `y` along `x`."""
    parts = groups(len(x), most)
    bounds = [np.quantile(y[part], QUANTILES) for part in parts]
    return Curve(
        np.array([x[part].mean() for part in parts]),
        np.array([y[part].mean() for part in parts]),
        np.array([low for low, _ in bounds]),
        np.array([high for _, high in bounds]),
    )


def rate_curve(x: Floats, hits: Floats, most: int = MOST_BINS) -> Curve:
    """Share of hits along `x` with Wilson's 95 % interval of each stretch."""
    parts = groups(len(x), most)
    counts = np.array([part.stop - part.start for part in parts], dtype=np.float64)
    rates = np.array([hits[part].mean() for part in parts])
    middle = (rates + Z_95**2 / (2 * counts)) / (1 + Z_95**2 / counts)
    half = Z_95 / (1 + Z_95**2 / counts) * np.sqrt(rates * (1 - rates) / counts + Z_95**2 / (4 * counts**2))
    return Curve(np.array([x[part].mean() for part in parts]), rates, middle - half, middle + half)


def name_shares(x: Floats, names: Sequence[str], most: int) -> tuple[Floats, dict[str, Floats]]:
    """Shares of the `most` commonest names along `x`; the others together as `others`."""
    totals = Counter(names)
    kept = [name for name, _ in totals.most_common(most if len(totals) <= most else most - 1)]
    parts = groups(len(x))
    at = np.array([x[part].mean() for part in parts])
    counted = [Counter(names[part]) for part in parts]
    lengths = np.array([part.stop - part.start for part in parts], dtype=np.float64)
    shares = {name: np.array([count[name] for count in counted]) / lengths for name in kept}
    if len(kept) < len(totals):
        shares["others"] = 1.0 - sum(shares.values(), np.zeros(len(parts)))
    return at, shares


def across_seeds(curves: Sequence[Curve], points: int = 80) -> Curve | None:
    """Mean of several runs' curves on the stretch of x that all of them have, with Student's 95 % interval.

    One run has no interval: its band is the line itself. None where there is nothing in common.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return None
    low, high = max(float(c.x[0]) for c in curves), min(float(c.x[-1]) for c in curves)
    if not low <= high:
        return None
    at = np.linspace(low, high, points)
    values = np.array([np.interp(at, curve.x, curve.y) for curve in curves])
    mean = values.mean(axis=0)
    if len(curves) == 1:
        return Curve(at, mean, mean, mean)
    from scipy.special import stdtrit  # scipy.stats takes half a second to load

    half = float(stdtrit(len(curves) - 1, 0.975)) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return Curve(at, mean, mean - half, mean + half)


def pareto_front(speed: Sequence[float], quality: Sequence[float]) -> list[int]:
    """Indices of what nothing else beats in both, by rising speed."""
    order = sorted(range(len(speed)), key=lambda i: (-speed[i], -quality[i]))
    front: list[int] = []
    best = -np.inf
    for index in order:
        if quality[index] > best:
            front.append(index)
            best = quality[index]
    return front[::-1]


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean and Student's 95 % interval; one value has none."""
    array = np.array(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, None, None
    from scipy.special import stdtrit

    half = float(stdtrit(len(array) - 1, 0.975)) * float(array.std(ddof=1)) / len(array) ** 0.5
    return mean, mean - half, mean + half
