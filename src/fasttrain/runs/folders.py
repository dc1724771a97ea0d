"""The folders that commands write into: what is in one, what may be removed, how a command line names it. And the
provenance of a run in plan.json: what was typed, the commit of the user's folder, versions, the machine.
"""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.machine import usable_cores
from fasttrain.saving.checkpoints import PREFIX, CheckpointFolder
from fasttrain.saving.files import holder, read_json
from fasttrain.spec.backends import played
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.removed import without_removed
from fasttrain.terminal import command as typed

PLAIN = re.compile(r"[\w./:+-]+")
MARKS = {  # what tells that a folder is one of these, the first that fits
    "study": ("study.json",),
    "sweep": ("sweep.json", "multirun.yaml"),
    "run": ("plan.json", "summary.json", "model.zip"),
}
PART = "said.txt"  # what a configuration that `fasttrain doctor` measures says; its folder is no run's
CELLS = "cells"  # of a study, in its folder; those of a sweep lie in the sweep's itself
GROUP = "FASTTRAIN_GROUP"  # environment variable that tells a cell its sweep's or study's folder
PARENT = "FASTTRAIN_PARENT"  # one that tells it the number of the process that started it, and ends with it
TRACKED = ("mlflow.db", "mlartifacts", "trackio")  # what trackers write there, for all runs of a group together
OWN = {  # what fasttrain itself writes there
    "study": ("study.json", "conf/profile/measured.yaml", "conf/profile/tuned.yaml", *TRACKED),
    "sweep": ("sweep.json", "sweep.csv", *TRACKED),
    "run": ("plan.json", "summary.json", "status.json", "perf.json", "checkup.json", "episodes.csv", "progress.csv",
            "evaluations.csv", "profile.txt", "profile.prof", "profile.html", "trace.json", "vecnormalize.npz",
            "vecnormalize.pkl", "checkpoints/step_*", "videos/step_*.mp4", "trackers.json", "tensorboard", "wandb",
            "daemons", "evaluating", "eval.json", "export.json", *TRACKED,
            *(f"{stem}{end}" for stem in ("model", "best_model", "last_good") for end in
              (".zip", ".opponents.pt", "_vecnormalize.npz", "_vecnormalize.pkl", ".onnx", ".torchscript.pt"))),
}  # fmt: skip
PAGE = ("report.html", "report")
NEEDED = ("plan.json", "summary.json", "model.zip")  # by eval, play, export and resume
# Of the configuration what a training does not read, or what its plan.json says by other keys.
NOT_COMPARED = ("run", "on_existing", "format", "model", "output", "trust", "play", "candidates", "seeds",
                "minutes", "warmup", "gate", "tune", "doctor")  # fmt: skip


class Held(NamedTuple):
    """What is in a folder."""

    folder: Path
    kind: str  # run, sweep or study

    def about(self, key: str = "", typed: str | Path | None = None) -> str:
        """`hydra.run.dir=x holds a run (crashed)`; or of what a caller of `train` gave."""
        key = key or ("hydra.sweep.dir" if self.kind == "sweep" else "hydra.run.dir")
        state = read_json(self.folder / "summary.json").get("status") if self.kind == "run" else None
        return f"{key}={typed or self.folder} holds a {self.kind}{f' ({state})' if isinstance(state, str) else ''}"


def held(folder: Path) -> Held | None:
    """What fasttrain wrote there before; None if nothing. Raises ConfigError if a process is at work there."""
    if process := holder(folder):
        raise ConfigError(f"{folder}: still going on (process {process}); use another folder, or wait for its end")
    kind = next((kind for kind, names in MARKS.items() if any((folder / name).exists() for name in names)), None)
    return None if kind is None else Held(folder, kind)


