from __future__ import annotations

from typing import Any

import pytest

from fasttrain.report.charts import XY, Chart
from fasttrain.report.curves import MOST_WINDOWS, window_charts
from report_toys import perf


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


def test_a_window_without_a_figure_leaves_the_others_of_its_stretch():
    rows = perf(2 * MOST_WINDOWS)["windows"]
    for row in rows[::2]:
        row["cpu"] = None
    (cpu,) = by_name(window_charts(rows))["load"].lines
    assert cpu.y[0] == pytest.approx(0.6), "of the second window alone"


@pytest.mark.parametrize("rows", [[], [{}], [{"env_steps": "x", "wall_s": 1}], perf(1)["windows"]])
def test_too_little_for_a_curve(rows: list[dict[str, Any]]):
    assert window_charts(rows) == []
