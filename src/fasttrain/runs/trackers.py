"""Experiment trackers behind SB3's logger: TensorBoard, Weights & Biases, MLflow and trackio, each in its own package.

They get every row of the log under SB3's names over env steps, [PERF] and evaluations beside it, the settings at the
start, and at the end what the run came to, with model and report where the tracker keeps files. What they write lies
in the run's folder, or in the sweep's, where its cells are one group. A tracker that fails is left out from there on:
one line, and no run ends for it.
"""

from __future__ import annotations

import io
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import HParam, KVWriter, SeqWriter, TensorBoardOutputFormat

from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import GROUP
from fasttrain.saving.files import read_json, write_json
from fasttrain.terminal import near

IDS = "trackers.json"  # in the run's folder: as whom each tracker knows the run, for a resume
PROJECT = "fasttrain"
MOST_ROWS = 100  # in a request: what MLflow's servers take of parameters
EVERY_S = 20.0  # a row of its own costs its store 46 ms
MOST_CHARACTERS = 500  # of a value: MLflow's limit of old servers, and nobody reads more
Numbers = Mapping[str, float]
Settings = Mapping[str, Any]


class Home:
    """Where a run's trackers write, and as whom they know it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        group = os.environ.get(GROUP)
        self.group = Path(group) if group and folder.is_relative_to(group) else None

    @property
    def shared(self) -> Path:
        """A folder for all runs of the group, else the run's own."""
        return self.group or self.folder

    def known_as(self, tracker: str) -> str | None:
        """The run's id there, if it is gone on with."""
        found = read_json(self.folder / IDS).get(tracker)
        return found if isinstance(found, str) else None

    def remember(self, tracker: str, run_id: str) -> None:
        """For a resume."""
        write_json(self.folder / IDS, {**read_json(self.folder / IDS), tracker: run_id})


class Tracker(KVWriter):
    """One run as one tracker sees it.

    Args:
        settings: what the run was asked for, by dotted key.
        further: what `loggers` says beside the tracker's name.
    """

    def cut(self, env_steps: int) -> None:
        """What was written of later steps is written again."""

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        """The run is over: `done` or `stopped`, what it came to, what it left. How to look at it."""
        raise TypeError(type(self))


class TensorBoard(Tracker, TensorBoardOutputFormat):
    """Event files in the run's folder, by torch's SummaryWriter."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self._folder, self._look = str(home.folder / "tensorboard"), f"tensorboard --logdir {near(home.shared)}"
        plain = (bool, int, float)
        self._settings = {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
        import_module("tensorboard")  # torch has a writer without it that fails later
        super().__init__(self._folder)

    def cut(self, env_steps: int) -> None:
        self.writer.close()
        self.writer = type(self.writer)(log_dir=self._folder, purge_step=env_steps + 1)

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        if final:
            rows = {"settings": HParam(self._settings, dict(final)), **final}
            self.write(rows, dict.fromkeys(rows, ()), step)
        return self._look


class Wandb(Tracker):
    """Weights & Biases; offline, in the run's folder, where nobody is logged in."""

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        wandb = import_module("wandb")
        os.environ.setdefault("WANDB_DIR", str(home.folder))
        run_id = str(further.pop("id", home.known_as("wandb") or uuid.uuid4().hex[:8]))
        chosen = {"project": PROJECT, "name": home.name, "group": home.group.name if home.group else None,
                  "dir": str(home.folder), "mode": _wandb_mode(wandb), "config": dict(settings), "save_code": False,
                  "settings": wandb.Settings(silent=True, console="off"), **further}  # fmt: skip
        self._run = wandb.init(id=run_id, resume="allow", reinit="create_new", **chosen)
        self._run.define_metric("*", step_metric="global_step")
        self._wandb, self._closed = wandb, False
        home.remember("wandb", run_id)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self._run.log({**numbers_of(key_values, key_excluded, "wandb"), "global_step": step})

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self._run.summary.update({**final, "status": status})
        offline = bool(self._run.offline)
        if files and not offline:  # offline it would be a second copy of the model in the run's folder
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        place = Path(self._run.dir).parents[1]
        look = "" if offline else str(self._run.url)
        self._end(0)
        written = sorted(place.glob(f"offline-run-*-{self._run.id}"))  # one more with every resume
        return f"wandb sync {' '.join(str(near(folder)) for folder in written)}" if offline else look

    def close(self) -> None:
        self._end(1)

    def _end(self, exit_code: int) -> None:
        if not self._closed:
            self._closed = True
            self._run.finish(exit_code=exit_code)


def _wandb_mode(wandb: Any) -> str | None:
    """What the user's environment says, else offline without a key: asking for one would stop the run."""
    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if wandb.login(prompt=False) else "offline"


