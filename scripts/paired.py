"""Statistics of paired training runs: pure functions, tested against known truths in tests/test_scripts_learning.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MIN_PAIRS = 10  # fewer seeds are no proof of equality, whatever their interval says
RESAMPLES = 10_000
PASS, FAIL, OPEN = "pass", "fail", "not enough seeds"


@dataclass(frozen=True)
class Comparison:
    """Candidate minus baseline over the seeds that both have."""

    pairs: int
    baseline: float
    candidate: float
    difference: float
    low: float  # Student's 95 % interval of the mean difference, which decides: at 10 seeds the bootstrap is too narrow
    high: float
    bootstrap: tuple[float, float]  # percentile bootstrap over seeds, shown beside it
    margin: float
    verdict: str


def compare(
    baseline: Mapping[int, float], candidate: Mapping[int, float], margin: float, min_pairs: int = MIN_PAIRS
) -> Comparison:
    """Non-inferiority of `candidate` by a `margin` > 0 in the unit of the values; keys are seeds.

    pass: the lower bound lies above -margin and there are `min_pairs` seeds. fail: the upper bound lies below -margin.
    Everything else is "not enough seeds".

    Raises:
        ValueError: no seed in common.
    """
    seeds = sorted(baseline.keys() & candidate.keys())
    if not seeds:
        raise ValueError("no seed that both sides have")
    ours = np.array([candidate[seed] for seed in seeds], dtype=np.float64)
    theirs = np.array([baseline[seed] for seed in seeds], dtype=np.float64)
    differences = ours - theirs
    low, high = t_interval(differences)
    verdict = OPEN
    if high < -margin:
        verdict = FAIL
    elif low > -margin and len(seeds) >= min_pairs:
        verdict = PASS
    return Comparison(
        pairs=len(seeds),
        baseline=float(theirs.mean()),
        candidate=float(ours.mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        bootstrap=bootstrap_interval(differences),
        margin=margin,
        verdict=verdict,
    )


def t_interval(values: np.ndarray) -> tuple[float, float]:
    """Student's 95 % interval of the mean; of a single value, everything."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean - half, mean + half


def bootstrap_interval(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap, 95 %, of the mean."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def margin_of(baseline: Mapping[int, float], is_rate: bool) -> float:
    """3 percentage points of a win rate, 5 % of the size of a mean reward."""
    return 0.03 if is_rate else 0.05 * abs(sum(baseline.values()) / len(baseline))


def learning_curve(env_steps: Sequence[float], values: Sequence[float], total: float, bins: int = 50) -> list[float]:
    """Mean value of the episodes that ended in each of `bins` equal shares of the `total` env steps.

    A share in which no episode ended repeats the one before it; the first ones, the first that has any. No episode at
    all: no curve. The mean of the curve is the area under it, divided by its width.
    """
    if not len(values):
        return []
    which = np.minimum((np.asarray(env_steps, dtype=np.float64) - 1) * bins // total, bins - 1).astype(np.int64)
    counts = np.bincount(which, minlength=bins)
    sums = np.bincount(which, weights=np.asarray(values, dtype=np.float64), minlength=bins)
    filled = np.flatnonzero(counts)
    means = sums[filled] / counts[filled]
    return [float(x) for x in means[np.maximum(np.searchsorted(filled, np.arange(bins), side="right") - 1, 0)]]


def trail(values: Sequence[float], window: int = 100, levels: int = 100) -> list[tuple[int, float]]:
    """When the mean of the last `window` values rose to a new best: (index, best), in steps of its rise ÷ `levels`."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < window:
        return []
    sums = np.concatenate([[0.0], np.cumsum(array)])
    best = np.maximum.accumulate((sums[window:] - sums[:-window]) / window)
    rise = float(best[-1] - best[0])
    level = np.floor((best - best[0]) / rise * levels) if rise else np.zeros(len(best))
    _, first = np.unique(level, return_index=True)
    return [(int(index) + window - 1, float(best[index])) for index in first]


def median_time(times: Sequence[float | None], seed: int = 0) -> tuple[float, float, float]:
    """When half of the runs had got there, with a 95 % bootstrap interval; None and infinity: never.

    Order statistics only, because an infinity cannot be averaged.
    """
    values = np.sort(np.array([math.inf if time is None else time for time in times], dtype=np.float64))
    middle = (len(values) - 1) // 2
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    medians = np.sort(np.sort(drawn, axis=1)[:, middle])  # of ranks: `values` is sorted
    return (
        float(values[middle]),
        float(values[medians[int(0.025 * RESAMPLES)]]),
        float(values[medians[int(0.975 * RESAMPLES)]]),
    )
