"""What a cell says: curves, tails, times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fasttrain.studies.judge import Outcome, read_outcome
from fasttrain.studies.study import Cell
from study_toys import summary, write_episodes


def cell(folder: Path, wins: list[int], **more: float | None) -> Cell:
    write_episodes(folder, wins)
    return Cell("x", [], folder, 0, "", 1.0, 7, summary(env_steps=len(wins) * 10, **more))


def test_a_cell_with_a_winner_is_read_by_its_wins(tmp_path: Path):
    found = read_outcome(cell(tmp_path, [0] * 150 + [1] * 350))
    assert (found.seed, found.curve_of, found.total, found.figure("steps_per_s")) == (7, "win rate", 5000.0, 1000.0)
    assert found.tail() == 1.0
    assert found.begins_with() == 0.0
    assert found.time_to(0.5) == (2000.0, 2.0), "episode 200: 50 of the last 100 are won"
    assert found.time_to(1.1) is None
    assert found.efficiency(5000) == pytest.approx(0.7)
    assert found.efficiency(1500) == 0.0
    assert found.figure("win_rate") == 0.5
    assert found.figure("score_diff") is None


def test_without_a_win_rate_the_returns_count(tmp_path: Path):
    found = read_outcome(cell(tmp_path, [0, 1] * 100, win_rate=None))
    assert found.curve_of == "return"
    assert found.tail() == pytest.approx(0.5)


def test_a_cell_without_episodes_has_no_curve(tmp_path: Path):
    found = read_outcome(Cell("x", [], tmp_path, 0, "", 1.0, None, summary()))
    assert (found.tail(), found.begins_with(), found.time_to(0.1), found.efficiency(100.0)) == (None,) * 4
    assert isinstance(found, Outcome)
    assert found.env_steps.dtype == np.float64
