from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fasttrain_report.charts import XY, Heat, Rows
from fasttrain_report.compare_page import compare_page, difference_text, margin_text
from fasttrain_report.page import Page, Table
from fasttrain_report.study_page import study_page, sweep_page
from fasttrain_report.values import Estimate
from report_toys import charts_of, spread, texts, write_comparison, write_sweep


def table_of(page: Page, title: str) -> Table:
    return next(section.tables[0] for section in page.sections if section.title == title)


def test_two_keys_make_heat_maps_and_a_failed_cell_is_left_out(tmp_path: Path):
    page = sweep_page(write_sweep(tmp_path, {"num_envs": [128, 64], "algo.n_epochs": [2, 4, 10]}))
    assert page.title == "num_envs × algo.n_epochs"
    charts = charts_of(page)
    assert list(charts) == ["heat_steps_per_s", "heat_win_rate", "pareto"]
    speed: Heat = charts["heat_steps_per_s"]
    assert (speed.y_values, speed.x_values) == (["64", "128"], ["2", "4", "10"]), "by size"
    assert speed.values.tolist() == [[4000.0, 5000.0, 6000.0], [1000.0, 2000.0, 3000.0]]
    assert charts["heat_win_rate"].values[1] == pytest.approx([0.9, 0.8, 0.7])
    tiles = {tile.label: (tile.value, tile.note) for tile in page.tiles}
    assert tiles["Most env steps/s"] == ("6,000", "num_envs=64 n_epochs=10")
    assert tiles["Best win rate"] == ("90.0 %", "num_envs=128 n_epochs=2")


def test_one_key_makes_bars_and_a_front(tmp_path: Path):
    page = sweep_page(write_sweep(tmp_path, {"num_envs": [1, 2, 3]}))
    bars: Rows = charts_of(page)["rows_steps_per_s"]
    assert [(row.name, row.value, row.text) for row in bars.rows][1] == ("num_envs=2", 2000.0, "2,000")
    quality: Rows = charts_of(page)["rows_win_rate"]
    assert (quality.rows[0].value, quality.rows[0].bounds) == (pytest.approx(0.9), pytest.approx((0.8, 1.0)))
    front: XY = charts_of(page)["pareto"]
    assert front.lines[0].x.tolist() == [1000.0, 2000.0, 3000.0], "each is the best at something"
    assert front.points[0].labels == ("1", "2", "3")
    (row, *_), table = texts(table_of(page, "Cells")), table_of(page, "Cells")
    assert row == ["0", "1", "done", "1,000", "1.00×", "2 [1.75, 2.25]", "90.0 % [80.0, 100.0]", "0.0100", "4 s", "2 s"]
    assert table.cells[0][0].link == "./0"


def test_seeds_are_repetitions_not_settings(tmp_path: Path):
    page = sweep_page(write_sweep(tmp_path, {"num_envs": [8, 16], "seed": [1, 2]}))
    bars: Rows = charts_of(page)["rows_steps_per_s"]
    assert [row.value for row in bars.rows] == [1500.0, 3500.0]
    assert bars.rows[0].bounds is not None
    assert bars.rows[0].bounds[0] == pytest.approx(1500.0 - 12.7062 * 500.0, rel=1e-4)
    assert "pareto" in charts_of(page), "two are enough"


def test_a_failed_cell_is_shown_and_left_out_of_the_charts(tmp_path: Path):
    page = sweep_page(write_sweep(tmp_path, {"a": [1, 2], "b": [1, 2]}, broken=1))
    assert np.isnan(charts_of(page)["heat_steps_per_s"].values[0, 1])
    assert page.banners[0].title == "1 of 4 cells failed"
    assert texts(table_of(page, "Cells"))[1][-1] == "the board fell"


