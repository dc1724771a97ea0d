"""A study: cells stored one by one, found again, told apart by what was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.cli.commands import OWNERS, STUDIES, prepare
from fasttrain.runs.view import make_console
from fasttrain.saving.files import read_json, write_json
from fasttrain.studies.study import OWN_KEYS, Study, Wanted, base_overrides
from study_toys import Fakes, summary


def study_in(folder: Path) -> Study:
    return Study("compare", folder, ["candidates=[a,b]", "num_envs=4", "run=x"], make_console())


def test_what_speaks_to_the_study_does_not_reach_its_cells():
    typed = [
        "+profile=speed",
        "seeds=3",
        "gate.margin=2",
        "run=x",
        "num_envs=4",
        "minutes=1",
        "--config-dir=here",
    ]
    assert base_overrides(typed) == ["+profile=speed", "num_envs=4", "--config-dir=here"]
    of_studies = {key.rstrip(".") for key, owner in OWNERS.items() if set(owner.commands) <= set(STUDIES)}
    assert of_studies <= set(OWN_KEYS)


def test_cells_are_stored_at_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(lambda typed, seed: summary(100.0 + seed)).use(monkeypatch)
    wanted = [Wanted("a", seed, ("num_envs=4",)) for seed in (0, 1)]
    first = study_in(tmp_path)
    first.notes["what"] = 1
    found = first.run(wanted)
    assert {seed: cell.summary["steps_per_s"] for seed, cell in found["a"].items()} == {0: 100.0, 1: 101.0}
    stored = read_json(tmp_path / "study.json")
    assert stored["arguments"] == ["candidates=[a,b]", "num_envs=4"]
    assert stored["cells"][1]["overrides"] == ["num_envs=4", "live=off", "report=false", "seed=1"]
    again = study_in(tmp_path)
    assert again.notes == {"what": 1}
    assert set(again.run([*wanted, Wanted("a", 0, ("num_envs=8",))])["a"]) == {0, 1}
    assert len(fakes.ran) == 3, "only the new cell ran"


def test_a_study_of_before_is_gone_on_with_by_the_settings_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(100.0)).use(monkeypatch)
    typed = ["env.id=A-v0", "checkpoint_every=5min", "minutes=2", "candidates=[a,b]"]
    wanted = [Wanted("a", 0, tuple(base_overrides(typed)))]
    study_in(tmp_path).run(wanted)
    stored = read_json(tmp_path / "study.json")
    before = ["env=gym", "env.name=A-v0", "env.id=A-v0", "checkpoint_every_minutes=5"]
    stored["arguments"] = [*before, "horizon_minutes=2", "profile_name=x", "candidates=[a,b]"]
    stored["cells"][0]["overrides"] = [*before, *stored["cells"][0]["overrides"][2:]]
    write_json(tmp_path / "study.json", stored)
    assert prepare("compare", [], [f"run={tmp_path}"])[1][1:] == [
        "env=gym", *typed[:3], "candidates='[a,b]'", f"run={tmp_path}"
    ]  # fmt: skip
    found = study_in(tmp_path).find(Wanted("a", 0, ("env=gym", *wanted[0].overrides)))
    assert found is not None
    assert found.done


def test_a_failed_cell_is_run_again_but_an_illegal_label_is_not_tried_with_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    codes = iter([2, 1, 1])
    fakes = Fakes(lambda typed, seed: {"exit_code": next(codes), "error": "no"}).use(monkeypatch)
    study = study_in(tmp_path)
    cells = [Wanted("bad", seed, ("num_envs=0",)) for seed in range(3)] + [Wanted("worse", 0, ())]
    assert study.run(cells) == {"bad": {}, "worse": {}}
    assert fakes.ran == [("bad", 0), ("worse", 0)]
    study.run([Wanted("worse", 0, ())])
    assert fakes.ran[-1] == ("worse", 0)
    assert len(study.cells) == 2, "the later try replaces the earlier one"
    assert [cell.status for cell in study.failed()] == ["illegal", "failed"]


def test_none_is_begun_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(lambda typed, seed: summary()).use(monkeypatch)
    study = study_in(tmp_path)
    assert study.run([Wanted("a", 0, ())], until_s=0.0) == {"a": {}}
    assert fakes.ran == []


def test_a_signal_ends_it_after_the_cell_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(), stop_at=1).use(monkeypatch)
    study = study_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run([Wanted("a", 0, ()), Wanted("a", 1, ())])
    assert len(read_json(tmp_path / "study.json")["cells"]) == 1


def test_a_cell_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(61234.0, 0.613, mean_reward=2.9)).use(monkeypatch)
    cell = study_in(tmp_path).run([Wanted("a", 0, ())])["a"][0]
    assert cell.described() == "done · 61,234 steps/s · reward 2.9 · win 61.3 %"
