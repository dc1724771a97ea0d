from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCommand, configured
from fasttrain.spec.checks import NOT_APPLICABLE
from fasttrain.spec.precedence import key_of
from fasttrain_studies.ablate import Finding, Lever, effective_levers, find_levers, values_with
from fasttrain_studies.statistics import Ratio, compare
from fasttrain_studies.study import settings
from study_toys import Fakes, summary

GAINS = {"engine": ("fast", 2.0), "fused_update": ("auto", 3.0), "lean_info": (True, 1.0), "algo.n_epochs": (4, 1.5)}


def profile_of(typed: Mapping[str, str]) -> dict[str, Any]:
    """What the cell's generated profile says, flat."""
    conf = Path(typed["hydra.searchpath"].removeprefix("['file://").removesuffix("']"))
    content = yaml.safe_load((conf / "profile" / f"{typed['profile']}.yaml").read_text(encoding="utf-8"))
    below = content.pop("algo")
    return {**content, **{f"algo.{key}": value for key, value in below.items()}}


def speed_of(values: Mapping[str, Any]) -> float:
    rate = 100.0
    for key, (wanted, gain) in GAINS.items():
        rate *= gain if values[key] == wanted else 1.0
    return rate


class Ablated(Fakes):
    """Every cell leaves the plan of its profile."""

    def __call__(self, command: str, overrides: Any, *more: Any) -> Any:
        values = profile_of({key_of(text): text.partition("=")[2] for text in overrides})
        flags = [{"flag": key, "effective": value} for key, value in values.items() if not key.startswith("algo.")]
        self.plan = {"flags": flags}
        return super().__call__(command, overrides, *more)


