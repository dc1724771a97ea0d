from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.runs.logs import FIXED, FLUSH_EVERY, FLUSH_S, EpisodeLog, read_episodes
from fasttrain.saving.files import Saving


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_rows_are_written_in_batches(tmp_path: Path):
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


def test_rare_episodes_do_not_wait_for_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("fasttrain.runs.logs.time.monotonic", lambda: now[0])
    log = EpisodeLog(tmp_path / "episodes.csv")
    for second, written in ((1.0, 0), (FLUSH_S + 1.0, 2), (FLUSH_S + 2.0, 2), (2 * FLUSH_S + 2.0, 4)):
        now[0] = 100.0 + second
        log.add((1, 0, 0, 1.0, 2, 0.1), {})
        assert (len(read(log.path)) if log.path.exists() else 0) == written


def test_only_scalars_become_columns(tmp_path: Path):
    log = EpisodeLog(tmp_path / "episodes.csv")
    info = {"b": np.float32(0.5), "a": "x, y", "list": [1], "array": np.zeros(3), "episode": {}, "action_mask": True}
    log.add((1, 2, 3, 4.0, 5, 6.0), info)
    log.flush()
    (row,) = read(tmp_path / "episodes.csv")
    assert list(row) == [*FIXED, "a", "b"]
    assert (row["a"], row["b"]) == ("x, y", "0.5")


def test_reward_terms_become_columns_where_asked_for(tmp_path: Path):
    for asked in (False, True):
        log = EpisodeLog(tmp_path / f"{asked}.csv", asked)
        log.add((1, 2, 3, 4.0, 5, 6.0), {"a": 1, "reward_terms": {"vp": 0.5, "win": 1.0}})
        log.flush()
        (row,) = read(log.path)
        assert list(row) == [*FIXED, "a", *(["reward_vp", "reward_win"] if asked else [])]


def test_a_run_without_episodes_leaves_the_header(tmp_path: Path):
    log = EpisodeLog(tmp_path / "episodes.csv")
    log.flush()
    assert (tmp_path / "episodes.csv").read_text() == ",".join(FIXED) + "\n"


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


@pytest.mark.parametrize("room", [0, 3, 70])
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
    assert (
        said == ["warning: episodes.csv could not be written ([Errno 28] No space left on device); the run goes on"] * 2
    )
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


@pytest.mark.parametrize("lost", [1, 15, 40, 10_000])
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


def test_a_shorter_file_of_other_columns_keeps_them(tmp_path: Path):
    (tmp_path / "episodes.csv").write_text(",".join([*FIXED, "'=b"]) + "\n")
    log = EpisodeLog(tmp_path / "episodes.csv")
    assert not log.go_on({"keys": ["a"], "bytes": 1000})
    log.add((9, 0, 0, 1.0, 2, 0.1), {"a": 1, "=b": 2})
    log.flush()
    assert log.path.read_text().splitlines()[1:] == ["9,0,0,1.0,2,0.1,2"]
