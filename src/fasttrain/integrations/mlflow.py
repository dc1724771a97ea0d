"""`loggers=[mlflow]`: its store is SQLite in the run's or sweep's folder, or where MLFLOW_TRACKING_URI points."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fasttrain.runs.loggers import MOST_CHARACTERS, PROJECT, Home, Numbers, Settings, Tracker

MOST_ROWS = 100  # in a request: what MLflow's servers take of parameters
EVERY_S = 20.0  # a row of its own costs its store 46 ms
STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """One run of an experiment. `uri` is the store, `experiment` its name there (else the sweep's)."""

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
        before = self._client.get_run(self._run_id).data.params  # a parameter cannot be changed
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
        return f"mlflow ui --backend-store-uri {self._uri}" if self._local else self._uri

    def end(self, status: str) -> None:
        self._send_waiting()
        self._client.set_terminated(self._run_id, STATES.get(status, "KILLED"))
