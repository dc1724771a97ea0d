"""evaluations.csv has a row per evaluation at once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fasttrain.runs.evaluate import summarise
from fasttrain.runs.logs import FIELDS, EvaluationLog


def refuse(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_rows_are_there_at_once(tmp_path: Path):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(100, 1.5, summarise([(1.0, 5, {"is_win": True, "score_diff": 4}), (3.0, 5, {"is_win": False})]))
    log.add(200, 2.5, summarise([(1.0, 5, {}), (1.0, 5, {})]))
    with (tmp_path / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == FIELDS
    assert (first["env_steps"], first["mean_reward"], first["win_rate"], first["score_diff"]) == (
        "100",
        "2.0",
        "0.5",
        "4.0",
    )
    assert float(first["win_rate_low"]) < 0.5 < float(first["win_rate_high"])
    assert (second["win_rate"], second["win_rate_low"], second["mean_reward_low"]) == ("", "", "")  # of no width
    assert b"\r" not in log.file.read_bytes(), "lines end as in all other tables"
    assert [row["env_steps"] for row in log.rows] == [100, 200]


def test_what_is_known_of_earlier_policies_can_be_read_back(tmp_path: Path):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    assert log.known(100) == []
    for step in (10, 20, 30):
        log.add(step, step / 8, summarise([(1.5, 3, {}), (2.0, 4, {})]))
    again = EvaluationLog(tmp_path / "evaluations.csv")
    assert again.known(20) == log.rows[:2]
    (tmp_path / "evaluations.csv").write_text("env_steps\nx\n")
    assert again.known(20) == []


def test_a_row_that_could_not_be_written_comes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(10, 1.0, summarise([(1.5, 3, {})]))
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(OSError, match="No space"):
        log.add(20, 2.0, summarise([(1.5, 3, {})]))
    monkeypatch.undo()
    log.add(30, 3.0, summarise([(1.5, 3, {})]))
    assert [row["env_steps"] for row in EvaluationLog(log.file).known(100)] == [10, 20, 30]


@pytest.mark.parametrize("torn", ["200,2.0,5", "200,2.0,5\n", "200,2.0,5,1.", "2"])
def test_half_a_row_of_a_killed_run_is_left_out(tmp_path: Path, torn: str):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(100, 1.0, summarise([(1.5, 3, {})]))
    with log.file.open("a", encoding="utf-8") as file:
        file.write(torn)
    assert log.known(1000) == log.rows


def test_good_rows_stay_where_the_rewrite_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(100, 1.0, summarise([(1.5, 3, {})]))
    before = log.file.read_bytes()
    monkeypatch.setattr("fasttrain.saving.files.os.replace", refuse)
    with pytest.raises(OSError, match="No space"):
        EvaluationLog(log.file).go_on(log.rows)
    assert log.file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [log.file]