def test_a_comparison(tmp_path: Path):
    page = compare_page(write_comparison(tmp_path))
    (banner,) = page.banners
    assert (page.title, banner.title, banner.tone) == ("fast against base", "fast: pass", "good")
    assert banner.text == "2.50× as fast [2.38, 2.62]; win rate −2.0 [−2.5, −1.5] points, margin 3 points"
    facts = {"baseline": "base", "judged by": "win rate", "margin": "3 points", "seeds": "2"}
    assert facts.items() <= dict(page.facts).items()
    charts = charts_of(page)
    forest: Rows = charts["differences"]
    (row,) = forest.rows
    assert (row.name, row.value, row.bounds) == ("fast", pytest.approx(-2), pytest.approx((-2.5, -1.5)))
    assert forest.levels == {"equal": 0.0, "margin −3": pytest.approx(-3.0)}
    assert [(each.name, each.dots) for each in charts["seeds"].rows] == [("base", (0.6, 0.7)), ("fast", (0.6, 0.7))]
    assert [shares.tolist() for _, shares in charts["endings"].parts.values()] == [[0.75, 0.75], [0.25, 0.25]]
    assert [each.text for each in charts["time_to_threshold_s"].rows] == ["1.5 s", "not reached"]
    assert [each.value for each in charts["steps_per_s"].rows] == [1000.0, 2500.0]
    assert [name for name in charts if "over" in name or name == "elo"] == [
        "win_rate_over_steps", "win_rate_over_time", "return_over_steps", "return_over_time"]  # fmt: skip
    curve: XY = charts["return_over_steps"]
    assert [line.name for line in curve.lines] == ["base", "fast"]
    assert curve.lines[0].y[-1] == pytest.approx(1.5 + 4 * 390.5 / 400), "mean of lifts 1 and 2"
    assert charts["win_rate_over_steps"].levels == {"threshold 50.0 %": 0.5}
    table = table_of(page, "All figures")
    assert [name for name, _ in table.columns] == ["", "base", "fast"]
    rows = {row[0]: row[1:] for row in texts(table)}
    assert rows["env steps/s"] == ["1,000 [950, 1,050]", "2,500 [2,450, 2,550]"]
    assert rows["difference in win rate"] == ["–", "−2.0 [−2.5, −1.5] points"]
    assert rows["training time to the threshold"] == ["1.5 s [1.25 s, 1.75 s]", "not reached"]
    assert rows["verdict"] == ["baseline", "pass"]
    assert "score difference" not in rows
    assert difference_text(Estimate(1e-17, None, None), False) == "0"
    assert (margin_text(12.5, False), margin_text(None, True)) == ("12.5", "–")


def test_the_last_fifth_of_training_and_no_rows_yet(tmp_path: Path):
    write_comparison(tmp_path)
    stored = json.loads((tmp_path / "study.json").read_text())
    stored["gate"] |= {"metric": "tail", "curve_of": "return"}
    (tmp_path / "study.json").write_text(json.dumps(stored))
    seeds: Rows = charts_of(compare_page(tmp_path))["seeds"]
    assert seeds.rows[0].dots == pytest.approx((1 + 4 * 360.5 / 400, 2 + 4 * 360.5 / 400))
    stored |= {"rows": None, "cells": [{"label": "a", "status": "failed"}]}
    (tmp_path / "study.json").write_text(json.dumps(stored))
    page = compare_page(tmp_path)
    assert page.banners[0].title == "No verdict yet"
    (tmp_path / "study.json").write_text('{"command": "compare"')
    assert compare_page(tmp_path).title == "Comparison"


def test_links_lead_below_the_page_only(tmp_path: Path):
    write_comparison(tmp_path / "study")
    stored = json.loads((tmp_path / "study" / "study.json").read_text())
    (tmp_path / "elsewhere").mkdir()
    for cell, place in zip(stored["cells"], ("../elsewhere", "javascript:alert(1)", "/", "cells/1_2"), strict=True):
        cell["folder"] = place
    (tmp_path / "study" / "study.json").write_text(json.dumps(stored))
    cells = table_of(compare_page(tmp_path / "study"), "Cells").cells
    assert [row[0].link for row in cells] == ["", "", "", "./cells/1_2"]


