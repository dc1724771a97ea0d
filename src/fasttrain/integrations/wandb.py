"""`loggers=[wandb]`: Weights & Biases; offline, in the run's folder, where nobody is logged in."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fasttrain.runs.loggers import PROJECT, Home, Numbers, Settings, Tracker
from fasttrain.terminal import near


class Wandb(Tracker):
    """One run of theirs, which a resume continues."""

    name = "wandb"

    def __init__(self, home: Home, settings: Settings, **further: object) -> None:
        wandb = import_module("wandb")
        os.environ.setdefault("WANDB_DIR", str(home.folder))
        # Offline where nobody is logged in: asking for a key would stop the run.
        mode = None if os.environ.get("WANDB_MODE") else "online" if wandb.login(prompt=False) else "offline"
        run_id = str(further.pop("id", home.known_as(self.name) or uuid.uuid4().hex[:8]))
        chosen = {"project": PROJECT, "name": home.name, "group": home.group.name if home.group else None,
                  "dir": str(home.folder), "mode": mode, "config": dict(settings), "save_code": False,
                  "settings": wandb.Settings(silent=True, console="off"), **further}  # fmt: skip
        self._run = wandb.init(id=run_id, resume="allow", reinit="create_new", **chosen)
        self._run.define_metric("*", step_metric="global_step")
        self._wandb = wandb
        home.remember(self.name, run_id)

    def measure(self, numbers: Numbers, step: int) -> None:
        self._run.log({**numbers, "global_step": step})

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
        self.over(status)
        written = sorted(place.glob(f"offline-run-*-{self._run.id}"))  # one more with every resume
        return f"wandb sync {' '.join(str(near(folder)) for folder in written)}" if offline else look

    def end(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))
