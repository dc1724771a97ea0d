from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from conftest import RunCommand
from fasttrain_studies.compare import Candidate, cell_text, parse_candidates, sentence, show_comparison
from fasttrain_studies.judge import Row
from fasttrain_studies.statistics import Comparison, Interval, Ratio, compare
from study_toys import Fakes, rising, summary

THREE = "candidates=[baseline,speed,{name: slow, overrides: [profile=speed, num_envs=8]}]"


def test_candidates_are_profiles_overrides_or_both():
    text = '[baseline, num_envs=8, {name: mine, overrides: [profile=speed, "env.kwargs.opponents=[hard,easy]"]}]'
    assert parse_candidates(text) == [
        Candidate("baseline", ("profile=baseline",)),
        Candidate("num_envs=8", ("num_envs=8",)),
        Candidate("mine", ("profile=speed", "env.kwargs.opponents=[hard,easy]")),
    ]


def learns(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
    """`slow` loses 20 points of win rate; speed is 10 times as fast as the baseline."""
    noise = 0.005 * np.random.default_rng(seed).normal()
    rate = 0.4 if typed.get("num_envs") == "8" else 0.6
    speed = 100.0 if typed["profile"] == "baseline" else 1000.0 + seed
    return {**summary(speed, rate + noise), "wins": rising(rate, seed=seed), "env_steps": 4000}


def test_all_candidates_train_with_the_same_seeds_in_turn(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(learns).use(monkeypatch)
    done = fasttrain("compare", THREE, "seeds=5", "seed=3", "total_timesteps=4000", "report=false")
    assert [name for name, _ in fakes.ran] == ["baseline", "speed", "slow"] * 5
    assert [seed for _, seed in fakes.ran] == [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert done.exit_code == 3, "slow fails"
    rows = [words for line in done.out.splitlines() if len(words := line.split()) > 4]
    assert [words[0] for words in rows if words[-1] in ("baseline", "pass", "fail")] == ["baseline", "speed", "slow"]
    study = done.json("study.json")
    baseline, speed, slow = study["rows"]
    assert (baseline["verdict"], speed["verdict"], slow["verdict"]) == (None, "pass", "fail")
    assert (speed["speed_up"]["value"], speed["faster"]) == (pytest.approx(10.05, abs=0.01), True)
    assert slow["difference"]["value"] == pytest.approx(-0.2)
    assert (study["gate"]["metric"], study["gate"]["margin"]) == ("win_rate", 0.03)
    assert 0.4 < study["gate"]["threshold"] < 0.6, "90 % of the rise of the baseline's training curve"
    assert baseline["time_to_threshold_s"]["value"] < 4.0
    assert slow["time_to_threshold_s"]["value"] is None, "never"
    assert "slow: FAIL, 10.05× [10.03, 10.07] as fast; win rate -20 [-20, -20] points, margin 3 (5 seeds)" in done.out
    assert study["cells"][0]["overrides"] == [
        "total_timesteps=4000", "profile=baseline", "live=off", "report=false", "seed=3",
    ]  # fmt: skip


def test_equal_candidates_pass_and_are_said_to_bring_nothing(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(learns).use(monkeypatch)
    done = fasttrain(
        "compare", "candidates=[baseline,{name: again, overrides: [profile=baseline]}]", "report=false"
    ).ok()
    assert len(fakes.ran) == 10, "each runs by itself, so that speeds differ by noise alone"
    (_, again) = done.json("study.json")["rows"]
    assert (again["verdict"], again["faster"], again["speed_up"]["value"]) == ("pass", False, 1.0)
    assert "less than the 1.1× that trade-offs are worth" in done.out


def test_a_stopped_comparison_keeps_what_was_found(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    first = Fakes(learns, stop_at=4).use(monkeypatch)
    stopped = fasttrain("compare", THREE, "seeds=2", "report=false")
    assert (stopped.exit_code, len(first.ran)) == (4, 4)
    assert "goes on" in stopped.out
    stored = stopped.json("study.json")
    assert len(stored["cells"]) == 4
    assert stored["rows"][1]["verdict"] == "not enough seeds"


def test_a_failed_cell_is_shown_and_loses_nothing(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    def brittle(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        if typed["profile"] == "speed" and "num_envs" not in typed and seed == 1:
            return {"exit_code": 1, "error": "the board fell"}
        return learns(typed, seed)

    fakes = Fakes(brittle).use(monkeypatch)
    done = fasttrain("compare", "candidates=[baseline,speed]", "seeds=3", "report=false")
    assert done.exit_code == 1
    assert len(fakes.ran) == 6
    assert "failed: speed seed 1: the board fell" in done.out
    assert done.json("study.json")["rows"][1]["seeds"] == [0, 2]


def test_minutes_instead_of_steps(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(learns).use(monkeypatch)
    done = fasttrain("compare", "candidates=[baseline,speed]", "minutes=2", "seeds=1", "report=false")
    overrides = done.json("study.json")["cells"][0]["overrides"]
    assert overrides[:3] == ["stop.max_minutes=2", "total_timesteps=1000000000000", "profile=baseline"]


def test_a_real_comparison(fasttrain: RunCommand):
    candidates = "candidates=[{name: stock, overrides: [profile=baseline, vec_env=dummy]},speed]"
    done = fasttrain("compare", candidates, "seeds=1",
                     "env.id=CartPole-v1", "algo=ppo", "total_timesteps=256", "algo.rollout_size=128", "batch_size=64",
                     "algo.n_epochs=1", "eval.episodes=2", "torch_threads=1", "num_envs=4",
                     "vec_env=dummy").ok()  # fmt: skip
    rows = done.json("study.json")["rows"]
    assert [row["name"] for row in rows] == ["stock", "speed"]
    assert rows[0]["env_steps"]["value"] == rows[1]["env_steps"]["value"] == 256
    assert rows[1]["verdict"] == "not enough seeds"
    cell = done.folder / done.json("study.json")["cells"][1]["folder"]
    assert len((cell / "episodes.csv").read_text().splitlines()) > 5
    assert "[PERF]" in (cell / "log.txt").read_text()
    assert (done.folder / "report.html").is_file()
    assert not (cell / "report.html").exists()


GATE = {"metric": "win_rate", "curve_of": "win rate", "threshold": 0.4, "min_speed_up": 1.1, "min_pairs": 5}


def row(comparison: Comparison | None, speed_up: Ratio | None, faster: bool | None) -> Row:
    names = ("steps_per_s", "env_steps", "updates", "reward_per_hour", "win_rate", "draw_rate", "mean_reward",
             "score_diff", "mean_turns", "tail", "sample_efficiency", "elo")  # fmt: skip
    figures = {name: Interval(0.5, 0.4, 0.6) if name in ("win_rate", "steps_per_s") else None for name in names}
    return Row(
        "speed", {}, figures, {"won [b]": 1.0}, Interval(math.inf, 3.0, math.inf), None, speed_up, comparison, faster
    )


def test_verdicts_are_sentences():
    good = compare(dict.fromkeys(range(5), 0.5), dict.fromkeys(range(5), 0.52), 0.03)
    assert sentence(row(good, Ratio(2.0, 1.9, 2.1, 5), True), GATE) == (
        "speed: PASS, 2.00× [1.90, 2.10] as fast; win rate +2 [+2, +2] points, margin 3 (5 seeds)"
    )
    few = compare({0: 0.5}, {0: 0.5}, 0.03)
    said = sentence(row(few, Ratio(1.05, -math.inf, math.inf, 1), False), GATE)
    assert "NOT ENOUGH SEEDS, 1.05× as fast, less than the 1.1× that trade-offs are worth" in said
    assert "+0 [?, ?] points" in said
    assert said.endswith("; use at least 5 seeds")
    assert sentence(row(None, None, None), GATE) == "speed: no seed finished in both this candidate and the baseline"
    said = sentence(row(None, Ratio(2.0, 1.9, 2.1, 5), True), GATE)
    assert said.startswith("speed: no verdict, 2"), "eval.episodes=0"
    assert said.endswith("as fast; no win rate of a seed is known on both sides")


def test_numbers_with_intervals():
    assert cell_text(Interval(0.613, 0.6, 0.62), 100, "{:.1f}") == "61.3 [60.0, 62.0]"
    assert cell_text(Interval(12.0, 8.0, math.inf), form="{:.0f}") == "12 [8, never]"
    assert cell_text(Interval(2.0, -math.inf, math.inf)) == "2"
    assert (cell_text(None), cell_text(Interval(math.nan, 1.0, 2.0))) == ("-", "nan [1, 2]")
    assert Ratio(2.0, 1.0, 3.0, 5).text() == "2.00× [1.00, 3.00]"


def test_tables_leave_out_what_no_env_tells_and_text_stays_text():
    stream = io.StringIO()
    good = compare(dict.fromkeys(range(5), 0.5), dict.fromkeys(range(5), 0.52), 0.03)
    rows = [row(None, None, None), row(good, Ratio(2.0, 1.9, 2.1, 5), True)]
    show_comparison(Console(file=stream, width=140), rows, GATE)
    text = stream.getvalue()
    assert "won [b] 100 %" in text
    assert "win rate %" in text
    assert "score diff." not in text
    assert "seconds to 0.4" in text
    assert "never" in text
