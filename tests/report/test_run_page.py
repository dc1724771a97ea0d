from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain_report.charts import XY, Rows, Split
from fasttrain_report.page import Page, Table
from fasttrain_report.run_page import run_page
from report_toys import PLAN, charts_of, perf, quality, summary, texts, write_run


def tables_of(page: Page, title: str) -> list[Table]:
    return [table for section in page.sections if section.title == title for table in section.tables]


def test_what_a_run_says_and_its_curves(tmp_path: Path):
    page = run_page(write_run(tmp_path / "a-run"))
    assert (page.kind, page.title) == ("Training run", "ppo on Toy-v0")
    facts = dict(page.facts)
    assert {key: facts[key] for key in ("env", "profile", "status", "seed", "folder")} == {
        "env": "Toy-v0", "profile": "speed", "status": "done", "seed": "7", "folder": "a-run"}  # fmt: skip
    assert page.command == "fasttrain +profile=speed total_timesteps=4000"
    tiles = {tile.label: (tile.value, tile.note) for tile in page.tiles}
    assert tiles["Env steps/s"] == ("1,250", "4,000 env steps")
    assert tiles["Training time"] == ("3.2 s", "after 2 s of start-up")
    assert tiles["Gradient updates"] == ("40", "0.0100 per env step")
    assert tiles["Win rate"] == ("50.0 %", "[40.0, 60.0], greedy")
    assert tiles["Bottleneck"] == ("update", "50 % of the main thread's time")
    assert tiles["CPU busy"] == ("75 %", "500 MB of memory")
    assert not page.banners
    charts = charts_of(run_page(write_run(tmp_path)))
    assert list(charts) == [
        "return_over_steps", "return_over_time", "win_rate_over_steps", "win_rate_over_time", "endings_over_steps",
        "endings", "phases", "phases_over_time", "throughput", "load", "memory"]  # fmt: skip
    curve: XY = charts["return_over_steps"]
    line, points = curve.lines[0], curve.points[0]
    assert line.y[0] == pytest.approx(0.105), "mean of the first 20 episodes: 4 · 10.5 / 400"
    assert line.y[-1] == pytest.approx(4 * 390.5 / 400)
    assert line.x[-1] == pytest.approx(3905.0)
    assert points.x.tolist() == [2000.0, 4000.0]
    assert points.y.tolist() == [1.0, 2.0]
    assert points.low is not None
    assert points.low.tolist() == [0.75, 1.75]
    assert charts["return_over_time"].points[0].x.tolist() == [2.0, 4.0]
    wins: XY = charts["win_rate_over_steps"]
    assert wins.lines[0].y.tolist() == [0.0] * 10 + [1.0] * 10
    endings: XY = charts["endings_over_steps"]
    assert endings.stacked
    assert [part.name for part in endings.lines] == ["lost", "won"]
    assert endings.lines[0].y == pytest.approx(np.full(20, 0.5))
    final: Split = charts["endings"]
    assert final.names == ["greedy"]
    assert [shares.tolist() for _, shares in final.parts.values()] == [[0.5], [0.5]]


def test_where_the_time_went_sums_to_the_wall_time(tmp_path: Path):
    write_run(tmp_path)
    total = perf()["total"] | {"enemy_turn_ms": 50.0, "transport_ms": 20.0}
    (tmp_path / "perf.json").write_text(json.dumps({"total": total}))
    page = run_page(tmp_path)
    bars: Rows = charts_of(page)["phases"]
    assert (bars.rows[0].name, bars.rows[0].value, bars.rows[0].text) == ("update", 0.5, "50.0 % · 400 ms")
    assert "throughput" not in charts_of(page)
    section = next(section for section in page.sections if section.title == "Where the time went")
    assert "5,000 steps/s with stepping envs alone; 2,500 steps/s with updating" in section.text
    (table,) = section.tables
    names = ["env_step_ms", "of it enemy_turn_ms", "of it transport_ms", "train_ms", "other_ms"]
    assert [row[0] for row in texts(table)] == [*names, "total"]
    assert texts(table)[0][1:] == ["200", "25.0 %", "5,000"]
    assert texts(table)[5][1:] == ["800", "100.0 %", "1,250"]


