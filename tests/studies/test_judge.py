from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain_studies.judge import (
    Outcome,
    choose_metric,
    choose_threshold,
    judge,
    read_outcome,
    speed_ratio,
    values_of,
)
from fasttrain_studies.settings import GateConfig
from fasttrain_studies.study import Cell
from study_toys import rising, summary, write_episodes

GATE = GateConfig()


def outcome(seed: int = 0, final: float = 0.6, **more: Any) -> Outcome:
    wins = np.array(rising(final, seed=seed), dtype=np.float64)
    ends = np.arange(1, len(wins) + 1)
    return Outcome(seed, {**summary(**more), "env_steps": 4000}, "win rate", ends * 10.0, ends / 100.0, wins)


def test_the_metric_is_the_win_rate_the_reward_or_for_dqn_the_tail():
    assert choose_metric([outcome()], GATE, ["maskable_ppo"]) == "win_rate"
    assert choose_metric([outcome(), outcome(win_rate=None)], GATE, ["ppo"]) == "mean_reward"
    assert choose_metric([outcome()], GATE, ["ppo", "dqn"]) == "tail"
    assert choose_metric([outcome(mean_reward=None, win_rate=None)], GATE, ["ppo"]) == "tail", "eval.episodes=0"
    assert choose_metric([outcome()], GateConfig(metric="mean_reward"), ["dqn"]) == "mean_reward"


def test_the_threshold_is_nine_tenths_of_the_baselines_rise():
    runs = [outcome(seed, 0.6) for seed in range(5)]
    expected = np.median([run.begins_with() + 0.9 * (run.tail() - run.begins_with()) for run in runs])
    assert choose_threshold(runs, GATE) == pytest.approx(expected)
    assert choose_threshold(runs, GateConfig(threshold=0.2)) == 0.2
    assert choose_threshold([outcome(final=0.0)], GATE) is None, "it learned nothing"


def test_rows_are_judged_beside_the_first():
    base, fast = judge(
        {
            name: {seed: outcome(seed, steps_per_s=speed, win_rate=0.5 + 0.001 * seed) for seed in range(seeds)}
            for name, speed, seeds in (("base", 100.0, 5), ("fast", 250.0, 5), ("none", 1.0, 0))
        },
        GATE, "win_rate", 0.4,
    )  # fmt: skip
    assert (base.verdict, base.speed_up, base.faster) == (None, None, None)
    assert (fast.speed_up.value, fast.faster, fast.verdict) == (2.5, True, "pass")
    told = fast.to_dict()
    assert told["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert told["win_rate"]["value"] == pytest.approx(0.502)
    assert told["end_reason"] == {"won": 0.5, "lost": 0.5}
    assert told["score_diff"] is None
    assert told["time_to_threshold_steps"]["value"] == pytest.approx(100 * told["time_to_threshold_s"]["value"] * 10)


def test_what_else_is_told_and_what_is_not():
    runs = {seed: outcome(seed, self_play={"elo": 1100.0 + seed}, draw_rate=0.1) for seed in range(3)}
    (row,) = judge({"self": runs}, GATE, "win_rate", None)
    assert row.figures["elo"].value == 1101.0
    assert row.time_s is None
    assert values_of({1: outcome(win_rate=0.25), 2: outcome(win_rate=None)}, "win_rate") == {1: 0.25}


def test_sample_efficiency_counts_the_same_steps_on_all_sides():
    long = outcome(0)
    half = (long.env_steps[:200], long.wall_s[:200], long.values[:200])
    short = Outcome(0, {**summary(), "env_steps": 2000}, "win rate", *half)
    first, second = judge({"long": {0: long}, "short": {0: short}}, GATE, "win_rate", None)
    assert first.figures["sample_efficiency"] == second.figures["sample_efficiency"]


def cell(folder: Path, wins: list[int], **more: float | None) -> Cell:
    write_episodes(folder, wins)
    return Cell("x", [], folder, 0, "", 1.0, 7, summary(env_steps=len(wins) * 10, **more))


def test_a_cell_is_read_by_its_wins_or_by_its_returns(tmp_path: Path):
    found = read_outcome(cell(tmp_path, [0] * 150 + [1] * 350))
    assert (found.seed, found.curve_of, found.total, found.figure("steps_per_s")) == (7, "win rate", 5000.0, 1000.0)
    assert (found.tail(), found.begins_with()) == (1.0, 0.0)
    assert found.time_to(0.5) == (2000.0, 2.0), "episode 200: 50 of the last 100 are won"
    assert found.time_to(1.1) is None
    assert (found.efficiency(5000), found.efficiency(1500)) == (pytest.approx(0.7), 0.0)
    assert (found.figure("win_rate"), found.figure("score_diff")) == (0.5, None)
    found = read_outcome(cell(tmp_path, [0, 1] * 100, win_rate=None))
    assert (found.curve_of, found.tail()) == ("return", pytest.approx(0.5))
    (tmp_path / "episodes.csv").unlink()
    found = read_outcome(Cell("x", [], tmp_path, 0, "", 1.0, None, summary()))
    assert (found.tail(), found.begins_with(), found.time_to(0.1), found.efficiency(100.0)) == (None,) * 4


def timed(folder: Path, steps_per_s: float, windows: list[tuple[int, float]] | None = None) -> Cell:
    folder.mkdir(exist_ok=True)
    if windows is not None:
        rows = [{"env_steps": steps, "wall_s": wall_s} for steps, wall_s in windows]
        (folder / "perf.json").write_text(json.dumps({"windows": rows}))
    return Cell("x", [], folder, 0, "", 1.0, 0, summary(steps_per_s))


def test_the_first_window_is_left_out_of_the_speed(tmp_path: Path):
    assert timed(tmp_path / "a", 10.0, [(100, 10.0), (1100, 11.0), (3100, 13.0)]).rate == 1000.0
    assert timed(tmp_path / "b", 10.0, [(100, 10.0), (1100, 11.0)]).rate == 10.0, "too short"
    assert timed(tmp_path / "c", 10.0).rate == 10.0


def test_a_ratio_is_clear_beyond_noise(tmp_path: Path):
    def ratio(speeds: list[float], beside: list[float]) -> Any:
        sides = [{seed: timed(tmp_path / f"{it}", it) for seed, it in enumerate(each)} for each in (speeds, beside)]
        return speed_ratio(*sides)

    hundred = [100.0, 100.0, 100.0]
    same, half, noisy = (ratio(it, hundred) for it in ([100.0, 101.0, 102.0], [50.0, 51.0, 52.0], [50.0, 120.0, 130.0]))
    assert (same.pairs, same.clear, same.alike) == (3, False, True)
    assert (half.clear, half.text()) == (True, "0.51× [0.50, 0.52]")
    assert (noisy.clear, noisy.alike) == (False, False)
    once = ratio([200.0], [100.0])
    assert (once.text(), once.clear, once.alike, once.value) == ("2.00×", False, False, 2.0), "one turn says nothing"
    assert ratio([], [100.0]) is None
