"""scripts/rendering_studies.py: stored studies as Markdown."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("rendering_studies")


def interval(value: float, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


def study(metric: str, margin: float, change: float) -> dict[str, Any]:
    rows = [
        {"name": "stock", "seeds": [0, 1], "speed_up": None, "difference": None, "verdict": None},
        {"name": "slow", "seeds": [0, 1], "speed_up": interval(2.0, 1.5, 2.5), "verdict": "fail",
         "difference": interval(change, change - margin, change + margin)},
    ]  # fmt: skip
    return {"rows": rows, "gate": {"metric": metric, "margin": margin}}


def test_a_comparison_is_in_points_of_a_win_rate_or_in_rewards(studies: ModuleType):
    found = {"studies": {"cartpole": study("mean_reward", 20.0, -300.0), "skullking": study("win_rate", 0.03, -0.25)}}
    text = studies.compare(lambda name: found)
    assert "2 seeds each" in text
    assert "| CartPole, PPO | slow | 2.00× [1.50, 2.50] | -300 [-320, -280], margin 20 | fail |" in text
    assert "| Skull King, MaskablePPO | slow | 2.00× [1.50, 2.50] | -25 [-28, -22], margin 3 points | fail |" in text


def test_an_ablation_is_a_row_per_flag(studies: ModuleType):
    row = {
        "name": "engine",
        "change": "stock → fast",
        "added": None,
        "within": interval(1.2, 1.1, 1.3),
        "why": "keep: x",
    }
    found = {"machine": "2 cores, X", "rows": [row], "result": interval(0.99, 0.97, 1.02)}
    text = studies.ablate(lambda name: found)
    assert "on 2 cores in ten minutes; what was kept is 0.99× [0.97, 1.02] as fast as all of it" in text
    assert "| `engine` | stock → fast | - | 1.20× [1.10, 1.30] | keep: x |" in text


def test_tuning_says_what_it_found_or_that_it_found_nothing(studies: ModuleType):
    found = {"machine": "2 cores, X", "rows": [{}] * 7, "result": interval(1.3, 1.2, 1.4), "best": {"num_envs": 512}}
    assert "7 trials, `num_envs=512` at 1.30× [1.20, 1.40]." in studies.tune(lambda name: found).replace("\n", " ")
    found["best"] = {}
    assert "nothing clearly faster (1.30× [1.20, 1.40])" in studies.tune(lambda name: found).replace("\n", " ")


def test_the_doctor_stands_beside_what_is_measured(studies: ModuleType):
    found = {
        "doctor_share": {"median": 0.92}, "measured_share": {"best": 0.88}, "advice": "algo.n_epochs=2",
        "expected_gain": {"median": 0.5}, "real_gain": {"best": 0.4}, "usable_cores": 1,
    }  # fmt: skip
    none = {**found, "advice": None}
    text = studies.limits(lambda name: found if name == "limits/limits-skullking" else none)
    assert "| Skull King, `speed` | 1 | 92 % / 88 % | `algo.n_epochs=2` | +50 % / +40 % |" in text
    assert text.count("nothing that would pay") == 3
