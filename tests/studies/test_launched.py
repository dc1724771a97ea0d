from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

import slurm
from conftest import RunCommand
from fasttrain.cli import main
from fasttrain_studies.launched import own_cores, parallel_cells
from fasttrain_studies.study import Cell

pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")

SMALL = ("env.id=CartPole-v1", "algo=ppo", "total_timesteps=128", "algo.rollout_size=64", "batch_size=32",
         "algo.n_epochs=1", "eval.episodes=2", "vec_env=dummy", "torch_threads=1", "num_envs=2")  # fmt: skip
JOBLIB = ("-m", "+profile=speed", "hydra/launcher=joblib")


def test_cells_side_by_side_give_the_table_of_the_usual_launcher(fasttrain: RunCommand):
    done = fasttrain(*JOBLIB, "hydra.launcher.n_jobs=2", *SMALL, "seed=1,2", "algo.gamma=0.9,7")
    assert done.exit_code == 2
    assert "4 cells by JoblibLauncher, 2 side by side, each on its own cores" in done.out
    assert "[4/4] " in done.out
    table = done.json("sweep.json")
    assert sorted(table["swept"]) == ["algo.gamma", "seed"]
    assert [(cell["cell"], cell["status"]) for cell in table["cells"]] == [
        (0, "done"), (1, "illegal"), (2, "done"), (3, "illegal")
    ]  # fmt: skip
    assert "algo.gamma=7" in table["cells"][1]["error"]
    usual = fasttrain("-m", "+profile=speed", *SMALL, "seed=1,2", "algo.gamma=0.9,7").json("sweep.json")
    for ours, theirs in zip(table["cells"], usual["cells"], strict=True):
        assert ours["overrides"] == theirs["overrides"]
        assert ours["mean_reward"] == theirs["mean_reward"]


@pytest.mark.parametrize("launcher", ["submitit_slurm", "ray"])
def test_other_launchers_start_cells_too(
    fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
):
    plugin = f"hydra_{launcher.partition('_')[0]}_launcher"
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"{plugin} is not installed")
    slurm.install(tmp_path, monkeypatch)
    done = fasttrain("-m", "+profile=speed", f"hydra/launcher={launcher}", *SMALL, "seed=1,2").ok()
    assert [cell["status"] for cell in done.json("sweep.json")["cells"]] == ["done", "done"]
    assert ("2 cells by SlurmLauncher\n" in done.out) == (launcher == "submitit_slurm")


class Cells:
    """In place of `run_cell`: one job after the other, in this process."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.ran, self.now_s = [*codes], list[tuple[str, list[str]]](), 0.0

    def time(self) -> float:
        return self.now_s

    def __call__(self, command: str, overrides: list[str], folder: Path, label: str) -> tuple[Cell, bool]:
        self.ran.append((label, overrides))
        self.now_s += 40.0
        summary = {"steps_per_s": 9.0, "env_steps": 64}
        return Cell(label, overrides, folder, self.codes.pop(0), "why", 1.0, summary=summary), False


def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cells: Cells, *more: str) -> tuple[int, list[str]]:
    monkeypatch.setattr("fasttrain_studies.launched.run_cell", cells)
    monkeypatch.setattr("fasttrain_studies.sweep.run_cell", cells)
    for module in ("launched", "sweep"):
        monkeypatch.setattr(f"fasttrain_studies.{module}.time", cells)
    code = main([*more, "+profile=speed", "report=true", "env.kwargs={}", "seed=1,2,3", f"hydra.sweep.dir={tmp_path}"])
    return code, [row["status"] for row in json.loads((tmp_path / "sweep.json").read_text())["cells"]]


@pytest.mark.parametrize(
    "launcher", [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")], ids=["usual", "joblib"]
)
def test_a_sweep_ends_at_an_error_or_in_time_and_goes_on(
    launcher: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, found = sweep(monkeypatch, tmp_path, cells := Cells(0, 1), "-m", *launcher, "sweep.stop_on_error=true")
    assert (code, found[:2], {*found[2:]} <= {"stopped"}) == (1, ["done", "failed"], True)
    assert [label for label, _ in cells.ran] == ["0", "1"]
    again = ("-m", *launcher, "sweep.stop_on_error=true", "on_existing=resume")
    code, found = sweep(monkeypatch, tmp_path, cells := Cells(0, 0), *again)
    assert (code, found) == (0, ["done"] * 3)
    assert [label for label, _ in cells.ran] == ["1", "2"]
    code, found = sweep(monkeypatch, tmp_path / "b", Cells(0, 0), "-m", *launcher, "sweep.minutes=1")
    assert (code, found[:2], {*found[2:]} <= {"stopped"}) == (4, ["done", "done"], True)
    assert "on_existing=resume goes on" in capsys.readouterr().out


def test_a_cell_finds_the_files_of_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "mine" / "profile").mkdir(parents=True)
    (tmp_path / "mine/profile/short.yaml").write_text("# @package _global_\ntotal_timesteps: 64\n")
    typed = ("-m", f"hydra.searchpath=[file://{tmp_path / 'mine'}]", "+profile@short=short")
    code, _ = sweep(monkeypatch, tmp_path / "out", cells := Cells(0, 0, 0), *typed[:2])
    assert code == 0
    assert all(typed[1] in overrides for _, overrides in cells.ran)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_cells_side_by_side_have_different_cores(tmp_path: Path):
    every, both = os.sched_getaffinity(0), Barrier(2)

    def cell(_: int) -> set[int]:
        with own_cores(tmp_path, 2):
            both.wait(60)
            return os.sched_getaffinity(0)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(cell, range(2))
    assert one | other == every
    assert not one & other or len(every) == 1
    with own_cores(tmp_path, 0):
        assert os.sched_getaffinity(0) == every


@pytest.mark.parametrize(
    ("asked", "launcher", "parallel"),
    [
        ("auto", {"n_jobs": 3}, 3),
        ("auto", {"n_jobs": -1}, 8),
        ("auto", {"n_jobs": -2}, 7),
        ("auto", {"cpus_per_task": 4}, 2),
        ("auto", {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"}, 0),
        (5, {"n_jobs": -1}, 5),
    ],
)
def test_cells_side_by_side(asked: Any, launcher: Any, parallel: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain_studies.launched.usable_cores", lambda: 8)
    assert parallel_cells(asked, SimpleNamespace(get=launcher.get)) == parallel


def test_a_launcher_without_its_plugin_is_told(fasttrain: RunCommand):
    fasttrain("-m", "hydra/launcher=ray_jobs", *SMALL, "seed=1,2").refused("pip install hydra-ray-launcher")
