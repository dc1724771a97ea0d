from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fasttrain_report.charts import XY, Chart, Series
from fasttrain_report.curves import (
    MOST_WINDOWS,
    across_seeds,
    groups,
    name_shares,
    pareto_front,
    rate_curve,
    spread_curve,
    window_charts,
)
from report_toys import perf


def test_groups_cover_everything_once():
    for count, bins in ((0, 0), (1, 1), (5, 5), (100, 8), (400, 20), (250_000, 100)):
        parts = groups(count)
        assert len(parts) == bins
        assert [n for part in parts for n in range(part.start, part.stop)] == list(range(count))


def test_means_and_rates_of_each_stretch():
    x = np.arange(1.0, 1601.0)
    curve = spread_curve(x, np.where(x % 2 == 0, 10.0, 0.0))
    assert len(curve.x) == 80
    assert curve.x[0] == pytest.approx(10.5), "the mean of 1 … 20"
    assert (curve.y == 5.0).all()
    assert (curve.low, curve.high) == (pytest.approx([0.0] * 80), pytest.approx([10.0] * 80))
    hits = np.zeros(160)
    hits[:5] = 1.0  # of the first 20
    curve = rate_curve(np.arange(160.0), hits)
    z, n, p = 1.959964, 20, 0.25
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * 0.75 / n + z * z / 4 / n / n)
    assert curve.low is not None
    assert curve.high is not None
    assert (curve.low[0], curve.y[0], curve.high[0]) == pytest.approx((middle - half, 0.25, middle + half))


def test_the_commonest_names_and_the_others():
    names = ["a"] * 80 + ["b"] * 40 + ["c"] * 30 + ["d"] * 10
    x, shares = name_shares(np.arange(160.0), names, most=3)
    assert list(shares) == ["a", "b", "others"]
    assert len(x) == 8
    assert shares["a"].tolist() == [1.0] * 4 + [0.0] * 4
    assert shares["others"][-1] == 1.0
    assert sum(shares.values()) == pytest.approx(np.ones(8))


def test_mean_and_students_interval_over_seeds_where_all_have_values():
    flat = [Series(x=np.array([a, 100.0]), y=np.array([y, y])) for a, y in ((0, 1.0), (20, 3.0))]
    curve = across_seeds(flat)
    assert curve is not None
    assert (curve.x[0], curve.x[-1]) == (20.0, 100.0)
    assert curve.y == pytest.approx(np.full(80, 2.0))
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)  # t(0.975, 1) · s / √n
    assert curve.high is not None
    assert curve.high[0] == pytest.approx(2.0 + half, rel=1e-4)
    assert across_seeds([]) is None


def test_what_nothing_beats_in_both():
    assert pareto_front([1, 2, 3, 4], [5, 6, 4, 1]) == [1, 2, 3]
    assert pareto_front([1, 1, 2], [5, 7, 7]) == [2]


def by_name(charts: list[Chart]) -> dict[str, XY]:
    return {chart.name: chart for chart in charts if isinstance(chart, XY)}


def test_windows():
    charts = by_name(window_charts(perf(4)["windows"]))
    (speed,), phases = charts["throughput"].lines, charts["phases_over_time"].lines
    assert speed.x == pytest.approx([0.8, 1.6, 2.4, 3.2])
    assert speed.y == pytest.approx([1250.0] * 4)
    assert [line.name for line in phases] == ["step envs", "update", "rest"]
    assert [float(line.y[0]) for line in phases] == pytest.approx([0.25, 0.5, 0.25])
    (cpu,) = charts["load"].lines
    assert cpu.y == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert charts["load"].title == "CPU load along the run", "of a GPU nothing is known"
    assert charts["memory"].lines[0].y == pytest.approx([400.0] * 4)


def test_many_windows_become_fewer_with_the_same_sums():
    charts = by_name(window_charts(perf(1000)["windows"]))
    (speed,) = charts["throughput"].lines
    assert len(speed.x) == MOST_WINDOWS
    assert speed.x[-1] == pytest.approx(800.0)
    assert speed.y == pytest.approx([1250.0] * MOST_WINDOWS)
    assert charts["phases_over_time"].lines[0].y == pytest.approx([0.25] * MOST_WINDOWS)
    rows = perf(2 * MOST_WINDOWS)["windows"]
    for row in rows[::2]:
        row["cpu"] = None
    (cpu,) = by_name(window_charts(rows))["load"].lines
    assert cpu.y[0] == pytest.approx(0.6), "of the second window alone"


@pytest.mark.parametrize("rows", [[], [{}], [{"env_steps": "x", "wall_s": 1}], perf(1)["windows"]])
def test_too_little_for_a_curve(rows: list[dict[str, Any]]):
    assert window_charts(rows) == []
