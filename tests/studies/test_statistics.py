from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fasttrain_studies import statistics
from fasttrain_studies.statistics import (
    Interval,
    bootstrap_interval,
    compare,
    interquartile_mean,
    interval_of,
    learning_curve,
    margin_of,
    median_time,
    ratio_interval,
    seeds_needed,
    t_interval,
    trail,
)


def by_seed(values: Any) -> dict[int, float]:
    return {seed: float(value) for seed, value in enumerate(values)}


def test_t_interval_is_the_textbooks() -> None:
    """Of 1 … 5: mean 3, standard error √0.5, t(0.975, 4) = 2.776445."""
    half = 2.776445 * math.sqrt(0.5)
    assert t_interval(np.arange(1.0, 6.0)) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert t_interval(np.array([2.0])) == (-math.inf, math.inf)
    assert t_interval(np.full(4, 2.0)) == (2.0, 2.0)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """2,000 samples of 10 normal values: 95 % ± 1.5 (three standard errors); the percentile bootstrap about 90 %."""
    samples = np.random.default_rng(1).normal(1.0, 2.0, (2000, 10))
    assert np.mean([low < 1 < high for low, high in map(t_interval, samples)]) == pytest.approx(0.95, abs=0.015)
    narrow = np.mean([low < 1 < high for low, high in (bootstrap_interval(s, resamples=300) for s in samples[:200])])
    assert 0.83 < narrow < 0.95
    rng, covered = np.random.default_rng(1), 0
    for study in range(200):
        low, high = bootstrap_interval(rng.normal(1.0, 1.0, 20), interquartile_mean, resamples=300, seed=study)
        covered += low < 1.0 < high
    assert 0.86 <= covered / 200 <= 0.98


def test_bootstrap_of_the_mean_matches_its_normal_limit() -> None:
    values = np.random.default_rng(0).normal(5.0, 3.0, 400)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert bootstrap_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert bootstrap_interval(values) == bootstrap_interval(values)


@pytest.mark.parametrize(
    ("difference", "spread", "verdict"),
    [
        (0.0, 0.5, "pass"),
        (-0.5, 0.5, "pass"),  # a little worse, surely within the margin
        (+3.0, 0.5, "pass"),
        (-2.0, 0.5, "fail"),
        (-1.0, 0.5, "not enough seeds"),  # on the margin
        (0.0, 9.0, "not enough seeds"),  # all noise
    ],
)
def test_verdict_of_known_differences(difference: float, spread: float, verdict: str) -> None:
    """10 seeds whose differences have exactly this mean and spread; margin 1."""
    wave = np.tile([-1.0, 1.0], 5)
    baseline = np.linspace(50, 150, 10)  # seeds differ far more than sides do: pairing removes it
    result = compare(by_seed(baseline), by_seed(baseline + difference + spread * wave), margin=1.0)
    assert (result.verdict, result.pairs) == (verdict, 10)
    assert result.difference == pytest.approx(difference)


def test_few_seeds_never_pass_but_may_fail_and_only_common_ones_are_compared() -> None:
    assert compare(by_seed([1, 2, 3]), by_seed([1, 2, 3]), margin=1.0).verdict == "not enough seeds"
    assert compare(by_seed([10, 20, 30]), by_seed([0, 10, 20]), margin=1.0).verdict == "fail"
    assert compare(by_seed([0.6, 0.6]), by_seed([0.1, 0.1]), margin=0.03).verdict == "not enough seeds"
    result = compare({0: 1.0, 1: 2.0, 5: 100.0}, {0: 2.0, 1: 3.0, 7: -100.0}, margin=1.0)
    assert (result.pairs, result.baseline, result.candidate, result.difference) == (2, 1.5, 2.5, 1.0)
    with pytest.raises(ValueError, match="no seed"):
        compare({0: 1.0}, {1: 1.0}, margin=1.0)


def test_an_open_verdict_says_how_many_seeds_would_do() -> None:
    noisy = compare(by_seed([0.5, 0.6, 0.4, 0.7, 0.5]), by_seed([0.6, 0.5, 0.5, 0.5, 0.6]), margin=0.03)
    assert noisy.verdict == "not enough seeds"
    assert noisy.seeds_needed > 100
    for seeds, candidate, needed in ((5, 0.5, None), (1, 0.5, None), (3, 0.6, 5)):  # the last: good, but too few
        assert compare(by_seed([0.5] * seeds), by_seed([candidate] * seeds), margin=0.03).seeds_needed == needed


def test_margin_is_of_the_rate_or_of_the_size_of_the_reward() -> None:
    assert margin_of({0: 0.4, 1: 0.6}, is_rate=True) == 0.03
    assert margin_of({0: -80.0, 1: -120.0}, is_rate=False) == pytest.approx(5.0)


def test_curve_averages_shares_of_the_steps_and_fills_gaps() -> None:
    curve = learning_curve([11, 20, 40, 100], [1.0, 3.0, 5.0, 7.0], total=100, bins=10)
    #        1-10 (none yet) 11-20 21-30 (as before) 31-40 … 91-100
    assert curve == [2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 7.0]
    assert learning_curve([], [], total=100) == []
    late = learning_curve([50, 130], [1.0, 3.0], total=100, bins=2)
    assert late == [1.0, 3.0]  # an episode beyond the end counts to the last share


