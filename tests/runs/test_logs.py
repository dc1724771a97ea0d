from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.runs.evaluate import summarise
from fasttrain.runs.logs import (
    FIELDS,
    FIXED,
    FLUSH_EVERY,
    FLUSH_S,
    FORMULA,
    EpisodeLog,
    EvaluationLog,
    csv_cell,
    from_csv_cell,
    read_episodes,
)
from fasttrain.saving.files import Saving
from fasttrain.terminal import one_line
from report_toys import write_episodes

ANYTHING = st.text(st.characters(), max_size=60)  # surrogates included


def test_cells():
    for formula in ("=HYPERLINK(1)", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "＝1", np.str_("=1")):
        assert csv_cell(formula) == f"'{formula}"
    for text in ("won", "-3.5", "-inf", "'twas", -3.5, None):
        assert csv_cell(text) == text
    assert csv_cell("\t=1") == csv_cell("\r\n=1") == "'=1"
    assert csv_cell("a\nb\x00c") == "a b\N{REPLACEMENT CHARACTER}c"
    assert (csv_cell(True), csv_cell(np.bool_(False))) == (1, 0)


@given(ANYTHING)
def test_any_text_is_one_cell_of_one_line_and_comes_back(text: str):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(["a", csv_cell(text), "b"])
    raw = file.getvalue()
    raw.encode("utf-8")
    assert raw.count("\n") == 1
    first, cell, last = next(csv.reader(io.StringIO(raw)))
    assert (first, last) == ("a", "b")
    assert from_csv_cell(cell) == one_line(text, 1000)
    if cell.startswith(FORMULA):
        assert not math.isnan(float(cell)) or "nan" in cell.lower(), "a number"


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_rows_are_written_in_batches_or_after_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EpisodeLog(tmp_path / "episodes.csv")
    for number in range(FLUSH_EVERY - 1):
        log.add((number, 0, 0, 1.0, 2, 0.1), {"is_win": True})
    assert not (tmp_path / "episodes.csv").exists()
    log.add((FLUSH_EVERY, 0, 0, 1.0, 2, 0.1), {"is_win": False})
    assert len(read(tmp_path / "episodes.csv")) == FLUSH_EVERY
    log.add((FLUSH_EVERY + 1, 0, 0, 1.0, 2, 0.1), {"is_win": False, "late": 1})
    log.flush()
    rows = read(tmp_path / "episodes.csv")
    assert len(rows) == FLUSH_EVERY + 1
    assert list(rows[0]) == [*FIXED, "is_win"]
    assert (rows[0]["is_win"], rows[-1]["is_win"]) == ("1", "0")
    now = [100.0]
    monkeypatch.setattr("fasttrain.runs.logs.time.monotonic", lambda: now[0])
    log = EpisodeLog(tmp_path / "rare.csv")
    for second, written in ((1.0, 0), (FLUSH_S + 1.0, 2), (FLUSH_S + 2.0, 2), (2 * FLUSH_S + 2.0, 4)):
        now[0] = 100.0 + second
        log.add((1, 0, 0, 1.0, 2, 0.1), {})
        assert (len(read(log.path)) if log.path.exists() else 0) == written


@pytest.mark.parametrize(("terms", "more"), [(False, []), (True, ["reward_vp", "reward_win"])])
def test_only_scalars_become_columns_and_reward_terms_where_asked_for(tmp_path: Path, terms: bool, more: list[str]):
    log = EpisodeLog(tmp_path / "episodes.csv", terms)
    log.flush()
    assert log.path.read_text() == ",".join(FIXED) + "\n", "of no episodes the header"
    log.path.unlink()
    log = EpisodeLog(tmp_path / "episodes.csv", terms)
    info = {"b": np.float32(0.5), "a": "x, y", "list": [1], "array": np.zeros(3), "episode": {}, "action_mask": True}
    log.add((1, 2, 3, 4.0, 5, 6.0), {**info, "reward_terms": {"vp": 0.5, "win": 1.0}})
    log.flush()
    (row,) = read(log.path)
    assert list(row) == [*FIXED, "a", "b", *more]
    assert (row["a"], row["b"]) == ("x, y", "0.5")