class MLflow(Tracker):
    """MLflow's own store: SQLite in the run's or sweep's folder, or where `uri` or MLFLOW_TRACKING_URI points."""

    def __init__(self, home: Home, settings: Settings, uri: str = "", experiment: str = "") -> None:
        self._entities = import_module("mlflow.entities")
        for noisy in ("alembic", "mlflow"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        place = home.shared.absolute()
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"
        self._local = self._uri.startswith("sqlite:")
        self._client = import_module("mlflow").MlflowClient(self._uri)
        name = experiment or (home.group.name if home.group else PROJECT)
        found = self._client.get_experiment_by_name(name)
        artifacts = (place / "mlartifacts").as_uri() if self._local else None
        number = found.experiment_id if found else self._client.create_experiment(name, artifacts)
        known = home.known_as("mlflow")
        self._run_id = known or self._client.create_run(number, run_name=home.name).info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._waiting: list[Any] = []
        self._closed, self._sent = False, time.monotonic()
        home.remember("mlflow", self._run_id)
        before = self._client.get_run(self._run_id).data.params  # a parameter cannot be changed
        texts = {name: str(value)[:MOST_CHARACTERS] for name, value in settings.items() if name not in before}
        self._send("params", [self._entities.Param(name, text) for name, text in texts.items()])

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self._measure(numbers_of(key_values, key_excluded, "mlflow"), step)
        if time.monotonic() - self._sent > EVERY_S:
            self._send_waiting()

    def _measure(self, numbers: Numbers, step: int) -> None:
        now = time.time_ns() // 1_000_000
        self._waiting += [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]

    def _send_waiting(self) -> None:
        rows, self._waiting, self._sent = self._waiting, [], time.monotonic()
        self._send("metrics", rows)

    def _send(self, kind: str, rows: Sequence[Any]) -> None:
        for first in range(0, len(rows), MOST_ROWS):
            self._client.log_batch(self._run_id, **{kind: rows[first : first + MOST_ROWS]})

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self._measure(final, step)
        for file in files:
            self._client.log_artifact(self._run_id, str(file))
        self._end("FINISHED" if status == "done" else "KILLED")
        return f"mlflow ui --backend-store-uri {self._uri}" if self._local else self._uri

    def close(self) -> None:
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if not self._closed:
            self._closed = True
            self._send_waiting()
            self._client.set_terminated(self._run_id, status)


class Trackio(Tracker):
    """trackio's store in the run's or sweep's folder, or where TRACKIO_DIR points."""

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(home.shared.absolute() / "trackio"))  # read when it is imported
        self._trackio = import_module("trackio")
        texts = {name: str(value)[:MOST_CHARACTERS] for name, value in settings.items()}
        chosen = {"project": PROJECT, "name": home.known_as("trackio") or home.name,
                  "group": home.group.name if home.group else None, "config": texts, "embed": False,
                  "auto_log_gpu": False, "auto_log_cpu": False, **further}  # fmt: skip
        with redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(resume="allow", **chosen)
        self._project = chosen["project"]
        home.remember("trackio", str(chosen["name"]))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self._run.log(numbers_of(key_values, key_excluded, "trackio"), step=step)

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self._run.log(dict(final), step=step)
        self.close()
        return f"TRACKIO_DIR={near(Path(self._trackio.TRACKIO_DIR))} trackio show --project {self._project}"

    def close(self) -> None:
        if self._run is not None:
            with redirect_stdout(io.StringIO()):
                self._trackio.finish()
            self._run = None


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


def tracker(name: str, home: Home, settings: Settings, further: Mapping[str, Any]) -> Tracker:
    """The tracker of that name, made.

    Raises:
        ConfigError: its package is missing, or it takes no such arguments.
    """
    try:
        return TRACKERS[name](home, settings, **further)
    except ImportError as error:
        raise ConfigError(f"loggers: {name} is not installed ({error}); pip install 'fasttrain[{name}]'") from error
    except TypeError as error:
        raise ConfigError(f"loggers: {name} does not take {dict(further)}: {error}") from error


def numbers_of(
    key_values: Mapping[str, Any], excluded: Mapping[str, Sequence[str] | None], name: str
) -> dict[str, float]:
    """What a tracker can draw: finite numbers that are not kept from the writer of that name."""
    meant = {key: value for key, value in key_values.items() if name not in (excluded.get(key) or ())}
    kinds = (bool, int, float, np.number, np.bool_)
    found = {key: float(value) for key, value in meant.items() if isinstance(value, kinds)}
    return {key: value for key, value in found.items() if math.isfinite(value)}


class Watched(KVWriter, SeqWriter):
    """A tracker, or a writer of the user's: one that raises is left out from there on, and one line says so.

    Attributes:
        failed: why it is left out.
    """

    def __init__(self, writer: KVWriter | None, say: Callable[[str], None], name: str = "", failed: str = "") -> None:
        self.writer, self.failed, self._say = writer, failed, say
        self.name = name or type(writer).__name__

    def write(self, *arguments: object, **further: object) -> None:
        self._call("write", *arguments, **further)

    def write_sequence(self, sequence: list[str]) -> None:
        self._call("write_sequence", sequence)

    def cut(self, env_steps: int) -> None:
        self._call("cut", env_steps)

    def finish(self, *arguments: object) -> str:
        return str(self._call("finish", *arguments) or "")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object, **further: object) -> object:
        if self.failed or not hasattr(self.writer, method):
            return None
        try:
            return getattr(self.writer, method)(*arguments, **further)
        except Exception as error:  # whatever it is, no training ends for it
            self.failed = blame(error)
            self._say(f"warning: logger {self.name}.{method} failed: {self.failed}; it is left out, the run goes on")
            return None