def test_rows_as_a_table_and_bars(tmp_path: Path):
    rows = [
        {"name": "engine=fast", "steps_per_s": spread(1000.0, 50.0), "within": 1.5, "keep": True},
        {"name": "vec_env=native", "steps_per_s": spread(3000.0, 50.0), "within": 0.9, "keep": False},
    ]
    cell = {"label": "a", "seed": 0, "status": "failed", "seconds": 5.0, "folder": "cells/a", "overrides": ["x=1"]}
    stored = {"schema": 1, "command": "ablate", "arguments": ["+profile=speed"], "rows": rows, "cells": [cell]}
    (tmp_path / "study.json").write_text(json.dumps(stored))
    page = study_page(tmp_path)
    assert (page.title, page.command) == ("ablate", "fasttrain ablate +profile=speed")
    charts = charts_of(page)
    assert [chart.title for chart in charts.values()] == ["Profile ÷ profile without it", "Env steps/s"]
    assert [(row.name, row.value, row.bounds) for row in charts["figure_2"].rows] == [
        ("engine=fast", 1000.0, (950.0, 1050.0)), ("vec_env=native", 3000.0, (2950.0, 3050.0))]  # fmt: skip
    table = table_of(page, "Results")
    assert [name for name, _ in table.columns] == ["name", "env steps/s", "profile ÷ profile without it", "keep"]
    assert texts(table)[0] == ["engine=fast", "1,000 [950, 1,050]", "1.50×", "keep"]
    cells = table_of(page, "Cells")
    assert texts(cells)[0] == ["a", "0", "failed", "–", "5 s", "x=1"]
    assert cells.cells[0][2].tone == "bad"


def test_trials_of_a_search(tmp_path: Path):
    rows = [{"point": {"num_envs": 16}, "mean_reward": 9.5, "note": ""},
            {"point": {}, "mean_reward": 2.0, "note": ""},
            {"point": {"num_envs": 8}, "mean_reward": None, "note": "ended early"}]  # fmt: skip
    result = {"difference": 7.5, "low": 7.0, "high": 8.0}
    stored = {"command": "tune", "rows": rows, "best": {"num_envs": 16}, "result": result}
    (tmp_path / "study.json").write_text(json.dumps(stored))
    page = study_page(tmp_path)
    (chart,) = charts_of(page).values()
    assert [(row.name, row.value) for row in chart.rows] == [("num_envs=16", 9.5), ("the profile", 2.0)]
    assert ("best", "num_envs=16") in page.facts
    assert (page.tiles[0].label, page.tiles[0].value, page.tiles[0].note) == ("Result − profile", "7.50", "[7, 8]")
    assert texts(table_of(page, "Results"))[2] == ["num_envs=8", "–", "ended early"]
    stored["result"] = spread(2.0, 0.5)
    (tmp_path / "study.json").write_text(json.dumps(stored))
    assert (study_page(tmp_path).tiles[0].value, study_page(tmp_path).tiles[0].note) == ("2.00×", "[1.50, 2.50]")


def test_levers_of_an_ablation(tmp_path: Path):
    quality = {"difference": 0.5, "low": -1.0, "high": 2.0, "pairs": 2}
    row = {"name": "engine", "class": "exact", "added": spread(1.5, 0.25), "within": None}
    other = {**row, "name": "use_amp", "added": spread(0.75, 0.25), "quality": None, "keep": False}
    row |= {"quality": quality, "keep": True}
    (tmp_path / "study.json").write_text(json.dumps({"command": "ablate", "rows": [row, other], "kept": []}))
    page = study_page(tmp_path)
    assert ("kept", "nothing") in page.facts
    (chart,) = charts_of(page).values()
    assert (chart.title, chart.levels) == ("Speed-up when added", {"equal": 1.0})
    table = texts(table_of(page, "Results"))
    assert table[0] == ["engine", "exact", "1.50× [1.25, 1.75]", "–", "0.500 [−1, 2]", "keep"]
    assert table[1][-1] == "leave out"


def test_files_of_another_shape(tmp_path: Path):
    for text in ("{}", "{", '{"cells": 3, "swept": null}', '{"cells": [{"cell": []}], "swept": [1]}'):
        (tmp_path / "sweep.json").write_text(text)
        assert sweep_page(tmp_path).kind == "Sweep"
    for text in ("{}", "[]", '{"rows": [{}], "cells": [{}], "arguments": null}', '{"rows": [{"a": {"b": [1]}}]}'):
        (tmp_path / "study.json").write_text(text)
        assert study_page(tmp_path).kind == "Study"
