from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunCommand
from fasttrain.saving.files import read_json
from fasttrain_studies.exchanges import moved
from fasttrain_studies.space import Range
from fasttrain_studies.study import Cell, run_cell
from study_toys import SMALL


def test_an_exchange_is_the_better_model_with_new_settings(fasttrain: RunCommand):
    more = (
        "population.exchange_every=256",
        "population.explore={algo.learning_rate: {low: 1e-5, high: 1e-2, log: true}}",
    )
    done = fasttrain("population=2", *SMALL, "eval.episodes=60", *more).ok()  # few would often have equal means
    study = done.json("study.json")
    (found,) = study["exchanges"]
    assert found["env_steps"] == 256
    assert {found["model"], found["source"]} == {"model seed 0", "model seed 1"}
    assert found["value"] < found["value_of_source"]
    folders = {f"{cell['label']} seed {cell['seed']}": done.folder / cell["folder"] for cell in study["cells"]}
    changed, source = (read_json(folders[found[key]] / "plan.json")["config"]["algo"] for key in ("model", "source"))
    assert changed["learning_rate"] == found["settings"]["algo.learning_rate"]
    ratio = changed["learning_rate"] / source["learning_rate"]
    assert min(abs(ratio - 0.8), abs(ratio - 1.25)) < 1e-3
    assert "exchange: 12 of the 12 tensors" in (folders[found["model"]] / "log.txt").read_text()
    assert [cell["status"] for cell in study["cells"]] == ["done", "done"]
    again = fasttrain("population", f"run={done.folder}").ok()
    assert "trainings to" not in again.out, "nothing is left to do"


def test_a_model_that_died_is_no_longer_ranked(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    real, ran = run_cell, list[str]()

    def dies(command: str, overrides: list[str], folder: Path, *more: Any, **others: Any) -> tuple[Cell, bool]:
        ran.append(f"{command} {folder.name[:11]}")
        cell, stopped = real(command, overrides, folder, *more, **others)
        if command == "resume" and "seed0" in folder.name:  # after its summary was written
            cell.exit_code, cell.error = -9, "killed by signal SIGKILL"
        return cell, stopped

    monkeypatch.setattr("fasttrain_studies.exchanges.run_cell", dies)
    done = fasttrain("population=2", *SMALL, "total_timesteps=768", "population.exchange_every=256")
    assert done.exit_code == 1
    assert [each for each in ran if "seed0" in each] == ["train model_seed0", "resume model_seed0"]
    study = done.json("study.json")
    assert {row["env_steps"] for row in study["exchanges"]} <= {256}, "one model alone exchanges nothing"
    assert [row["name"] for row in study["rows"]] == ["model seed 1"]
    assert "killed by signal SIGKILL" in done.out


def test_new_values_stay_within_their_limits():
    rng = np.random.default_rng(0)
    of = Range(0.001, 0.1, True)
    drawn = {moved(0.01, of, rng) for _ in range(40)}
    assert drawn == {0.008, 0.0125}
    assert {moved(0.1, of, rng) for _ in range(40)} == {0.08, 0.1}
    assert {moved(4, [2, 4, 8], rng) for _ in range(40)} == {2, 8}
    assert {moved(2, [2, 4, 8], rng) for _ in range(40)} == {2, 4}
    assert all(0.001 <= moved("linear_0.1", of, rng) <= 0.1 for _ in range(40))
    assert {moved(10, Range(1, 20), rng) for _ in range(40)} == {8, 12}
