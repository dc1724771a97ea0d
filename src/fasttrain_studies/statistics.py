"""Statistics of training runs with several seeds: pure functions, tested against known truths.

Candidate and baseline train with the same seeds. The differences within these pairs decide the verdict. Other figures
are only shown, with an interval.
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
MIN_PAIRS = 5  # fewest seeds for the verdict "pass"
MIN_SPEED_UP = 1.1  # smallest speed-up that justifies trade-offs
MOST_PAIRS = 1000  # largest result of seeds_needed
RESAMPLES = 10_000
PASS, FAIL, OPEN = "pass", "fail", "not enough seeds"
WIN_RATE_MARGIN = 0.03
REWARD_MARGIN = 0.05  # margin as a share of the baseline's mean reward
# In zero-sum games 5 % of the mean reward is about 0, too small a margin. So if |mean| is below NEAR_ZERO standard
# deviations over the baseline's seeds, the margin is SPREAD_MARGIN of them: then about ten seeds give a verdict.
NEAR_ZERO, SPREAD_MARGIN = 1.0, 1.5
TINY = 1e-9  # smallest margin, for the case that all values are zero
SLIGHT = 0.05  # smallest gain in speed that justifies a setting
NOISE = 0.03  # speeds of a few short runs on a shared machine differ by this share without a cause


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval. With one observation the bounds are infinite."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Ratio(Interval):
    """The speed of one configuration ÷ the speed of a second configuration. Their trainings took turns."""

    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the two speeds differ by more than noise; False with one pair."""
        return self.pairs > 1 and (self.low > 1 or self.high < 1) and abs(self.value - 1) > NOISE

    @property
    def alike(self) -> bool:
        """Whether the upper bound of the gain in speed is at most `SLIGHT`; False with one pair."""
        return self.pairs > 1 and self.high <= 1 + SLIGHT

    def text(self) -> str:
        """`1.31× [1.28, 1.36]`."""
        return with_interval(self.value, (self.low, self.high), "{:.2f}×")


@dataclass(frozen=True)
class Comparison:
    """Candidate minus baseline over the seeds with results of both."""

    pairs: int
    baseline: float
    candidate: float
    difference: float
    low: float  # Student's 95 % interval of the mean difference decides; for 10 seeds the bootstrap is too narrow
    high: float
    bootstrap: tuple[float, float]  # percentile bootstrap over seeds, for information
    margin: float
    verdict: str
    seeds_needed: int | None  # if not enough: about how many seeds give a verdict, if both learn equally well


def compare(
    baseline: Mapping[int, float], candidate: Mapping[int, float], margin: float, min_pairs: int = MIN_PAIRS
) -> Comparison:
    """Test whether `candidate` is worse than `baseline` by no more than `margin` > 0 (non-inferiority). Keys are seeds.

    pass: the lower bound lies above -margin and there are `min_pairs` seeds. fail: the upper bound lies below -margin.
    In all other cases: "not enough seeds". If a candidate is worse by exactly the margin, 2.5 % of all studies fail and
    2.5 % pass (for normal differences). Raises ValueError if the sides have no seed in common.
    """
    seeds = sorted(baseline.keys() & candidate.keys())
    if not seeds:
        raise ValueError("no seed that both sides have")
    ours = np.array([candidate[seed] for seed in seeds], dtype=np.float64)
    theirs = np.array([baseline[seed] for seed in seeds], dtype=np.float64)
    differences = ours - theirs
    low, high = t_interval(differences)
    verdict, needed = OPEN, None
    if high < -margin and len(seeds) > 2:  # with two seeds both differences may be chance
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
    """Number of pairs with which a candidate as good as the baseline passes with probability 0.8, by the power of
    Student's test (noncentral t distribution). None if there is only one difference.
    """
    if len(differences) < 2 or margin <= 0:
        return None
    spread = float(np.std(differences, ddof=1))
    pairs = np.arange(max(2, min_pairs), MOST_PAIRS + 1)
    power = stats.nct.sf(stats.t.ppf(0.975, pairs - 1), pairs - 1, margin * np.sqrt(pairs) / max(spread, 1e-12))
    enough = np.flatnonzero(~(power < 0.8))  # for large values scipy's power is NaN
    return int(pairs[enough[0]]) if len(enough) else MOST_PAIRS


def t_interval(values: Floats) -> tuple[float, float]:
    """Student's 95 % interval of the mean; infinite bounds for a single value."""
    mean, half = map(float, student(values))
    return mean - half, mean + half


def interquartile_mean(values: Floats, axis: int = -1) -> Any:
    """Mean of the middle half. One failed seed hardly changes it (Agarwal et al. 2021, "statistical precipice")."""
    return stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(
    values: Floats, statistic: Callable[..., Any] = np.mean, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile bootstrap of a `statistic`, which takes rows (resamples, n) and an `axis`."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(statistic(values[drawn], axis=-1), [2.5, 97.5])
    return float(low), float(high)


def interval_of(values: Floats) -> Interval:
    """The interquartile mean of several runs with a bootstrap interval, which is infinite for one run."""
    bounds = bootstrap_interval(values, interquartile_mean, 2000) if len(values) > 1 else (-math.inf, math.inf)
    return Interval(float(interquartile_mean(values)), *bounds)


def ratio_interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """The median of the paired ratios ours ÷ theirs with a 95 % bootstrap. None if no seed has both speeds."""
    seeds = sorted(seed for seed in ours.keys() & theirs.keys() if ours[seed] and theirs[seed])
    if not seeds:
        return None
    ratios = np.array([ours[seed] / theirs[seed] for seed in seeds], dtype=np.float64)
    bounds = bootstrap_interval(ratios, np.median, 2000) if len(ratios) > 1 else (-math.inf, math.inf)
    return Ratio(float(np.median(ratios)), *bounds, pairs=len(seeds))


def margin_of(baseline: Mapping[int, float], is_rate: bool) -> float:
    """The margin: 3 percentage points of a win rate; 5 % of a mean reward, or by the spread of seeds if near zero."""
    if is_rate:
        return WIN_RATE_MARGIN
    values = np.array([*baseline.values()], dtype=np.float64)
    mean, spread = abs(float(values.mean())), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return max(SPREAD_MARGIN * spread if mean < NEAR_ZERO * spread else REWARD_MARGIN * mean, TINY)


def learning_curve(env_steps: Sequence[float], values: Sequence[float], total: float, bins: int = 50) -> list[float]:
    """Mean value of the episodes that ended in each of `bins` equal shares of the `total` env steps.

    A share without an episode gets the mean of the share before; shares before the first episode get the first mean.
    The curve is empty without episodes. The mean of the curve is the area under it, divided by its width.
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
    """The rise of the running mean over `window` values, as at most `levels` + 1 pairs (index, best mean so far)."""
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
    """The time at which half of the runs had reached a threshold, with a 95 % bootstrap interval. None: never.

    Only order statistics are used, because an infinite time cannot be averaged.
    """
    values = np.sort(np.array([math.inf if time is None else time for time in times], dtype=np.float64))
    middle = (len(values) - 1) // 2
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    medians = np.sort(np.sort(drawn, axis=1)[:, middle])  # indices into the sorted `values`
    ends = (float(values[medians[int(share * RESAMPLES)]]) for share in (0.025, 0.975))
    return Interval(float(values[middle]), *ends)
