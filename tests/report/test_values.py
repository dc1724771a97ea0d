from __future__ import annotations

import pytest

from fasttrain_report import words
from fasttrain_report.values import Estimate, mean_interval, over_seeds


def test_intervals_say_which_bound_is_open():
    assert Estimate(0.5, 0.4503, 0.5628).interval(words.percent) == "[45.0, 56.3]"
    assert Estimate(2.0, 1.5).interval(words.times) == "[1.50, ∞]"
    assert Estimate(2.0).interval(words.number) == ""


def test_mean_over_seeds():
    assert mean_interval([3.0]) == Estimate(3.0)
    assert mean_interval([1.0, 3.0])[:3] == pytest.approx((2.0, 2.0 - 12.7062, 2.0 + 12.7062), rel=1e-4)
    assert over_seeds([Estimate(3.0, 2.0, 4.0), Estimate(None)]) == Estimate(3.0, 2.0, 4.0)
    assert over_seeds([Estimate(1.0), Estimate(3.0)]) == mean_interval([1.0, 3.0])
    assert over_seeds([]) == Estimate(None)
