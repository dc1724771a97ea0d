"""From outcomes to rows: what is judged, against what, and what is told of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fasttrain.spec.config import GateConfig
from fasttrain.studies.judge import Outcome, choose_metric, choose_threshold, judge, values_of
from study_toys import rising, summary

GATE = GateConfig()


def outcome(seed: int = 0, final: float = 0.6, curve_of: str = "win rate", **more: Any) -> Outcome:
    wins = np.array(rising(final, seed=seed), dtype=np.float64)
    ends = np.arange(1, len(wins) + 1)
    return Outcome(seed, {**summary(**more), "env_steps": 4000}, curve_of, ends * 10.0, ends / 100.0, wins)


def test_the_metric_is_the_win_rate_the_reward_or_for_dqn_the_tail():
    assert choose_metric([outcome()], GATE, ["maskable_ppo"]) == "win_rate"
    assert choose_metric([outcome(), outcome(win_rate=None)], GATE, ["ppo"]) == "mean_reward"
    assert choose_metric([outcome()], GATE, ["ppo", "dqn"]) == "tail"
    assert choose_metric([outcome(mean_reward=None, win_rate=None)], GATE, ["ppo"]) == "tail", "eval.episodes=0"
    assert choose_metric([outcome()], GateConfig(metric="mean_reward"), ["dqn"]) == "mean_reward"


def test_the_threshold_is_nine_tenths_of_the_baselines_rise():
    runs = [outcome(seed, 0.6) for seed in range(5)]
    found = choose_threshold(runs, GATE)
    firsts = [run.begins_with() for run in runs]
    tails = [run.tail() for run in runs]
    expected = np.median([first + 0.9 * (tail - first) for first, tail in zip(firsts, tails, strict=True)])
    assert found == pytest.approx(expected)
    assert choose_threshold(runs, GateConfig(threshold=0.2)) == 0.2
    assert choose_threshold([outcome(final=0.0)], GATE) is None, "it learned nothing"


def test_rows_are_judged_beside_the_first():
    candidates = {
        "base": {seed: outcome(seed, steps_per_s=100.0, win_rate=0.5 + 0.001 * seed) for seed in range(5)},
        "fast": {seed: outcome(seed, steps_per_s=250.0, win_rate=0.5 + 0.001 * seed) for seed in range(5)},
        "none": {},
    }
    base, fast = judge(candidates, GATE, "win_rate", 0.4)
    assert (base.verdict, base.speed_up, base.faster) == (None, None, None)
    assert fast.speed_up is not None
    assert (fast.speed_up.value, fast.faster, fast.verdict) == (2.5, True, "pass")
    told = fast.to_dict()
    assert told["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert told["win_rate"]["value"] == pytest.approx(0.502)
    assert told["end_reason"] == {"won": 0.5, "lost": 0.5}
    assert told["score_diff"] is None
    assert told["time_to_threshold_steps"]["value"] == pytest.approx(100 * told["time_to_threshold_s"]["value"] * 10)


def test_elo_and_what_else_is_told():
    runs = {seed: outcome(seed, self_play={"elo": 1100.0 + seed}, draw_rate=0.1) for seed in range(3)}
    (row,) = judge({"self": runs}, GATE, "win_rate", None)
    assert row.figures["elo"] is not None
    assert row.figures["elo"].value == 1101.0
    assert row.time_s is None


def test_values_by_seed_leave_out_what_is_not_told():
    assert values_of({1: outcome(win_rate=0.25), 2: outcome(win_rate=None)}, "win_rate") == {1: 0.25}


def test_sample_efficiency_counts_the_same_steps_on_all_sides():
    long = {0: outcome(0)}
    short = {0: Outcome(0, {**summary(), "env_steps": 2000}, "win rate", long[0].env_steps[:200],
                        long[0].wall_s[:200], long[0].values[:200])}  # fmt: skip
    first, second = judge({"long": long, "short": short}, GATE, "win_rate", None)
    assert first.figures["sample_efficiency"] == second.figures["sample_efficiency"]