def measured(change: Callable[[dict[str, Any], int], dict[str, Any]] = lambda values, seed: {}) -> Ablated:
    def run(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        values = profile_of(typed)
        won = 0.6 if values["algo.learning_rate"] == 0.001 else 0.4
        steps = int(typed["total_timesteps"])
        found = summary(speed_of(values) * (1 + 0.001 * seed), won + 0.001 * seed, env_steps=steps)
        return {**found, **change(values, seed)}

    return Ablated(run)


def test_what_pays_is_kept_and_becomes_a_profile(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = measured().use(monkeypatch)
    monkeypatch.setattr("fasttrain_studies.statistics.compare", partial(compare, min_pairs=2))
    flags = "candidates={ablate: [engine, fused_update, lean_info, n_epochs, learning_rate]}"
    done = fasttrain("compare", "+profile=speed", "report=false", flags).ok()
    rows = {row["name"]: row for row in done.json("study.json")["rows"]}
    assert list(rows) == ["engine", "fused_update", "lean_info", "learning_rate", "n_epochs"]
    assert rows["engine"]["added"]["value"] == pytest.approx(2.0)
    assert rows["fused_update"]["within"]["value"] == pytest.approx(3.0)
    assert rows["n_epochs"]["added"]["value"] == pytest.approx(1.5)
    assert rows["engine"]["quality"] is None, "of class exact: the same numbers"
    assert rows["learning_rate"]["quality"]["difference"] == pytest.approx(0.2)
    assert {name: row["keep"] for name, row in rows.items()} == {
        "engine": True, "fused_update": True, "lean_info": False, "learning_rate": True, "n_epochs": True,
    }  # fmt: skip
    assert rows["learning_rate"]["why"] == "keep: the profile learns worse without it"
    assert rows["lean_info"]["why"].startswith("drop: no gain, 1.00×")
    labels = [label for label, _ in fakes.ran]
    assert labels[:2] == ["baseline", "profile"], "both ends first"
    assert labels[2:8] == ["profile", "-engine", "-fused_update", "-lean_info", "-learning_rate", "-n_epochs"]
    assert labels[8:13] == ["baseline", "+engine", "+fused_update", "+lean_info", "+learning_rate"]
    assert labels[-6:] == ["profile", "measured"] * 3
    profile = (done.folder / "conf" / "profile" / "measured.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(profile)
    assert (values["engine"], values["lean_info"], values["algo"]["n_epochs"]) == ("fast", False, 4)
    assert "lean_info: false # drop: no gain" in profile
    assert "+profile=measured" in done.out


def test_what_pays_only_together_is_kept_after_all(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    def redundant(values: dict[str, Any], seed: int) -> dict[str, Any]:
        either = values["engine"] == "fast" or values["lean_info"]
        return summary(1000.0 if either else 100.0, env_steps=10**12)

    measured(redundant).use(monkeypatch)
    done = fasttrain("compare", "+profile=speed", "report=false", "candidates={ablate: [engine, lean_info]}")
    assert "the levers help only together, so that all are kept" in done.out
    values = yaml.safe_load((done.folder / "conf" / "profile" / "measured.yaml").read_text(encoding="utf-8"))
    assert (values["engine"], values["lean_info"]) == ("fast", True)


def test_a_lever_without_which_nothing_runs_is_kept_and_an_end_that_cannot_run_ends_it(fasttrain, monkeypatch):
    def brittle(values: dict[str, Any], seed: int) -> dict[str, Any]:
        whole = values["engine"] == "stock" and values["algo.n_epochs"] == 4
        return {"exit_code": 1, "error": "too slow"} if whole else {}

    measured(brittle).use(monkeypatch)
    done = fasttrain("compare", "+profile=speed", "report=false", "candidates={ablate: [engine, lean_info]}")
    engine = done.json("study.json")["rows"][0]
    assert (engine["keep"], engine["why"]) == (True, "keep: the profile does not run without it")
    assert "failed: -engine seed 0: too slow" in done.out
    Ablated(lambda typed, seed: {"exit_code": 1, "error": "the board fell"}).use(monkeypatch)
    done = fasttrain("ablate", "+profile=speed", "report=false")
    assert done.exit_code == 1
    assert "baseline or profile could not be run" in done.out


def test_the_time_is_kept(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = measured().use(monkeypatch)
    clock = iter(range(0, 100000, 20))
    monkeypatch.setattr("fasttrain_studies.study.Study.spent_s", lambda self: float(next(clock)))
    done = fasttrain("ablate", "+profile=speed", "report=false", "minutes=3")
    assert len(fakes.ran) <= 9
    last = done.json("study.json")["rows"][-1]
    assert (last["keep"], last["why"]) == (True, "keep: there was no time left")


def test_stopped_it_shows_and_keeps_what_it_found(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    flags = "candidates={ablate: [engine, fused_update]}"
    fakes = measured().use(monkeypatch)
    fakes.stop_at = 5  # both ends, then the profile and the profile without either
    stopped = fasttrain("compare", "+profile=speed", "report=false", flags)
    assert stopped.exit_code == 4
    assert "fasttrain compare run=" in stopped.out
    rows = {row["name"]: row for row in stopped.json("study.json")["rows"]}
    assert rows["engine"]["within"]["value"] == pytest.approx(2.0)
    assert rows["fused_update"]["within"]["value"] == pytest.approx(3.0)


def test_a_flag_that_costs_quality_is_dropped_however_fast():
    lever = Lever("n_epochs", {"algo.n_epochs": 10}, {"algo.n_epochs": 1})
    worse = compare(dict.fromkeys(range(5), 0.6), dict.fromkeys(range(5), 0.3), 0.03)
    finding = Finding(lever, None, Ratio(5.0, 4.0, 6.0, 3), worse)
    assert not finding.keep
    assert finding.why() == "drop: the profile learns better without it"


def plan(**effective: Any) -> dict[str, Any]:
    return {"flags": [{"flag": name, "effective": value} for name, value in effective.items()]}


def test_what_belongs_together_is_one_lever_and_all_of_them_are_the_profile():
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
    found = [*levers.values()]
    assert values_with(after, found, [*levers]) == after
    assert values_with(after, found, []) == before
    without = values_with(after, found, [name for name in levers if name != "batch_size"])
    assert {key for key in after if without[key] != after[key]} == {"batch_size"}


def test_levers_without_effect_on_this_machine_are_left_out():
    levers = find_levers(
        {"engine": "stock", "use_amp": "off", "prefetch": "off", "algo.n_epochs": 10},
        {"engine": "fast", "use_amp": "auto", "prefetch": "auto", "algo.n_epochs": 4},
    )
    baseline = plan(engine="stock", use_amp="off", prefetch=NOT_APPLICABLE)
    profile = plan(engine="fast", use_amp="off", prefetch=NOT_APPLICABLE)
    assert [lever.name for lever in effective_levers(levers, baseline, profile)] == ["engine", "n_epochs"]
