from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from conftest import RunCommand
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.runs.view import make_console
from fasttrain_studies.study import Cell
from fasttrain_studies.sweep import Sweep

SMALL = ("total_timesteps=128", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "eval.episodes=2",
         "vec_env=dummy", "torch_threads=1", "num_envs=2")  # fmt: skip
BRITTLE = """
import gymnasium as gym

class Brittle(gym.Wrapper):
    def __init__(self, breaks=False):
        super().__init__(gym.make('CartPole-v1'))
        self.breaks, self.t = breaks, 0

    def step(self, action):
        self.t += 1
        if self.breaks and self.t == 9:
            raise RuntimeError('the board fell')
        return super().step(action)
"""


def test_every_cell_runs_in_its_own_process_and_a_crash_stops_nothing(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "brittle.py").write_text(BRITTLE)
    done = fasttrain("-m", "+profile=speed", "env.entry_point=brittle:Brittle", "algo=ppo", *SMALL,
                     "+env.kwargs.breaks=true,false")  # fmt: skip
    assert done.exit_code == 1, "one crashed"
    table = done.json("sweep.json")
    failed, cell = table["cells"]
    assert (failed["status"], cell["status"], table["swept"]) == ("failed", "done", ["env.kwargs.breaks"])
    assert "the board fell" in failed["error"]
    assert (cell["speed_up"], table["speed_up_against"]) == (1.0, "cell 1")
    assert cell["summary"]["env_steps"] == 128
    assert (Path(cell["folder"]) / "model.zip").is_file()
    assert (Path(cell["folder"]) / ".hydra" / "overrides.yaml").is_file()
    assert [row["env.kwargs.breaks"] for row in done.table("sweep.csv")] == ["True", "False"]
    assert "[2/2] ++env.kwargs.breaks=False: done" in done.out
    assert "Sweep: 2 cells, speed-up against cell 1" in done.out
    assert f"report: {done.folder / 'report.html'}" in done.out
    assert (done.folder / "report.html").is_file()
    assert not list(done.folder.glob("*/report.html")), "cells have none unless asked for"


@pytest.mark.parametrize("typed", ["num_envs=range(5,1)", "num_envs=glob(*)"])
def test_a_sweep_over_nothing_says_so_before_anything_runs(fasttrain: RunCommand, typed: str):
    fasttrain("-m", "env.id=Pendulum-v1", "algo=sac,td3", "algo.tau=0.01", typed).refused(typed, "a list has no values")


@pytest.mark.parametrize("own", ["tau=0.01", "tau=0.01,0.02"])
def test_a_setting_that_only_the_swept_algorithms_have_is_accepted(tmp_path, monkeypatch, own: str):
    monkeypatch.chdir(tmp_path)
    run = Mock(return_value=(Cell("0", [], tmp_path, 0, "", 1.0, summary={"env_steps": 1}), False))
    monkeypatch.setattr("fasttrain_studies.sweep.run_cell", run)
    assert main(["-m", "algo=sac,td3", f"algo.{own}", "env.id=Pendulum-v1", "report=false"]) == 0
    assert run.call_count == 2 * len(own.split(","))
    assert main(["-m", "algo=sac,td3", "algo.n_epochs=3", "env.id=Pendulum-v1"]) == 2


def sweep_of(folder: Path, *cells: tuple[str, int, float | None]) -> Sweep:
    """Of cells (override, exit code, steps/s)."""
    sweep = Sweep("train", ["-m", "num_envs=1,2"], make_console())
    sweep.folder = folder
    for number, (override, code, speed) in enumerate(cells):
        summary: dict[str, Any] = {} if speed is None else {"steps_per_s": speed}
        sweep.cells.append(Cell(str(number), [override], folder, code, "", 1.0, summary=summary))
    return sweep


def test_speed_up_is_against_the_baseline_profile_where_there_is_one(tmp_path: Path):
    sweep = sweep_of(tmp_path, ("+profile=speed", 0, 50.0), ("+profile=baseline", 0, 10.0))
    sweep.finish()
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert (told["speed_up_against"], [cell["speed_up"] for cell in told["cells"]]) == ("cell 1", [5.0, 1.0])
    sweep = sweep_of(tmp_path, ("num_envs=1", 1, None))
    sweep.finish()
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert (told["speed_up_against"], told["cells"][0]["status"]) == ("-", "failed")


@pytest.mark.parametrize(
    ("codes", "expected"), [([0, 0], 0), ([0, 2], 2), ([0, 1], 1), ([2, 1], 1), ([0, 4], 4), ([0, -9], 1)]
)
def test_exit_code(codes: list[int], expected: int, tmp_path: Path):
    assert sweep_of(tmp_path, *((f"num_envs={code}", code, None) for code in codes)).finish() == expected


def test_an_error_of_the_sweep_itself_ends_it_and_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Mock(side_effect=ConfigError("no room"))
    monkeypatch.setattr("fasttrain_studies.sweep.run_cell", run)
    assert main(["-m", "+profile=speed", "seed=1,2,3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "fasttrain: error: no room"
    assert run.call_count == 1


def test_a_stopped_sweep_says_how_to_go_on_and_does(tmp_path, monkeypatch, capsys):
    """Ctrl-C reaches a cell that is still starting, which ends with 130; then the command that was named is given."""
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def cell(command: str, overrides: list[str], folder: Path, label: str) -> tuple[Cell, bool]:
        interrupted = ran == ["0"]
        ran.append(label)
        summary = {} if interrupted else {"steps_per_s": 9.0, "env_steps": 64}
        return Cell(label, overrides, folder, 130 if interrupted else 0, "", 1.0, summary=summary), interrupted

    monkeypatch.setattr("fasttrain_studies.sweep.run_cell", cell)
    sweep = ["-m", "+profile=speed", "report=true", "seed=1,2,3", "env.kwargs={}"]
    assert main([*sweep, "hydra.sweep.dir='my sweep'"]) == 4
    last = capsys.readouterr().out.splitlines()[-1]
    head, tail = f"stopped: 1 of 3 cells are done, in {tmp_path / 'my sweep'}; ", " goes on"
    assert last.startswith(head)
    assert last.endswith(tail)
    again = shlex.split(last.removeprefix(head).removesuffix(tail))
    assert again[0] == "fasttrain"
    assert main(again[1:]) == 0
    assert ran == ["0", "1", "1", "2"]
    cells = json.loads((tmp_path / "my sweep" / "sweep.json").read_text())["cells"]
    assert [(row["cell"], row["status"], row["steps_per_s"]) for row in cells] == [(i, "done", 9.0) for i in range(3)]
    assert main(again[1:-1]) == 2, "without on_existing=resume"
