"""The experiment trackers of `loggers=[…]`: TensorBoard, MLflow, Weights & Biases and Trackio.

The package of a tracker is imported when its class is built.
"""

from __future__ import annotations

import io
import logging
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import HParam, TensorBoardOutputFormat

from fasttrain.runs.loggers import MOST_CHARACTERS, PROJECT, Home, Numbers, Settings, Tracker
from fasttrain.terminal import near, own_program


class TensorBoard(TensorBoardOutputFormat, Tracker):
    """Event files in the run's folder, by SB3's writer. After a resume TensorBoard ignores repeated rows."""

    name = "tensorboard"

    def __init__(self, home: Home, settings: Settings) -> None:
        self._folder, self._look = (
            str(home.folder / "tensorboard"),
            f"{own_program('tensorboard')} --logdir {near(home.shared)}",
        )
        plain = (bool, int, float)
        self._settings = {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
        import_module("tensorboard")  # without this package torch's writer fails only later
        super().__init__(self._folder)

    def cut(self, env_steps: int) -> None:
        self.writer.close()
        self.writer = type(self.writer)(log_dir=self._folder, purge_step=env_steps + 1)

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        if final:
            rows = {"settings": HParam(self._settings, dict(final)), **final}
            self.write(rows, dict.fromkeys(rows, ()), step)
        return self._look


MOST_ROWS = 100  # most rows (parameters) in a request: the limit of MLflow's servers
EVERY_S = 20.0  # seconds between two requests to MLflow; a request takes 46 ms
STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """One run of an experiment of MLflow.

    Args:
        uri: the store; empty: MLFLOW_TRACKING_URI, or without it a SQLite file in the run's or sweep's folder.
        experiment: the experiment's name; empty: the sweep's name.
    """

    name = "mlflow"

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
        known = home.known_as(self.name)
        self._run_id = known or self._client.create_run(number, run_name=home.name).info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        home.remember(self.name, self._run_id)
        before = self._client.get_run(self._run_id).data.params  # MLflow refuses changes of params
        texts = {name: str(value)[:MOST_CHARACTERS] for name, value in settings.items() if name not in before}
        self._send("params", [self._entities.Param(name, text) for name, text in texts.items()])

    def measure(self, numbers: Numbers, step: int) -> None:
        now = time.time_ns() // 1_000_000
        self._waiting += [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        if time.monotonic() - self._sent > EVERY_S:
            self._send_waiting()

    def _send_waiting(self) -> None:
        rows, self._waiting, self._sent = self._waiting, [], time.monotonic()
        self._send("metrics", rows)

    def _send(self, kind: str, rows: Sequence[Any]) -> None:
        for first in range(0, len(rows), MOST_ROWS):
            self._client.log_batch(self._run_id, **{kind: rows[first : first + MOST_ROWS]})

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self.measure(final, step)
        for file in files:
            self._client.log_artifact(self._run_id, str(file))
        self.over(status)
        return f"{own_program('mlflow')} ui --backend-store-uri {self._uri}" if self._local else self._uri

    def end(self, status: str) -> None:
        self._send_waiting()
        self._client.set_terminated(self._run_id, STATES.get(status, "KILLED"))


class Wandb(Tracker):
    """One run of a project of Weights & Biases; a resumed run continues it. Without a login it works offline."""

    name = "wandb"

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        self._wandb = import_module("wandb")
        os.environ.setdefault("WANDB_DIR", str(home.folder))
        # Offline without a login, because asking for a key would stop the run.
        mode = None if os.environ.get("WANDB_MODE") else "online" if self._wandb.login(prompt=False) else "offline"
        run_id = str(further.pop("id", home.known_as(self.name) or uuid.uuid4().hex[:8]))
        chosen = {"project": PROJECT, "name": home.name, "group": home.group.name if home.group else None,
                  "dir": str(home.folder), "mode": mode, "config": dict(settings), "save_code": False,
                  "settings": self._wandb.Settings(silent=True, console="off"), **further}  # fmt: skip
        self._run = self._wandb.init(id=run_id, resume="allow", reinit="create_new", **chosen)
        self._run.define_metric("*", step_metric="global_step")
        home.remember(self.name, run_id)

    def measure(self, numbers: Numbers, step: int) -> None:
        self._run.log({**numbers, "global_step": step})

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self._run.summary.update({**final, "status": status})
        offline = bool(self._run.offline)
        if files and not offline:  # offline, an artifact would only be a second copy in the run's folder
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        place = Path(self._run.dir).parents[1]
        look = "" if offline else str(self._run.url)
        self.over(status)
        written = sorted(place.glob(f"offline-run-*-{self._run.id}"))  # each resume adds a folder
        return f"{own_program('wandb')} sync {' '.join(str(near(folder)) for folder in written)}" if offline else look

    def end(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class Trackio(Tracker):
    """One run of a project of Trackio; a resumed run continues it. Its store is TRACKIO_DIR, by default in the run's or
    sweep's folder.
    """

    name = "trackio"

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(home.shared.absolute() / "trackio"))  # Trackio reads it at its import
        self._trackio = import_module("trackio")
        texts = {name: str(value)[:MOST_CHARACTERS] for name, value in settings.items()}
        chosen = {"project": PROJECT, "name": home.known_as(self.name) or home.name,
                  "group": home.group.name if home.group else None, "config": texts, "embed": False,
                  "auto_log_gpu": False, "auto_log_cpu": False, **further}  # fmt: skip
        with redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(resume="allow", **chosen)
        self._project = chosen["project"]
        home.remember(self.name, str(chosen["name"]))

    def measure(self, numbers: Numbers, step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        self.measure(final, step)
        self.over(status)
        shows = f"{own_program('trackio')} show --project {self._project}"
        return f"TRACKIO_DIR={near(Path(self._trackio.TRACKIO_DIR))} {shows}"

    def end(self, status: str) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()
