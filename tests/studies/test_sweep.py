from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain.cli import main
from fasttrain.runs.view import make_console
from fasttrain.studies.cells import Cell
from fasttrain.studies.sweep import Sweep, figures

SMALL = ("total_timesteps=1024", "algo.rollout_size=512", "batch_size=64", "algo.n_epochs=1", "eval.episodes=4",
         "vec_env=dummy", "torch_threads=1")  # fmt: skip


def test_every_cell_runs_in_its_own_process_and_an_illegal_one_stops_nothing(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "-m", "env.id=CartPole-v1", "algo=ppo", *SMALL, "num_envs=0,4,8")
    assert done.exit_code == 2, "cells are done or illegal, none crashed"
    table = done.json("sweep.json")
    assert [cell["status"] for cell in table["cells"]] == ["illegal", "done", "done"]
    assert table["swept"] == ["num_envs"]
    assert "num_envs=0: must be at least 1" in table["cells"][0]["error"]
    assert table["cells"][1]["speed_up"] == 1.0
    assert table["speed_up_against"] == "cell 1"
    for cell in table["cells"][1:]:
        assert cell["summary"]["env_steps"] == 1024
        assert (Path(cell["folder"]) / "model.zip").is_file()
        assert (Path(cell["folder"]) / ".hydra" / "overrides.yaml").is_file()
    rows = list(csv.DictReader((done.folder / "sweep.csv").read_text().splitlines()))
    assert [row["num_envs"] for row in rows] == ["0", "4", "8"]
    assert float(rows[2]["speed_up"]) > 0
    assert "[2/3] num_envs=4: done" in done.out
    assert "Sweep: 3 cells, speed-up against cell 1" in done.out
    assert f"report: {done.folder / 'report.html'}" in done.out
    assert "Speed against mean reward" in (done.folder / "report.html").read_text(encoding="utf-8")
    assert not list(done.folder.glob("*/report.html")), "cells have none unless asked for"


def test_a_cell_that_crashes_is_listed(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "brittle.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Brittle(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def __init__(self, breaks=False): self.breaks, self.t = breaks, 0\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed); self.t = 0\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        if self.breaks and self.t == 9: raise RuntimeError('the board fell')\n"
        "        return np.zeros(2, np.float32), 1.0, self.t >= 10, False, {}\n"
    )
    done = fasttrain("-m", "+profile=speed", "env.entry_point=brittle:Brittle", "algo=ppo", *SMALL, "num_envs=4",
                     "+env.kwargs.breaks=true,false")  # fmt: skip
    assert done.exit_code == 1
    cells = done.json("sweep.json")["cells"]
    assert [cell["status"] for cell in cells] == ["failed", "done"]
    assert "the board fell" in cells[0]["error"]


def test_a_sweep_with_a_wrong_key_says_so_before_anything_runs(fasttrain: RunCommand):
    done = fasttrain("-m", "+profile=speed", "num_env=4,8")
    assert done.exit_code == 2
    assert "unknown key 'num_env'; did you mean 'num_envs'" in done.err


def sweep_of(cells: list[dict[str, Any]], folder: Path) -> Sweep:
    sweep = Sweep("train", ["-m", "num_envs=1,2"], make_console())
    sweep.folder = folder
    sweep.cells = [
        Cell(label=str(i), overrides=c["overrides"], folder=folder, exit_code=c.get("code", 0), error="", seconds=1.0,
             summary={"steps_per_s": c["speed"]} if "speed" in c else {})
        for i, c in enumerate(cells)
    ]  # fmt: skip
    return sweep


def test_speed_up_is_against_the_baseline_profile_where_there_is_one(tmp_path: Path):
    cells = [{"overrides": ["+profile=speed"], "speed": 50.0}, {"overrides": ["+profile=baseline"], "speed": 10.0}]
    sweep = sweep_of(cells, tmp_path)
    assert sweep._reference() == (10.0, "cell 1")
    assert figures(sweep.cells[0], 10.0)["speed_up"] == 5.0


@pytest.mark.parametrize(
    ("codes", "expected"), [([0, 0], 0), ([0, 2], 2), ([0, 1], 1), ([2, 1], 1), ([0, 4], 4), ([0, -9], 1)]
)
def test_exit_code(codes: list[int], expected: int, tmp_path: Path):
    sweep = sweep_of([{"overrides": [f"num_envs={i}"], "code": code} for i, code in enumerate(codes)], tmp_path)
    assert sweep.finish() == expected


def test_a_stopped_sweep_says_how_to_go_on_and_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C reaches a cell that is still starting, which ends with 130; then the command that was named is given."""
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def cell(command: str, overrides: list[str], folder: Path, label: str) -> tuple[Cell, bool]:
        interrupted = ran == ["0"]
        ran.append(label)
        summary = {} if interrupted else {"steps_per_s": 9.0, "env_steps": 64}
        return Cell(label, overrides, folder, 130 if interrupted else 0, "", 1.0, summary=summary), interrupted

    monkeypatch.setattr("fasttrain.studies.sweep.run_cell", cell)
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


@pytest.mark.parametrize("values", ["range(5,1)", "glob(*)"])
def test_a_sweep_over_no_value_is_wrong_input(fasttrain: RunCommand, values: str):
    done = fasttrain("-m", "env.id=CartPole-v1", "algo=ppo", f"num_envs={values}")
    assert done.exit_code == 2
    assert f"num_envs={values}" in done.err
    assert done.err.count("\n") == 1


def test_a_sweep_without_a_finished_cell_has_no_reference(tmp_path: Path):
    sweep = sweep_of([{"overrides": ["num_envs=1"], "code": 1}], tmp_path)
    assert sweep._reference() == (None, "-")
    assert sweep.cells[0].status == "failed"
