from __future__ import annotations

import csv
import importlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import GROUP
from fasttrain.runs.loggers import IDS, Home, Tracker, numbers_of, start_tracker
from messages import assert_says, wrong_inputs

TYPED = ("engine=fast", "vec_env=dummy", "num_envs=2", "env.id=CartPole-v1", "algo=ppo", "algo.n_steps=64",
         "algo.n_epochs=1", "batch_size=64", "log_every=1", "eval.episodes=2", "checkup=off")  # fmt: skip
STEPS = "time/total_timesteps"
MET = "rollout/ep_rew_mean"


def rows_of(folder: Path) -> dict[int, float]:
    """Env steps → mean return, as progress.csv says."""
    with (folder / "progress.csv").open() as file:
        return {int(row[STEPS]): float(row[MET]) for row in csv.DictReader(file)}


def events_of(folder: Path) -> Any:
    read = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    return read(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def test_tensorboard_has_what_the_csv_has_and_more_and_a_resumed_run_writes_its_rows_again(fasttrain: RunCommand):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    more = ("checkpoint_every=128", "eval_every=128", "eval_async=false", "loggers=[csv,tensorboard]")
    done = fasttrain(*TYPED, "total_timesteps=256", *more).ok()
    events = events_of(done.folder)
    assert {event.step: event.value for event in events.Scalars(MET)} == pytest.approx(rows_of(done.folder))
    assert [event.step for event in events.Scalars("perf/env_step_ms")] == [*rows_of(done.folder)]
    evaluated = {row["env_steps"]: row["mean_reward"] for row in done.json("summary.json")["evaluations"]}
    assert {event.step: event.value for event in events.Scalars("eval/mean_reward")} == pytest.approx(evaluated)
    (quality,) = events.Scalars("quality/mean_reward")
    assert quality.value == pytest.approx(done.json("summary.json")["quality"]["mean_reward"])
    assert "_hparams_/experiment" in events.summary_metadata
    assert f"tensorboard --logdir {done.folder}" in done.out
    assert not any(name.startswith("perf/") for name in (done.folder / "progress.csv").read_text().split(","))
    shutil.rmtree(max((done.folder / "checkpoints").iterdir()))
    fasttrain("resume", f"run={done.folder}", "total_timesteps=384").ok()
    steps = [event.step for event in events_of(done.folder).Scalars(MET)]
    assert sorted({*steps}) == [*rows_of(done.folder)] == [128, 256, 384]
    assert steps.count(256) == 1


@pytest.mark.filterwarnings("ignore")  # MLflow uses what SQLAlchemy is to lose
def test_mlflow_has_params_rows_files_and_is_resumed(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = fasttrain(*TYPED, "total_timesteps=256", "loggers=[csv,mlflow]", "checkpoint_every=128").ok()

    def stored(query: str) -> list[Any]:
        with sqlite3.connect(done.folder / "mlflow.db") as store:
            return store.execute(query).fetchall()

    metrics, runs = f"select step, value from metrics where key = '{MET}'", "select run_uuid, status from runs"
    assert dict(stored(metrics)) == pytest.approx(rows_of(done.folder))
    params, states = dict(stored("select key, value from params")), stored(runs)
    assert (params["algo.n_epochs"], params["env.id"]) == ("1", "CartPole-v1")
    assert states == [(json.loads((done.folder / IDS).read_text())["mlflow"], "FINISHED")]
    assert {path.name for path in (done.folder / "mlartifacts").rglob("*.zip")} == {"model.zip"}
    fasttrain("resume", f"run={done.folder}", "total_timesteps=384").ok()
    assert stored(runs) == states
    assert dict(stored(metrics)) == pytest.approx(rows_of(done.folder))


def test_trackio_has_the_rows_in_the_run_s_folder(tmp_path: Path):
    """In a process of its own: it reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    folder = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO")}
    line = [sys.executable, "-m", "fasttrain", *TYPED, "total_timesteps=256", "loggers=[csv,trackio]", "report=false"]
    done = subprocess.run(
        [*line, f"hydra.run.dir={folder}"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as store:
        rows = [(step, json.loads(text)) for step, text in store.execute("select step, metrics from metrics")]
    assert {step: row[MET] for step, row in rows if MET in row} == pytest.approx(rows_of(folder))
    assert any("quality/mean_reward" in row for _, row in rows)
    assert "trackio show --project fasttrain" in done.stdout
    assert "Trackio project initialized" not in done.stdout


class StubRun:
    """What W&B's run gets."""

    offline, url = True, None

    def __init__(self, made: dict[str, Any]) -> None:
        self.made, self.rows, self.summary, self.ends = made, [], {}, []
        self.id, self.dir = made["id"], f"{made['dir']}/wandb/offline-run-1-{made['id']}/files"
        Path(self.dir).mkdir(parents=True)

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if row["global_step"] == StubRun.breaks_at:
            raise ConnectionError("the server is gone")

    def finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)

    breaks_at = -1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[StubRun]:
    """The runs that a stand-in for the package made."""
    runs: list[StubRun] = []

    def init(**made: Any) -> StubRun:
        if made.get("entity") == "nobody":
            raise PermissionError("no such entity")
        if "colour" in made:
            raise TypeError("init() got an unexpected keyword argument 'colour'")
        runs.append(StubRun(made))
        return runs[-1]

    stub = types.ModuleType("wandb")
    vars(stub).update(init=init, Settings=dict, login=lambda prompt: False)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_DIR", "")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(StubRun, "breaks_at", -1)
    return runs


def test_wandb_is_offline_without_a_key_and_goes_on_under_the_same_id(fasttrain: RunCommand, wandb: list[StubRun]):
    done = fasttrain(
        *TYPED, "total_timesteps=256", "loggers=[csv,{logger: wandb, project: mine}]", "checkpoint_every=128"
    ).ok()
    (run,) = wandb
    assert (run.made["mode"], run.made["project"], run.made["config"]["algo.n_epochs"]) == ("offline", "mine", 1)
    assert {row["global_step"]: row[MET] for row in run.rows if MET in row} == pytest.approx(rows_of(done.folder))
    assert run.summary["status"] == "done"
    assert run.summary["quality/mean_reward"] == done.json("summary.json")["quality"]["mean_reward"]
    assert run.ends == [0]
    assert f"logger: wandb sync {done.folder}/wandb/offline-run-1-{run.id}" in done.out
    (done.folder / "wandb").rename(done.folder / "elsewhere")  # the stand-in's folders have no time in their names
    fasttrain("resume", f"run={done.folder}", "total_timesteps=384").ok()
    assert (wandb[1].id, wandb[1].made["resume"]) == (run.id, "allow")


def test_a_failing_tracker_costs_one_line(fasttrain: RunCommand, wandb: list[StubRun], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StubRun, "breaks_at", 128)
    done = fasttrain(*TYPED, "total_timesteps=256", "loggers=[csv,wandb]")
    assert done.exit_code == 1
    lost = "failed, without harm to the rest: logger Wandb (ConnectionError: the server is gone"
    assert done.err.startswith(f"fasttrain: error: {lost}")
    assert (done.folder / "model.zip").exists()
    (line,) = [line for line in done.out.splitlines() if "wandb" in line.lower()]
    assert line.startswith("warning: logger Wandb.write failed: ConnectionError: the server is gone")
    assert len(rows_of(done.folder)) == 2
    done = fasttrain(*TYPED, "total_timesteps=128", "loggers=[csv,{logger: wandb, entity: nobody}]")
    assert "warning: logger wandb could not be started: PermissionError: no such entity" in done.out
    assert (done.exit_code, "logger wandb (PermissionError: no such entity" in done.err) == (1, True)


@pytest.mark.parametrize("typed", wrong_inputs("loggers"))
def test_wrong_arguments_and_secrets_are_refused(typed: str, fasttrain: RunCommand, wandb: list[StubRun]):
    refused = fasttrain(*TYPED, "total_timesteps=128", typed)
    refused.refused()
    assert_says("loggers", typed, refused.err)
    assert "abc123" not in refused.out + refused.err
    if refused.folder.exists():
        assert not any("abc123" in path.read_text() for path in refused.folder.rglob("*.yaml"))


def test_a_missing_package_is_told_at_first(fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    fasttrain(*TYPED, "total_timesteps=128", "loggers=[wandb]").refused("pip install 'fasttrain[wandb]'")

    class Theirs(Tracker):
        name = "theirs"

        def __init__(self, *_: object) -> None:
            import nothing_such  # noqa: F401

    with pytest.raises(
        ConfigError, match=r"^loggers: theirs needs a package that is not installed \(No module [^;]*\)"
    ):
        start_tracker(Theirs, Home(tmp_path), {}, {})


def test_only_finite_numbers_are_drawn():
    figures = {"a": 1, "b": float("nan"), "c": "text", "d": True, "e": 2.5, "f": None}
    assert numbers_of(figures, {"e": ("mlflow",), "a": None}, "mlflow") == {"a": 1.0, "d": 1.0}


def test_the_cells_of_a_sweep_share_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep, cell = tmp_path / "sweep", tmp_path / "sweep" / "0"
    assert (Home(cell).group, Home(cell).shared) == (None, cell)
    monkeypatch.setenv(GROUP, str(sweep))
    assert (Home(cell).group, Home(cell).shared) == (sweep, sweep)
    assert Home(tmp_path / "other").group is None  # a run that such a cell began elsewhere
