from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Barrier

import pytest
from rich.console import Console

from fasttrain_studies.beside import run_beside, shares
from fasttrain_studies.study import Study, Wanted
from study_toys import Fakes, summary


def wanted(*labels: str) -> list[Wanted]:
    return [Wanted(label, seed, (f"num_envs={label}",)) for seed in (0, 1) for label in labels]


def study(folder: Path) -> Study:
    return Study("compare", folder, [], Console(quiet=True))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems bind no process to cores")
def test_parts_have_cores_of_their_own_if_there_are_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 9, 11})
    assert shares(2) == [[3, 7, 11], [5, 9]]
    assert shares(1) == [[3, 5, 7, 9, 11]]
    assert shares(6) == [[3], [5], [7], [9], [11], [3]]


def test_two_run_at_once_and_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    both = Barrier(2, timeout=30)

    def meet(typed: dict[str, str], seed: int) -> dict[str, object]:
        both.wait()  # passes only if another cell runs too
        return summary()

    fakes = Fakes(meet).use(monkeypatch)
    ours = study(tmp_path)
    ran = run_beside(ours, wanted("1", "2"), 2)
    assert sorted(fakes.ran) == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    assert len(ran) == 4
    again = study(tmp_path)
    again.read_others()
    assert [cell.done for cell in again.cells] == [True] * 4
    assert run_beside(again, wanted("1", "2"), 2) == []


def test_wrong_settings_are_not_tried_with_other_seeds_and_a_stopped_cell_ends_the_study(tmp_path, monkeypatch):
    def ended(code: int) -> Fakes:
        bad = lambda typed, seed: {"exit_code": code} if typed["num_envs"] == "1" else summary()  # noqa: E731
        return Fakes(bad).use(monkeypatch)

    fakes = ended(2)
    run_beside(study(tmp_path / "wrong"), wanted("1", "2"), 1)
    assert fakes.ran == [("1", 0), ("2", 0), ("2", 1)]
    fakes = ended(4)
    with pytest.raises(KeyboardInterrupt):
        run_beside(study(tmp_path / "stopped"), wanted("2", "1", "3"), 1)
    assert fakes.ran == [("2", 0), ("1", 0)]
