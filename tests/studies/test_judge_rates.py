"""Speed of a cell once it runs, and ratios of cells that ran in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.studies.judge import speed_ratio
from fasttrain.studies.study import Cell
from study_toys import summary


def cell(folder: Path, steps_per_s: float, windows: list[tuple[int, float]] | None = None) -> Cell:
    folder.mkdir(parents=True, exist_ok=True)
    if windows is not None:
        rows = [{"env_steps": steps, "wall_s": wall_s} for steps, wall_s in windows]
        (folder / "perf.json").write_text(json.dumps({"windows": rows}))
    return Cell("x", [], folder, 0, "", 1.0, 0, summary(steps_per_s))


def test_the_first_window_is_left_out(tmp_path: Path):
    cold = cell(tmp_path / "a", 10.0, [(100, 10.0), (1100, 11.0), (3100, 13.0)])
    assert cold.rate == 1000.0
    assert cell(tmp_path / "b", 10.0, [(100, 10.0), (1100, 11.0)]).rate == 10.0, "too short"
    assert cell(tmp_path / "c", 10.0).rate == 10.0


def test_a_ratio_is_clear_beyond_noise(tmp_path: Path):
    def cells(speeds: list[float]) -> dict[int, Cell]:
        return {seed: cell(tmp_path / f"{speed}", speed) for seed, speed in enumerate(speeds)}

    same = speed_ratio(cells([100.0, 101.0, 102.0]), cells([100.0, 100.0, 100.0]))
    assert same is not None
    assert (same.pairs, same.clear, same.alike) == (3, False, True)
    half = speed_ratio(cells([50.0, 51.0, 52.0]), cells([100.0, 100.0, 100.0]))
    assert half is not None
    assert half.clear
    assert half.text() == "0.51× [0.50, 0.52]"
    noisy = speed_ratio(cells([50.0, 120.0, 130.0]), cells([100.0, 100.0, 100.0]))
    assert noisy is not None
    assert not noisy.clear
    assert not noisy.alike
    once = speed_ratio(cells([200.0]), cells([100.0]))
    assert once is not None
    assert once.text() == "2.00×"
    assert not once.clear, "one turn says nothing"
    assert not once.alike
    assert speed_ratio({}, cells([100.0])) is None
    assert once.value == pytest.approx(2.0)
