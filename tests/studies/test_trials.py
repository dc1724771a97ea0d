from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fasttrain.errors import ConfigError
from fasttrain_studies.space import Range, Space
from fasttrain_studies.trials import JOURNAL, Trials, lock_of

SPACE: Space = {"num_envs": [8, 16], "algo.gamma": Range(0.9, 0.99), "algo.n_epochs": Range(1, 9)}


def trials_in(folder: Path, space: Space = SPACE, objective: str = "reward", seed: int | None = 0) -> Trials:
    return Trials(folder, lock_of(folder), objective, space, seed)


def test_settings_come_back_as_they_are_typed_and_the_start_comes_first(tmp_path: Path):
    trials = trials_in(tmp_path, {**SPACE, "algo.net_arch": [[64, 64], None], "lean_info": [True, False]})
    trials.add_start({"num_envs": 16, "algo.gamma": 0.95, "algo.n_epochs": 3, "algo.net_arch": None, "lean_info": True})
    first = trials.point(trials.ask().params)
    assert first == {"num_envs": 16, "algo.gamma": 0.95, "algo.n_epochs": 3, "algo.net_arch": None, "lean_info": True}
    other = trials.point(trials.ask().params)
    assert other["num_envs"] in (8, 16)
    assert isinstance(other["algo.n_epochs"], int)
    assert other["algo.gamma"] == round(other["algo.gamma"], 5)
    assert other["algo.net_arch"] in ([64, 64], None)


def test_a_start_outside_of_the_space_is_taken_as_far_as_it_lies_inside(tmp_path: Path):
    trials = trials_in(tmp_path)
    trials.add_start({"num_envs": 16, "algo.gamma": 0.5, "algo.n_epochs": "auto"})
    point = trials.point(trials.ask().params)
    assert point["num_envs"] == 16
    assert 0.9 <= point["algo.gamma"] <= 0.99


def test_a_rounded_value_stays_in_its_range(tmp_path: Path):
    trials = trials_in(tmp_path, {"algo.gamma": Range(0.99, 0.9999)})
    found = {trials.point(trials.ask().params)["algo.gamma"] for _ in range(12)}
    assert len(found) == 12
    assert all(0.99 <= gamma <= 0.9999 for gamma in found)
    edge = trials_in(tmp_path, {"algo.gamma": Range(0.99, 0.9999991)})
    assert edge.point({"algo.gamma": 0.999999}) == {"algo.gamma": 0.9999991}


def test_processes_share_the_trials_of_the_same_objective_and_space(tmp_path: Path):
    one, other = trials_in(tmp_path), trials_in(tmp_path, seed=None)
    for trials, value in ((one, 1.0), (other, 3.0), (one, None)):
        trial = trials.ask()
        trials.begin(trial)
        trials.end(trial, value, "late" if value is None else "")
    assert [value for _, value, _ in one.ranked()] == [3.0, 1.0, None]
    assert [why for *_, why in other.ranked()] == ["", "", "late"]
    assert len(trials_in(tmp_path).known()) == 3
    assert trials_in(tmp_path, objective="win_rate").known() == []
    assert trials_in(tmp_path, {"num_envs": [1, 2]}).known() == []


def test_a_trial_of_a_killed_process_is_tried_again_and_one_that_runs_is_not(tmp_path: Path):
    trials, other, killed = trials_in(tmp_path), trials_in(tmp_path, seed=None), trials_in(tmp_path, seed=None)
    lost, running = killed.ask(), other.ask()
    killed.begin(lost)
    other.begin(running)
    assert trials.running() == {lost.number, running.number}
    killed.leave()  # as if the process had ended
    assert trials.running() == {running.number}
    again = trials.ask()
    assert again.params == lost.params
    assert trials.ask().params != lost.params, "once"
    assert [each.number for each in trials.known()] == [running.number]


def test_the_same_settings_get_the_same_value_without_a_run(tmp_path: Path):
    trials = trials_in(tmp_path, {"num_envs": [8, 16]})
    seen: dict[int, float] = {}
    for number in range(10):
        trial = trials.ask()
        point = trials.point(trial.params)["num_envs"]
        if not trials.repeat(trial):
            assert point not in seen
            seen[point] = float(number)
            trials.begin(trial)
            trials.end(trial, seen[point])
    assert len(seen) == len(trials.known()) == 2


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / JOURNAL).write_text("{}\nnonsense\n{}\n")
    with pytest.raises(ConfigError, match=r"trials.jsonl cannot be read \(.*remove it, and the search begins again"):
        trials_in(tmp_path)


def test_optuna_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trials = trials_in(tmp_path)
    trials.end(trials.ask(), 1.0)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("optuna").level == logging.ERROR
