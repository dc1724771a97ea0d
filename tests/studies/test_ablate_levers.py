"""Levers between two sets of settings."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import NOT_APPLICABLE
from fasttrain.studies.ablate import chosen_levers, effective_levers, find_levers, values_with
from fasttrain.studies.study import settings


def plan(**effective: Any) -> dict[str, Any]:
    return {"flags": [{"flag": name, "effective": value} for name, value in effective.items()]}


def test_what_belongs_together_is_one_lever():
    before, after = settings(configured("+profile=baseline")), settings(configured("+profile=speed"))
    levers = {lever.name: lever for lever in find_levers(before, after)}
    assert list(levers)[:3] == ["engine", "vec_env", "num_envs"]
    assert levers["num_envs"].after == {"num_envs": 256}
    assert set(levers["logging"].before) == {
        "log_every", "train_log_enabled", "train_log_to_console", "train_log_to_file",
    }  # fmt: skip
    assert levers["learning_rate"].text() == "0.0003 → 0.001"
    assert {name: lever.flag_class for name, lever in levers.items() if name in ("engine", "logging", "n_epochs")} == {
        "engine": "exact", "logging": "exact", "n_epochs": "trade-off",
    }  # fmt: skip


def test_applying_all_is_the_profile_and_none_the_baseline():
    before, after = settings(configured("+profile=baseline")), settings(configured("+profile=speed"))
    levers = find_levers(before, after)
    assert values_with(before, after, levers, [lever.name for lever in levers]) == after
    assert values_with(before, after, levers, []) == before
    without = values_with(before, after, levers, [lever.name for lever in levers if lever.name != "batch_size"])
    assert {key for key in after if without[key] != after[key]} == {"batch_size"}


def test_levers_without_effect_on_this_machine_are_left_out():
    levers = find_levers(
        {"engine": "stock", "use_amp": "off", "prefetch": "off", "algo.n_epochs": 10},
        {"engine": "fast", "use_amp": "auto", "prefetch": "auto", "algo.n_epochs": 4},
    )
    baseline = plan(engine="stock", use_amp="off", prefetch=NOT_APPLICABLE)
    profile = plan(engine="fast", use_amp="off", prefetch=NOT_APPLICABLE)
    assert [lever.name for lever in effective_levers(levers, baseline, profile)] == ["engine", "n_epochs"]


def test_levers_may_be_chosen_by_name():
    levers = find_levers({"engine": "stock", "lean_info": False}, {"engine": "fast", "lean_info": True})
    assert [lever.name for lever in chosen_levers(levers, ["lean_info"])] == ["lean_info"]
    assert chosen_levers(levers, []) == levers
    with pytest.raises(ConfigError, match="lean makes no difference here; did you mean 'lean_info'"):
        chosen_levers(levers, ["lean"])