def clear(folder: Path, kind: str = "run", but: str = "") -> None:
    """Remove what fasttrain wrote there, and nothing else; `but`: a file that stays."""
    if kind != "run":
        for cell in (folder / CELLS if kind == "study" else folder).glob("*"):
            if cell.is_dir() and held(cell) is not None:
                clear(cell)
    own = (*OWN[kind], *(PAGE if (folder / PAGE[0]).exists() else ()))
    for path in [found for name in own if name != but for found in folder.glob(name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def missing_files(folder: Path, normalized: bool, pooled: bool, failed: Container[str]) -> list[str]:
    """What commands need of a run that is over and is not there, though its writing did not fail: removed or moved."""
    needed = [*NEEDED, *["vecnormalize.npz"] * normalized, *["model.opponents.pt"] * pooled]
    lost = [name for name in needed if name not in failed and not (folder / name).is_file()]
    return [f"{name} (it was written, and is gone)" for name in lost]


def changes(where: Path, config: Config) -> dict[str, Any]:
    """Dotted keys in which `config` differs from what the run in that folder was asked for, and their values here."""
    stored = read_json(where / "plan.json")
    asked = {row["flag"]: row["requested"] for row in stored.get("flags", ())}
    before = stored.get("config", {})
    before = flat(without_removed({**played(before), **{key: value for key, value in asked.items() if key in before}}))
    before |= {key: value for key, value in asked.items() if "." in key and key in before}
    now = flat(played(to_dict(config)))
    keys = [key for key in {**now, **before} if key.split(".")[0] not in NOT_COMPARED]
    return {key: now.get(key) for key in keys if key not in now or now[key] != before.get(key)}


def flat(node: object, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted key."""
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    return {k: v for key, part in node.items() for k, v in flat(part, f"{prefix}.{key}" if prefix else key).items()}


# --- how it is named


def way_on(folder: Path) -> str:
    """`saved in F: model.zip …; fasttrain resume run=F goes on`, by what is in the folder; of a study, its cells."""
    if study := read_json(folder / "study.json"):
        done = sum(cell.get("status") == "done" for cell in study.get("cells", ()))
        command = "tune" if study.get("command") == "tune" else "compare"
        return f"{done} cells are done, in {folder}; {command_line(command, run=folder)} goes on"
    steps = [int(path.name.removeprefix(PREFIX)) for path in CheckpointFolder(folder / "checkpoints").all()]
    there = ["model.zip"] * (folder / "model.zip").is_file() + [f"the checkpoint of {it:,} steps" for it in steps[:1]]
    kept = f"saved in {folder}: {' and '.join(there)}; " if there else ""
    done = read_json(folder / "summary.json").get("env_steps", 0)
    if done >= flat(read_json(folder / "plan.json")).get("config.total_timesteps", done + 1):
        return f"{kept}training was over, {command_line('eval', run=folder)} measures the model"
    if not steps:
        return f"{kept}there is no checkpoint to continue from"
    return f"{kept}{command_line('resume', run=folder)} goes on"


def command_line(command: str, *options: str, **folders: Path) -> str:
    """`fasttrain resume run=outputs/…`: to be typed as it is, whatever is in the folder's name."""
    named = [shlex.quote(override(key, folder)) for key, folder in folders.items()]
    return " ".join([typed(), command, *options, *named])


def override(key: str, folder: Path) -> str:
    """`run=outputs/…` for Hydra; a shell takes it quoted."""
    return f"{key}={folder if PLAIN.fullmatch(str(folder)) else in_quotes(str(folder))}"


def in_quotes(text: str) -> str:
    """As Hydra reads any text: backslashes stand for others in front of a quote alone."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


PACKAGES = ("fasttrain", "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "numba", "hydra-core")
GIT_S = 2.0  # at most, for each question


def provenance(overrides: Sequence[str], here: Path | None = None) -> dict[str, Any]:
    """JSON-ready: `command`, `began` (UTC), `folder` with its `git` state, `versions`, `machine`."""
    import psutil
    import torch

    here = here or Path.cwd()
    return {
        "command": " ".join([typed(), *map(shlex.quote, overrides)]),
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "folder": str(here),
        "git": git_state(here),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "cores": usable_cores(),
            "memory_bytes": int(psutil.virtual_memory().total),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """`commit`, and how many tracked files differ from it (`changed`); None outside a repository, or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else len(changed.splitlines())}


def _git(folder: Path, *words: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError, UnicodeError):
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S, check=True)
        return done.stdout.strip()
    return None


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