def test_the_plan_has_what_is_notable_first(tmp_path: Path):
    write_run(tmp_path)
    own = {"flag": "algo.n_epochs", "requested": 4, "effective": 4, "source": "tier speed", "class": "trade-off"}
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "flags": [*PLAN["flags"], own]}))
    (table,) = tables_of(run_page(tmp_path), "Plan")
    assert table.folded
    assert table.title == "3 flags, the first 2 differ from a plain script, were set or measured, or are off"
    assert [row[0] for row in texts(table)] == ["vec_env", "algo.n_epochs", "num_workers"]


def test_self_play_replay_and_reward_terms(tmp_path: Path):
    pool = [{"env_steps": 2000, "elo": 1100.0, "games": 9, "learner_score": 0.5},
            {"env_steps": 1000, "elo": 1010.0, "games": 7, "learner_score": None}]  # fmt: skip
    prefetch = {"hits": 90, "waits": 10, "wait_s": 0.5}
    more = {
        "self_play": {"elo": 1200.4, "snapshots": 5, "pool": pool},
        "reward_terms": {"vp": -1.5, "win": 0.25},
        "replay": {"transitions": 250, "capacity": 1000, "memory_bytes": 2e6, "prefetch": prefetch},
    }
    page = run_page(write_run(tmp_path, **more))
    elo: XY = charts_of(page)["elo"]
    assert elo.points[0].x.tolist() == [1000.0, 2000.0]
    assert elo.points[0].y.tolist() == [1010.0, 1100.0]
    assert elo.levels == {"learner now: 1,200": 1200.4}
    replay = dict(texts(tables_of(page, "Replay buffer")[0]))
    assert replay["filled"] == "25.0 %"
    assert replay["batches that were not ready"] == "10 0.5 s"
    assert texts(tables_of(page, "Quality of the final policy")[1]) == [["vp", "−1.50"], ["win", "0.250"]]
    assert "snapshots of the learner" in page.sections[0].text


def test_games_with_engines(tmp_path: Path):
    engines = {
        "warning": "Dropping games biases", "games": 40, "games_per_s": 2.0, "decisions_per_s": 30.0, "game_ms": "?",
        "decision_ms": {"p50": 3.0, "p99": None}, "mean_decisions": 15.0, "busy_share": 0.5, "restarts": {"hung": 2},
        "lost_games": {"timeout": {"games": 3, "mean_decisions": 22.0}},
        "daemons": [{"daemon": 0, "busy_share": 0.5, "cpu_share": 0.25, "memory_mb": 30.0}],
    }  # fmt: skip
    folder = write_run(tmp_path)
    told = json.loads((folder / "perf.json").read_text())
    told["total"]["of_a_game"] = {"engine_ms": 4.0}
    (folder / "perf.json").write_text(json.dumps({**told, "engines": engines}))
    page = run_page(folder)
    assert [section.text for section in page.sections if section.title == "Engines"] == ["Dropping games biases"]
    whole, games, each = tables_of(page, "Engines")
    assert dict(texts(whole)) == {
        "games per second": "2", "decisions per second": "30", "a decision took, P50": "3 ms",
        "engines busy": "50.0 %", "started again": "hung 2"}  # fmt: skip
    assert texts(games) == [["finished", "40", "15"], ["lost: timeout", "3", "22"]]
    assert texts(each) == [["0", "50.0 %", "25.0 %", "30 MB"]]
    (phases,) = tables_of(page, "Where the time went")
    assert texts(phases)[-1][0] == "of a game's time engine_ms"


def test_tasks_policies_and_phases_have_a_row_each(tmp_path: Path):
    folder = write_run(
        tmp_path, tasks={"late": {"episodes": 12, "mean_reward": 0.5, "win_rate": 0.25, "value_error": 2.0}},
        policies={"manager": {"decisions": 30, "updates": 6, "update_s": 1.5}, "worker": "?"},
        phases={"bid": {"steps": 30, "share": 0.1, "reward": None, "value": 1.0, "value_error": 2.0, "log_prob": -1.0}},
    )  # fmt: skip
    page = run_page(folder)
    ((tasks,), (policies,), (phases,)) = (tables_of(page, title) for title in ("Tasks", "Policies", "Phases"))
    assert texts(tasks) == [["late", "12", "0.500", "25.0 %", "2"]]
    assert texts(policies)[0] == ["manager", "30", "6", "1.50"]
    assert [row[0] for row in texts(policies)] == ["manager", "worker"]
    assert texts(phases)[0][:3] == ["bid", "30", "10.0 %"]
    assert texts(phases)[0][4:] == ["1", "2", "\N{MINUS SIGN}1"]


