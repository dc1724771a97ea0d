from __future__ import annotations

import math

import numpy as np
import pytest

from fasttrain.report.curves import (
    Curve,
    across_seeds,
    groups,
    mean_interval,
    name_shares,
    pareto_front,
    rate_curve,
    spread_curve,
)
from fasttrain.report.drawing import CHARACTER, LINE, place_labels


@pytest.mark.parametrize(("count", "bins"), [(0, 0), (1, 1), (5, 5), (100, 8), (400, 20), (250_000, 100)])
def test_groups_cover_everything_once(count: int, bins: int):
    parts = groups(count)
    assert len(parts) == bins
    assert [n for part in parts for n in range(part.start, part.stop)] == list(range(count))


def test_mean_and_middle_of_each_stretch():
    x = np.arange(1.0, 1601.0)
    curve = spread_curve(x, np.where(x % 2 == 0, 10.0, 0.0))
    assert len(curve.x) == 80
    assert curve.x[0] == pytest.approx(10.5), "the mean of 1 … 20"
    assert (curve.y == 5.0).all()
    assert (curve.low[0], curve.high[0]) == (0.0, 10.0)


def test_rates_have_wilsons_interval():
    hits = np.zeros(160)
    hits[:5] = 1.0  # of the first 20
    curve = rate_curve(np.arange(160.0), hits)
    z, n, p = 1.959964, 20, 0.25
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z / (1 + z * z / n) * math.sqrt(p * 0.75 / n + z * z / 4 / n / n),
    )
    assert (curve.low[0], curve.y[0], curve.high[0]) == pytest.approx((middle - half, 0.25, middle + half))
    assert curve.low[1] == pytest.approx(0.0)


def test_the_commonest_names_and_the_others():
    names = ["a"] * 80 + ["b"] * 40 + ["c"] * 30 + ["d"] * 10
    x, shares = name_shares(np.arange(160.0), names, most=3)
    assert list(shares) == ["a", "b", "others"]
    assert len(x) == 8
    assert shares["a"].tolist() == [1.0] * 4 + [0.0] * 4
    assert shares["others"][-1] == 1.0
    assert sum(shares.values()) == pytest.approx(np.ones(8))


def test_mean_and_students_interval_over_seeds_where_all_have_values():
    flat = [Curve(np.array([a, 100.0]), np.array([y, y]), np.array([]), np.array([])) for a, y in ((0, 1.0), (20, 3.0))]
    curve = across_seeds(flat)
    assert curve is not None
    assert (curve.x[0], curve.x[-1]) == (20.0, 100.0)
    assert curve.y == pytest.approx(np.full(80, 2.0))
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)  # t(0.975, 1) · s / √n
    assert curve.high[0] == pytest.approx(2.0 + half, rel=1e-4)
    alone = across_seeds(flat[:1])
    assert alone is not None
    assert (alone.low == alone.high).all()
    assert across_seeds([]) is None


def test_mean_interval():
    assert mean_interval([3.0]) == (3.0, None, None)
    mean, low, high = mean_interval([1.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - 12.7062, 2.0 + 12.7062), rel=1e-4)


def test_what_nothing_beats_in_both():
    assert pareto_front([1, 2, 3, 4], [5, 6, 4, 1]) == [1, 2, 3]
    assert pareto_front([1, 1, 2], [5, 7, 7]) == [2]


def test_names_stand_beside_each_other():
    points = [(1.0, 1.0), (1.1, 1.02), (1.05, 1.1), (4.9, 1.9)]
    texts = ["64 · 2", "128 · 2", "256 · 4", "512 · 8"]
    corners = place_labels(points, texts, (0.0, 0.0, 5.0, 2.0))
    boxes = [(x, y, x + CHARACTER * len(text), y + LINE) for (x, y), text in zip(corners, texts, strict=True)]
    for n, one in enumerate(boxes):
        for other in boxes[n + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)
    assert boxes[3][2] <= 5.0, "inside the frame"


def test_names_keep_off_intervals():
    bar = (1.05, 0.0, 1.6, 2.0)
    ((x, _),) = place_labels([(1.0, 1.0)], ["name"], (0.0, 0.0, 5.0, 2.0), [bar])
    assert x + CHARACTER * 4 <= 1.0
