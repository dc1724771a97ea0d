"""Statistics of training runs with several seeds: pure functions, tested against known truths.

A seed is a pair: candidate and baseline train with the same one. Differences within pairs decide; everything else is
shown beside them with an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fasttrain.intervals import student
from fasttrain.terminal import with_interval

Floats = NDArray[np.float64]
MIN_PAIRS = 5  # fewer seeds are no proof of equality, whatever their interval says
MIN_SPEED_UP = 1.1  # below it a candidate is not worth its trade-offs
MOST_PAIRS = 1000  # that seeds_needed speaks of
RESAMPLES = 10_000
PASS, FAIL, OPEN = "pass", "fail", "not enough seeds"
WIN_RATE_MARGIN = 0.03
REWARD_MARGIN = 0.05  # of the size of the baseline's mean reward
# Of rewards around zero, as those of zero-sum games, 5 % of the mean vanish. There the margin goes by the standard
# deviation of the baseline's seeds: so large that, as with win rates whose seeds differ by 2 points, ten seeds tell.
NEAR_ZERO, SPREAD_MARGIN = 1.0, 1.5
TINY = 1e-9  # of what is zero in every run, equals are equal
SLIGHT = 0.05  # a gain that is not worth a flag
NOISE = 0.03  # by which the medians of a few short cells on a shared machine differ without a cause


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; the bounds of what was seen once are infinite."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Ratio(Interval):
    """Speed of one setting ÷ speed of another, from cells that ran in turn."""

    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the two differ by more than noise: every turn says so, and by enough. One turn says nothing."""
        return self.pairs > 1 and (self.low > 1 or self.high < 1) and abs(self.value - 1) > NOISE

    @property
    def alike(self) -> bool:
        """Whether the first is surely not faster by more than `SLIGHT`."""
        return self.pairs > 1 and self.high <= 1 + SLIGHT

    def text(self) -> str:
        """`1.31× [1.28, 1.36]`."""
        return with_interval(self.value, (self.low, self.high), "{:.2f}×")


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
    seeds_needed: int | None  # for an open verdict: about how many would do, if the two are alike


def compare(
    baseline: Mapping[int, float], candidate: Mapping[int, float], margin: float, min_pairs: int = MIN_PAIRS
) -> Comparison:
    """Non-inferiority of `candidate` by a `margin` > 0 in the unit of the values; keys are seeds.

    pass: the lower bound lies above -margin and there are `min_pairs` seeds. fail: the upper bound lies below -margin.
    Everything else is "not enough seeds". With normal differences a candidate that is worse by just the margin fails in
    2.5 % of all studies and passes in 2.5 %; that of equal ones fewer fail is tested with real spreads. Raises
    ValueError: no seed in common.
    """
    seeds = sorted(baseline.keys() & candidate.keys())
    if not seeds:
        raise ValueError("no seed that both sides have")
    ours = np.array([candidate[seed] for seed in seeds], dtype=np.float64)
    theirs = np.array([baseline[seed] for seed in seeds], dtype=np.float64)
    differences = ours - theirs
    low, high = t_interval(differences)
    verdict, needed = OPEN, None
    if high < -margin and len(seeds) > 2:  # of two seeds, one may be what is called luck
        verdict = FAIL
    elif low > -margin and len(seeds) >= min_pairs:
        verdict = PASS
    else:
        needed = min_pairs if low > -margin else seeds_needed(differences, margin, min_pairs)
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
        seeds_needed=needed,
    )


def seeds_needed(differences: Floats, margin: float, min_pairs: int = MIN_PAIRS) -> int | None:
    """Pairs with which two equals of this spread pass four times in five; None where the spread is not known.

    The power of Student's test, by the noncentral t distribution.
    """
    if len(differences) < 2 or margin <= 0:
        return None
    spread = float(np.std(differences, ddof=1))
    pairs = np.arange(max(2, min_pairs), MOST_PAIRS + 1)
    power = stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, margin * np.sqrt(pairs) / max(spread, 1e-12))
    enough = np.flatnonzero(~(power < 0.8))  # far beyond, scipy's tail is not a number
    return int(pairs[enough[0]]) if len(enough) else MOST_PAIRS


def t_interval(values: Floats) -> tuple[float, float]:
    """Student's 95 % interval of the mean; of a single value, everything."""
    mean, half = map(float, student(values))
    return mean - half, mean + half


def interquartile_mean(values: Floats, axis: int = -1) -> Any:
    """Mean of the middle half: little moved by one seed that failed (Agarwal et al. 2021, "statistical precipice")."""
    return stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(
    values: Floats, statistic: Callable[..., Any] = np.mean, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap, 95 %, of a `statistic`, which is given rows (resamples, n) and an `axis`."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(statistic(values[drawn], axis=-1), [2.5, 97.5])
    return float(low), float(high)


def interval_of(values: Floats) -> Interval:
    """The interquartile mean of what runs with several seeds gave, with its bootstrap; of one, everything."""
    bounds = bootstrap_interval(values, interquartile_mean, 2000) if len(values) > 1 else (-math.inf, math.inf)
    return Interval(float(interquartile_mean(values)), *bounds)


def ratio_interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """Median of the paired ratios ours ÷ theirs, with a 95 % bootstrap: one disturbed cell moves it little.

    None where no seed has a speed on both sides.
    """
    seeds = sorted(seed for seed in ours.keys() & theirs.keys() if ours[seed] and theirs[seed])
    if not seeds:
        return None
    ratios = np.array([ours[seed] / theirs[seed] for seed in seeds], dtype=np.float64)
    bounds = bootstrap_interval(ratios, np.median, 2000) if len(ratios) > 1 else (-math.inf, math.inf)
    return Ratio(float(np.median(ratios)), *bounds, pairs=len(seeds))


def margin_of(baseline: Mapping[int, float], is_rate: bool) -> float:
    """3 percentage points of a win rate, 5 % of the size of a mean reward; of one near zero, by the spread of seeds."""
    if is_rate:
        return WIN_RATE_MARGIN
    values = np.array([*baseline.values()], dtype=np.float64)
    mean, spread = abs(float(values.mean())), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return max(SPREAD_MARGIN * spread if mean < NEAR_ZERO * spread else REWARD_MARGIN * mean, TINY)


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


def median_time(times: Sequence[float | None], seed: int = 0) -> Interval:
    """When half of the runs had got there, with a 95 % bootstrap interval; None and infinity: never.

    Order statistics only, because an infinity cannot be averaged.
    """
    values = np.sort(np.array([math.inf if time is None else time for time in times], dtype=np.float64))
    middle = (len(values) - 1) // 2
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    medians = np.sort(np.sort(drawn, axis=1)[:, middle])  # of ranks: `values` is sorted
    ends = (float(values[medians[int(share * RESAMPLES)]]) for share in (0.025, 0.975))
    return Interval(float(values[middle]), *ends)