def test_a_hostile_envs_rows_stay_rows_and_are_read_back(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes.csv")
    reasons = ["=HYPERLINK(1)", "-3.5", "a\nb\r\x00", "'=x", "\ud800", '"quoted", and more']
    for number, reason in enumerate(reasons):
        log.add((number, number, 0, 1.0, 5, 0.1), {"end_reason": reason, "=key": 1, 7: 2, "long": 10**5000})
    log.flush()
    lines = (tmp_path / "episodes.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(reasons)
    assert "'=HYPERLINK(1)" in lines[1]
    assert "'=key" in lines[0]
    found = read_episodes(tmp_path / "episodes.csv")
    assert found.reasons[:4] == ["=HYPERLINK(1)", "-3.5", "a b \N{REPLACEMENT CHARACTER}", "'=x"]
    assert found.reasons[5] == reasons[5]


class Full:
    """Takes the place of `Path.open`: a disk with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        real = Path.open

        def opened(path: Path, mode: str = "r", **more: Any) -> Any:
            file = real(path, mode, **more)
            if "a" in mode and self.room is not None:
                room, write = self.room, file.write

                def write_some(text: str) -> int:
                    write(text[:room])
                    file.flush()
                    raise OSError(28, "No space left on device")

                file.write = write_some
            return file

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 70])
def test_rows_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    said: list[str] = []
    full = Full(monkeypatch)
    log = EpisodeLog(tmp_path / "episodes.csv", saving=Saving(said.append))
    log.add((1, 0, 0, 1.0, 2, 0.1), {"is_win": True})
    full.room = room
    log.flush()
    assert (log.path.stat().st_size, len(said)) == (0, 1)
    log.add((2, 0, 0, 1.0, 2, 0.1), {"is_win": False})
    log.flush()
    full.room = None
    log.flush()
    assert [(row["episode"], row["is_win"]) for row in read(log.path)] == [("1", "1"), ("2", "0")]
    log.add((3, 0, 0, 1.0, 2, 0.1), {"is_win": True})
    full.room = room
    log.flush()
    log.flush()
    full.room = None
    log.flush()
    assert [row["episode"] for row in read(log.path)] == ["1", "2", "3"]
    line = "warning: episodes.csv could not be written ([Errno 28] No space left on device); the run goes on"
    assert said == [line, line]
    assert log.saving.failed == {}


def test_too_many_rows_that_wait_lose_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.logs.MOST_ROWS", 10)
    full = Full(monkeypatch)
    log = EpisodeLog(tmp_path / "episodes.csv", saving=Saving(lambda line: None))
    full.room = 0
    for number in range(15):
        log.add((number, 0, 0, 1.0, 2, 0.1), {})
    log.flush()
    full.room = None
    log.flush()
    assert [row["episode"] for row in read(log.path)] == [str(number) for number in range(5, 15)]
    assert log.left_out == 5


@pytest.mark.parametrize("lost", [1, 40, 10_000])
def test_a_file_shorter_than_known_goes_on_with_its_own_header(tmp_path: Path, lost: int):
    log = EpisodeLog(tmp_path / "episodes.csv")
    for number in range(3):
        log.add((number, 0, 0, 1.0, 2, 0.1), {"is_win": True, "=key": 1})
    position = log.position()
    content = log.path.read_bytes()
    log.path.write_bytes(content[: max(5, len(content) - lost)])
    again = EpisodeLog(log.path)
    assert not again.go_on(position)
    again.add((9, 0, 0, 1.0, 2, 0.1), {"is_win": False, "=key": 2})
    again.flush()
    lines = log.path.read_text().splitlines()
    header = ",".join([*FIXED, "'=key", "is_win"])
    assert [line == header for line in lines] == [True] + [False] * (len(lines) - 1)
    rows = read(log.path)
    assert [row["episode"] for row in rows] == [*map(str, range(len(rows) - 1)), "9"]
    assert (rows[-1]["'=key"], rows[-1]["is_win"]) == ("2", "0")


def test_rows_of_evaluations_are_there_at_once_and_read_back(tmp_path: Path):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(100, 1.5, summarise([(1.0, 5, {"is_win": True, "score_diff": 4}), (3.0, 5, {"is_win": False})]))
    log.add(200, 2.5, summarise([(1.0, 5, {}), (1.0, 5, {})]))
    with (tmp_path / "evaluations.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == FIELDS
    found = [first[name] for name in ("env_steps", "mean_reward", "win_rate", "score_diff")]
    assert found == ["100", "2.0", "0.5", "4.0"]
    assert float(first["win_rate_low"]) < 0.5 < float(first["win_rate_high"])
    assert (second["win_rate"], second["win_rate_low"], second["mean_reward_low"]) == ("", "", "")  # of no width
    assert b"\r" not in log.file.read_bytes(), "lines end as in all other tables"
    assert [row["env_steps"] for row in log.rows] == [100, 200]
    for torn in ("200,2.0,5", "200,2.0,5\n", "200,2.0,5,1.", "2"):
        log = EvaluationLog(tmp_path / "evaluations.csv")
        log.add(100, 1.0, summarise([(1.5, 3, {})]))
        with log.file.open("a", encoding="utf-8") as file:
            file.write(torn)
        assert log.known(1000) == log.rows


def test_what_is_known_of_earlier_policies_can_be_read_back(tmp_path: Path):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    assert log.known(100) == []
    for step in (10, 20, 30):
        log.add(step, step / 8, summarise([(1e-5, 3, {}), (3e-5, 4, {})]))
    again = EvaluationLog(tmp_path / "evaluations.csv")
    assert again.known(20) == log.rows[:2]
    (tmp_path / "evaluations.csv").write_text("env_steps\nx\n")
    assert again.known(20) == []


def test_a_row_that_could_not_be_written_comes_with_the_next(tmp_path: Path):
    log = EvaluationLog(tmp_path / "evaluations.csv")
    log.add(10, 1.0, summarise([(1.5, 3, {})]))
    before, refuse = log.file.read_bytes(), Mock(side_effect=OSError(28, "No space left on device"))
    for where in ("pathlib.Path.write_text", "fasttrain.saving.files.os.replace"):
        with patch(where, refuse), pytest.raises(OSError, match="No space"):
            log.add(20, 2.0, summarise([(1.5, 3, {})])) if "Path" in where else log.go_on(log.rows)
    assert ([*tmp_path.iterdir()], log.file.read_bytes()) == ([log.file], before), "good rows stay"
    log.add(30, 3.0, summarise([(1.5, 3, {})]))
    assert [row["env_steps"] for row in EvaluationLog(log.file).known(100)] == [10, 20, 30]


HEAD = "episode,env_steps,env,return,length,wall_s,end_reason,is_win\n"


def test_columns_of_episodes_and_files_with_nothing_to_read(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    write_episodes(file, 400)
    found = read_episodes(file)
    assert (len(found), found.sampled) == (400, False)
    assert found.numbers["return"][[0, -1]].tolist() == [0.01, 4.0]
    assert found.numbers["wall_s"][-1] == 4.0
    assert found.numbers["is_win"].sum() == 200
    assert found.reasons[:3] == ["lost", "won", "lost"]
    assert found.column(("vp_diff",)) is None
    for text in ("", "episode\n1\n", HEAD, HEAD + "1,10", "\x00\n\x00\n", HEAD + "1,10,0,1,1,0.1,\x00,1\n"):
        (tmp_path / "episodes.csv").write_text(text, encoding="utf-8")
        assert len(read_episodes(tmp_path / "episodes.csv")) <= 1
    assert len(read_episodes(tmp_path / "missing.csv")) == 0


def test_a_cut_line_a_broken_row_and_quotes(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    rows = (
        '1,10,0,1.5,10,0.1,"a, ""b""\nc",1\n'
        "2,twenty,0,2.5,10,0.2,won,1\n3,30,0\n4,40,0,,10,0.4,won,\n5,50,0,3.5,10,0.5,,0\n"
    )
    file.write_text(HEAD + rows + "6,60,0,4", encoding="utf-8")
    found = read_episodes(file)
    assert found.numbers["env_steps"].tolist() == [10.0, 50.0], "others lack a number, or may lack digits"
    assert found.reasons == ['a, "b"\nc', "none given"]


def test_of_a_large_file_an_even_sample(tmp_path: Path):
    file = tmp_path / "episodes.csv"
    write_episodes(file, 30_000)
    found = read_episodes(file, whole_bytes=0, blocks=4)
    assert found.sampled
    assert 5000 < len(found) < 7000, "of 30,000 with 43 to 50 bytes each: 262 kB"
    steps = found.numbers["env_steps"]
    assert (np.diff(steps) > 0).all(), "no row twice, none cut in two"
    assert found.numbers["return"] == pytest.approx(steps / 10 * 4 / 30_000)
    assert steps[0] == 10
    assert steps[-1] == 300_000
