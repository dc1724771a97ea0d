from __future__ import annotations

import numpy as np
import pytest

from fasttrain.runs.progress import LearningCurve, Moments, fit_line


def test_moments_are_those_of_numpy():
    values = np.random.default_rng(0).normal(1e6, 2.0, 500)
    moments = Moments()
    assert moments.error == np.inf
    for value in values.tolist():
        moments.add(value)
    assert (moments.count, moments.mean) == (500, pytest.approx(values.mean()))
    assert moments.error == pytest.approx(values.std(ddof=1) / np.sqrt(500))


def test_a_line_through_weighted_points():
    line = fit_line([(0.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 3.0, 2.0), (2.0, 5.0, 1.0)])
    assert line is not None
    assert (line.slope, line.residual) == (pytest.approx(2.0), pytest.approx(0.0))
    assert line.error(5.0) == pytest.approx(np.sqrt(5.0 / (1 + 3 * 0 + 1)))
    assert fit_line([]) is None
    assert fit_line([(1.0, 1.0, 1.0), (1.0, 2.0, 1.0)]) is None


def curve_of(
    rewards: np.ndarray, seconds_each: float = 1.0, total: int = 100_000, steps_each: int = 100
) -> LearningCurve:
    curve = LearningCurve(total)
    for number, reward in enumerate(rewards.tolist(), start=1):
        curve.add(number * steps_each, number * seconds_each, reward)
    return curve


def test_the_slope_is_that_of_the_recent_quarter():
    episodes = np.arange(1000)
    rewards = np.where(episodes < 700, 0.0, (episodes - 700) * 0.1) + np.random.default_rng(0).normal(0, 1.0, 1000)
    slope = curve_of(rewards).slope_per_hour()
    assert slope == pytest.approx(0.1 * 3600, rel=0.05), "0.1 per episode of one second"


def test_no_slope_where_it_means_nothing():
    noise = np.random.default_rng(1)
    assert LearningCurve(1000).slope_per_hour() is None
    assert curve_of(np.arange(300.0)).slope_per_hour() is None, "75 episodes are too few"
    assert curve_of(np.arange(400.0)).slope_per_hour() == pytest.approx(3600.0)
    level = [curve_of(noise.normal(5, 1.0, 1000)).slope_per_hour() for _ in range(40)]
    assert sum(slope is not None for slope in level) <= 6, "noise around a level is no slope"
    assert curve_of(np.arange(1000.0), total=10**8).slope_per_hour() is None, "one stretch has no slope"


def test_reward_per_hour_is_last_fifth_minus_first_fifth():
    rewards = np.repeat([1.0, 7.0, 2.0, 9.0, 4.0], 200)
    # Middles of the fifths: 800 episodes of 9 s, that is two hours, apart.
    assert curve_of(rewards, seconds_each=9.0).reward_per_hour() == pytest.approx((4 - 1) / 2, rel=0.01)


def test_reward_per_hour_counts_only_what_was_trained():
    """A run that was stopped after a tenth of its horizon."""
    rewards = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 20)
    curve = curve_of(rewards, seconds_each=45.0)
    assert curve.reward_per_hour() == pytest.approx(4.0, rel=0.02)


def test_reward_per_hour_is_unknown_from_too_few_episodes():
    assert LearningCurve(1000).reward_per_hour() is None
    assert curve_of(np.ones(40), total=4000).reward_per_hour() is None
    assert curve_of(np.ones(60), total=6000).reward_per_hour() == 0.0


def test_memory_is_bounded():
    curve = LearningCurve(1_000_000)
    for number in range(50_000):
        curve.add(number * 20, float(number), 0.0)
    assert len(curve._stretches) == 1000
