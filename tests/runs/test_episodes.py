from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fasttrain.runs.episodes import FIXED, FLUSH_EVERY, EpisodeLog


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
