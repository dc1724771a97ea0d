"""`fasttrain compare`: candidates, the order of cells, resuming, verdicts and exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain.studies.compare import Candidate, parse_candidates
from study_toys import Fakes, rising, summary

THREE = "candidates=[baseline,speed,{name: slow, overrides: [profile=speed, num_envs=8]}]"


def test_candidates_are_profiles_overrides_or_both():
    text = '[baseline, num_envs=8, {name: mine, overrides: [profile=speed, "env.kwargs.opponents=[hard,easy]"]}]'
    assert parse_candidates(text) == [
        Candidate("baseline", ("profile=baseline",)),
        Candidate("num_envs=8", ("num_envs=8",)),
        Candidate("mine", ("profile=speed", "env.kwargs.opponents=[hard,easy]")),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "compare needs candidates="),
        ("[baseline", "not readable as a list"),
        ("speed", "expected a list"),
        ("[speed]", "a comparison needs two"),
        ("[speed, speed]", "two are called speed"),
        ("[speed, {name: x}]", "cannot read {'name': 'x'}"),
        ("[speed, 3]", "cannot read 3"),
        ("[speed, {name: x, overrides: [-m]}]", "'-m' of x is no key=value"),
        ("[speed, {name: '', overrides: []}]", "cannot read {'name': ''"),
        ("[speed, {name: [x], overrides: []}]", "cannot read {'name': ['x']"),
    ],
)
def test_what_is_no_list_of_candidates_is_refused(text: str | None, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_candidates(text)
    assert message in str(caught.value)


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
    study = done.json("study.json")
    baseline, speed, slow = study["rows"]
    assert (baseline["verdict"], speed["verdict"], slow["verdict"]) == (None, "pass", "fail")
    assert speed["speed_up"]["value"] == pytest.approx(10.05, abs=0.01)
    assert speed["faster"]
    assert slow["difference"]["value"] == pytest.approx(-0.2)
    assert study["gate"]["metric"] == "win_rate"
    assert study["gate"]["margin"] == 0.03
    assert 0.4 < study["gate"]["threshold"] < 0.6, "90 % of the rise of the baseline's training curve"
    assert baseline["time_to_threshold_s"]["value"] < 4.0
    assert slow["time_to_threshold_s"]["value"] is None, "never"
    assert "slow: FAIL, 10.05× [10.03, 10.07] as fast; win rate -20 [-20, -20] points, margin 3 (5 seeds)" in done.out
    assert study["cells"][0]["overrides"] == [
        "total_timesteps=4000", "profile=baseline", "live=off", "report=false", "seed=3",
    ]  # fmt: skip


def test_equal_candidates_pass_and_are_said_to_bring_nothing(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(learns).use(monkeypatch)
    done = fasttrain("compare", "candidates=[baseline,{name: again, overrides: [profile=baseline]}]", "report=false")
    assert done.exit_code == 0
    assert len(fakes.ran) == 10, "each runs by itself, so that speeds differ by noise alone"
    (_, again) = done.json("study.json")["rows"]
    assert (again["verdict"], again["faster"], again["speed_up"]["value"]) == ("pass", False, 1.0)
    assert "less than the 1.1× that trade-offs are worth" in done.out


def test_a_stopped_comparison_goes_on_where_it_was(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    first = Fakes(learns, stop_at=4).use(monkeypatch)
    folder = tmp_path / "study"
    stopped = fasttrain("compare", THREE, "seeds=2", f"run={folder}", "report=false", "hydra.run.dir=" + str(folder))
    # the folder of the test fixture comes after ours: what counts is study.json's place
    place = stopped.folder
    assert stopped.exit_code == 4
    assert len(first.ran) == 4
    assert "goes on" in stopped.out
    stored = json.loads((place / "study.json").read_text())
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


def test_an_illegal_candidate_is_said_before_anything_runs(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(learns).use(monkeypatch)
    done = fasttrain("compare", "candidates=[baseline,spede]")
    assert (done.exit_code, fakes.ran) == (2, [])
    assert "candidate spede: profile=spede: no such profile" in done.err
    done = fasttrain("compare", "candidates=[baseline,num_env=3]")
    assert "candidate num_env=3: unknown key 'num_env'; did you mean 'num_envs'" in done.err


def test_minutes_instead_of_steps(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(learns).use(monkeypatch)
    done = fasttrain("compare", "candidates=[baseline,speed]", "minutes=2", "seeds=1", "report=false")
    overrides = done.json("study.json")["cells"][0]["overrides"]
    assert overrides[:3] == ["stop.max_minutes=2", "total_timesteps=1000000000000", "profile=baseline"]
    refused = fasttrain("compare", "candidates=[baseline,speed]", "minutes=2", "algo=dqn")
    assert refused.exit_code == 2
    assert "minutes=2: exploration and schedules stretch over total_timesteps; give it too" in refused.err


def test_a_real_comparison(fasttrain: RunCommand):
    candidates = "candidates=[{name: stock, overrides: [profile=baseline, vec_env=dummy]},speed]"
    done = fasttrain("compare", candidates, "seeds=1",
                     "env.id=CartPole-v1", "algo=ppo", "total_timesteps=1024", "algo.rollout_size=512", "batch_size=64",
                     "algo.n_epochs=1", "eval.episodes=4", "torch_threads=1", "num_envs=4",
                     "vec_env=dummy")  # fmt: skip
    assert done.exit_code == 0, done.out
    rows = done.json("study.json")["rows"]
    assert [row["name"] for row in rows] == ["stock", "speed"]
    assert rows[0]["env_steps"]["value"] == rows[1]["env_steps"]["value"] == 1024
    assert rows[1]["verdict"] == "not enough seeds"
    cell = done.folder / done.json("study.json")["cells"][1]["folder"]
    with (cell / "episodes.csv").open() as file:
        assert len(list(csv.DictReader(file))) > 10
    assert (done.folder / "report.html").is_file()
    assert not (cell / "report.html").exists()
