"""`loggers=[trackio]`: its store lies in the run's or sweep's folder, or where TRACKIO_DIR points."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from fasttrain.runs.loggers import MOST_CHARACTERS, PROJECT, Home, Numbers, Settings, Tracker
from fasttrain.terminal import near


class Trackio(Tracker):
    """One run of a project, which a resume continues."""

    name = "trackio"

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(home.shared.absolute() / "trackio"))  # read when it is imported
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
        return f"TRACKIO_DIR={near(Path(self._trackio.TRACKIO_DIR))} trackio show --project {self._project}"

    def end(self, status: str) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()