def test_reward_terms_along_the_run(tmp_path: Path):
    write_run(tmp_path, reward_terms={"vp": -1.5, "none": 0.0})
    rows = "".join(f"{n},{10 * n},0,1,10,{n / 100},{-n}\n" for n in range(1, 101))
    (tmp_path / "episodes.csv").write_text("episode,env_steps,env,return,length,wall_s,reward_vp\n" + rows)
    chart: XY = charts_of(run_page(tmp_path))["reward_terms"]
    assert [line.name for line in chart.lines] == ["vp"]
    assert chart.lines[0].y.mean() == pytest.approx(-50.5, rel=0.02)


def test_each_task_has_a_curve(tmp_path: Path):
    write_run(tmp_path, tasks={"early": {}, "late": {}, "never": {}})
    rows = "".join(f"{n},{10 * n},0,{n % 2},5,{n},{'late' if n % 2 else 'early'}\n" for n in range(1, 201))
    (tmp_path / "episodes.csv").write_text("episode,env_steps,env,return,length,wall_s,task\n" + rows)
    (section,) = [section for section in run_page(tmp_path).sections if section.title == "Tasks"]
    ((early, late),) = [chart.lines for chart in section.charts]  # type: ignore[attr-defined]
    assert (early.name, late.name) == ("early", "late")
    assert ({*early.y}, {*late.y}) == ({0.0}, {1.0})


@pytest.mark.parametrize("missing", ["summary.json", "plan.json", "perf.json", "episodes.csv", "evaluations.csv"])
def test_missing_and_cut_files_leave_the_rest(tmp_path: Path, missing: str):
    whole = (write_run(tmp_path) / missing).read_bytes()
    for left in (whole[: len(whole) // 2], None):
        (tmp_path / missing).unlink() if left is None else (tmp_path / missing).write_bytes(left)
        page = run_page(tmp_path)
        assert len(charts_of(page)) >= 4
        assert ("Unfinished" in [banner.title for banner in page.banners]) == (missing == "summary.json")


@pytest.mark.parametrize("junk", [3, "text", [1], {"a": [1]}, None, True])
def test_files_of_another_shape(tmp_path: Path, junk: Any):
    keys = ("quality", "perf", "limits", "utilization", "self_play", "reward_terms", "replay", "overrides", "plan",
            "evaluations", "seed", "status", "steps_per_s")  # fmt: skip
    write_run(tmp_path)
    odd = quality() | {"ci95": junk, "end_reason": {"won": junk}, "sampled": junk}
    plan = {"flags": [junk, {"flag": junk}], "config": {"env": junk, "algo": junk}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    told = {"total": junk, "lines": [junk], "windows": [junk, {"env_steps": junk}]}
    (tmp_path / "perf.json").write_text(json.dumps(told))
    for said in (dict.fromkeys(keys, junk), summary(quality=odd, self_play={"pool": [junk, {"elo": junk}]})):
        (tmp_path / "summary.json").write_text(json.dumps(said))
        assert "return_over_steps" in charts_of(run_page(tmp_path))


def test_crashed_and_stopped_and_a_profile_that_was_not_typed(tmp_path: Path):
    write_run(tmp_path, status="crashed", error="EnvError('the board fell')", overrides=None)
    page = run_page(tmp_path)
    (banner,) = page.banners
    assert (banner.title, banner.text, banner.tone) == ("Crashed", "EnvError('the board fell')", "bad")
    assert dict(page.facts)["profile"] == "speed"
    write_run(tmp_path, status="stopped")
    assert run_page(tmp_path).banners[0].title == "Stopped by a signal"