def test_trail_finds_when_the_running_mean_first_came_to_a_level() -> None:
    found = trail([0.0] * 100 + [1.0] * 100 + [0.0] * 300)
    assert found[0] == (99, 0.0)
    assert next(at for at, best in found if best >= 0.5) == 149
    assert found[-1] == (199, pytest.approx(1.0))
    assert trail([1.0] * 99) == []
    assert trail([2.0] * 150) == [(99, 2.0)]
    assert len(trail(np.random.default_rng(0).random(5000).cumsum())) <= 101


def test_median_time_is_an_order_statistic_and_knows_never() -> None:
    assert median_time([3.0, 1.0, 2.0]).value == 2.0
    assert median_time([1.0, 2.0, 3.0, None]).value == 2.0  # half of the runs had got there
    assert median_time([1.0, 2.0, None, None, None]) == Interval(math.inf, 1.0, math.inf)
    found = median_time([float(value) for value in range(1, 100)])
    assert found.value == 50.0  # ranks of the binomial interval of a median of 99: 50 ± 1.96 · √99 / 2
    assert (found.low, found.high) == pytest.approx((40, 60), abs=1)


def test_what_is_shown_is_the_middle_half_or_a_median_of_pairs() -> None:
    assert interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0, 4.0, 5.0, -50.0])) == pytest.approx(2.5)
    assert interval_of(np.array([2.0])) == Interval(2.0, -math.inf, math.inf)
    assert interval_of(np.array([0.0, 2.0, 2.0, 99.0])).value == 2.0
    found = ratio_interval({0: 20.0, 1: 30.0, 2: 1.0, 9: 5.0}, {0: 10.0, 1: 10.0, 2: 10.0})
    assert (found.value, found.pairs, found.low, found.high) == (2.0, 3, 0.1, 3.0)
    assert ratio_interval({0: 1.0}, {1: 1.0}) is None


STUDIES = 500
# Spreads between seeds as they are: final win rates of Skull King, DQN's tails in CartPole (long) and, in two groups,
# a greedy policy that is either perfect or useless.
SPREADS = {
    "normal": lambda rng, count: rng.normal(0.6, 0.02, count),
    "long tail": lambda rng, count: 0.6 - rng.exponential(0.02, count),
    "two groups": lambda rng, count: rng.choice([0.3, 0.6], count, p=[0.2, 0.8]),
}


def verdicts(spread: str, shift: float, seeds: int, margin: float = 0.03) -> dict[str, float]:
    """Shares of each verdict among studies whose candidate is truly `shift` better than the baseline."""
    rng, draw = np.random.default_rng(seeds), SPREADS[spread]
    beside = {"seeds_needed": lambda *_: None, "bootstrap_interval": lambda *_: None}  # most of the time, no verdict
    with mock.patch.multiple(statistics, **beside):
        found = [
            compare(by_seed(draw(rng, seeds)), by_seed(draw(rng, seeds) + shift), margin).verdict
            for _ in range(STUDIES)
        ]
    return {verdict: found.count(verdict) / STUDIES for verdict in ("pass", "fail", "not enough seeds")}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_an_equal_candidate_hardly_ever_fails_and_one_worse_by_the_margin_hardly_ever_passes(spread: str, seeds: int):
    """At most 5 % each; drawn without pairing, the worst."""
    assert verdicts(spread, 0.0, seeds)["fail"] <= 0.05
    assert verdicts(spread, -0.03, seeds)["pass"] <= 0.05


def test_twice_the_margin_is_found_with_as_many_seeds_as_were_said_to_do():
    """Power of at least 80 % at twice the margin: 10 pairs where seeds differ by two thirds of it (normal, 0.02)."""
    wanted = seeds_needed(np.tile([-1.0, 1.0], 500) * 0.02 * math.sqrt(2), 0.03)
    assert wanted == 10
    assert verdicts("normal", -0.06, wanted)["fail"] >= 0.8
    assert verdicts("normal", 0.0, wanted)["pass"] >= 0.8
    assert verdicts("normal", -0.06, 3)["pass"] == 0.0, "three seeds prove nothing"


def test_near_zero_reward_the_margin_goes_by_the_spread_of_seeds(monkeypatch: pytest.MonkeyPatch):
    """A zero-sum game: equals pass with ten seeds four times in five, one worse by the margin hardly ever."""
    monkeypatch.setattr(statistics, "bootstrap_interval", lambda differences: (0.0, 0.0))  # is no part of a verdict
    rng, passed = np.random.default_rng(0), {0.0: 0, 0.3: 0, 0.6: 0}
    for worse in passed:
        for _ in range(50):
            theirs, ours = by_seed(rng.normal(0.0, 0.2, 10)), by_seed(rng.normal(-worse, 0.2, 10))
            passed[worse] += compare(theirs, ours, margin_of(theirs, is_rate=False)).verdict == "pass"
    assert passed[0.0] >= 35
    assert passed[0.3] <= 5
    assert passed[0.6] == 0
    nothing = by_seed([0.0] * 5)
    assert compare(nothing, nothing, margin_of(nothing, is_rate=False)).verdict == "pass"
