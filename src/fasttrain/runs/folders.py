"""The folders that commands write into: what a folder holds, what may be removed, how a command line names it. Also
the provenance of a run for plan.json: the typed command, the commit of the user's folder, versions and the machine.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Container, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.machine import usable_cores
from fasttrain.saving.checkpoints import PREFIX, CheckpointFolder
from fasttrain.saving.files import holder, read_json
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.plugins import SETTINGS, keys_of, without_unused
from fasttrain.spec.policies import member_file
from fasttrain.spec.removed import flat, present_path
from fasttrain.terminal import command as typed

PLAIN = re.compile(r"[\w./:+-]+")
MARKS = {  # kind → files that mark a folder of this kind; the first kind with such a file is taken
    "study": ("study.json",),
    "sweep": ("sweep.json", "multirun.yaml"),
    "run": ("plan.json", "summary.json", "episodes.csv", "model.zip"),
}
DOCTOR_LOG = "said.txt"  # output of one configuration in `fasttrain doctor`; a folder with this file is no run
CELLS = "cells"  # subfolder of a study for its runs; the runs of a sweep are directly in the sweep's folder
GROUP = "FASTTRAIN_GROUP"  # environment variable: the folder of the sweep or study to which a run belongs
PARENT = "FASTTRAIN_PARENT"  # environment variable: process id of the study; its runs end when this process ends
TRACKER_FILES = ("mlflow.db", "mlartifacts", "trackio")  # written by trackers for all runs of a group together
STEMS = ("model", "best_model", "last_good", "exchange")
WRITTEN = {  # kind → the files that fasttrain writes for it
    "study": ("study.json", "trials.jsonl", "conf/profile/measured.yaml", "conf/profile/tuned.yaml", *TRACKER_FILES),
    "sweep": ("sweep.json", "sweep.csv", *TRACKER_FILES),
    "run": ("plan.json", "summary.json", "status.json", "perf.json", "checkup.json", "episodes.csv", "progress.csv",
            "evaluations.csv", "vecnormalize.npz", "vecnormalize.pkl", "checkpoints/step_*", "videos/step_*.mp4",
            "trackers.json", "tensorboard", "wandb", "daemons", "evaluating", "eval.json", "export.json",
            "exchange.json", *TRACKER_FILES, *(f"{stem}{end}" for stem in STEMS for end in (
                ".zip", ".opponents.pt", "_vecnormalize.npz", "_vecnormalize.pkl", ".onnx", ".torchscript.pt"))),
}  # fmt: skip
PAGE = ("report.html", "report")
NEEDED = ("plan.json", "summary.json", "model.zip")  # files that eval, play, export and resume read
# Settings that a training does not read, or that plan.json stores under other keys.
NOT_COMPARED = ("run", "on_existing", "model", "output", "trust", "warmup")


class Contents(NamedTuple):
    """The contents of a folder that fasttrain wrote."""

    folder: Path
    kind: str  # run, sweep or study

    def about(self, key: str = "", typed: str | Path | None = None) -> str:
        """`hydra.run.dir=x holds a run (crashed)`. `key`, `typed`: name and value of the caller's argument."""
        key = key or ("hydra.sweep.dir" if self.kind == "sweep" else "hydra.run.dir")
        state = read_json(self.folder / "summary.json").get("status") if self.kind == "run" else None
        return f"{key}={typed or self.folder} holds a {self.kind}{f' ({state})' if isinstance(state, str) else ''}"


def contents_of(folder: Path, names: set[str] | None = None) -> Contents | None:
    """What fasttrain wrote into a folder; None if nothing.

    `names`: the files that count. None: all files in it, and ConfigError if a process still works there.
    """
    if names is None:
        if process := holder(folder):
            raise ConfigError(f"{folder}: still going on (process {process}); use another folder, or wait for its end")
        names = {*os.listdir(folder)} if folder.is_dir() else set()
    for kind, marks in MARKS.items():
        if not names.isdisjoint(marks):
            return Contents(folder, kind)
    return None


def clear(folder: Path, kind: str = "run", but: str = "") -> None:
    """Remove the files that fasttrain wrote in `folder`, and no other files. `but`: a file to keep."""
    if kind != "run":
        for cell in (folder / CELLS if kind == "study" else folder).glob("*"):
            if cell.is_dir() and contents_of(cell) is not None:
                clear(cell)
    policies = read_json(folder / "plan.json").get("config", {}).get("policies", {})
    members = [member_file(stem, name) for name in policies for stem in STEMS]
    names = (*WRITTEN[kind], *members, *(PAGE if (folder / PAGE[0]).exists() else ()))
    for path in [file for name in names if name != but for file in folder.glob(name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def missing_files(folder: Path, normalized: bool, pooled: bool, failed: Container[str]) -> list[str]:
    """Files that a finished run wrote and that are gone now. `failed`: files that could not be written."""
    needed = [*NEEDED, *["vecnormalize.npz"] * normalized, *["model.opponents.pt"] * pooled]
    lost = [name for name in needed if name not in failed and not (folder / name).is_file()]
    return [f"{name} (it was written, and is gone)" for name in lost]


def changed_settings(where: Path, config: Config) -> dict[str, Any]:
    """The settings of `config` that differ from those requested for the run in `where`: dotted key → new value."""
    stored = read_json(where / "plan.json")
    asked = {row["flag"]: row["requested"] for row in stored.get("flags", ())}
    before = stored.get("config", {})
    before = flat(without_unused({**before, **{key: it for key, it in asked.items() if key in before}}))
    before |= {key: value for key, value in asked.items() if "." in key and key in before}
    before = {key: present_path(value) if isinstance(value, str) else value for key, value in before.items()}
    now = flat(without_unused(to_dict(config)))
    unread = {*NOT_COMPARED, *keys_of(SETTINGS)}
    keys = [key for key in {**now, **before} if key.split(".")[0] not in unread]
    return {key: now.get(key) for key in keys if key not in now or now[key] != before.get(key)}


# --- how a command line names a folder


def how_to_continue(folder: Path) -> str:
    """What is saved in the folder and how to continue: `saved in F: model.zip …; fasttrain resume run=F goes on`."""
    if study := read_json(folder / "study.json"):
        done = sum(cell.get("status") == "done" for cell in study.get("cells", ()))
        command = study.get("command")
        word = command if command in ("population", "tune") else "compare"
        return f"{done} cells of {folder} are done; {command_line(word, run=folder)} goes on"
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
    """`fasttrain resume run=outputs/…`, quoted for the shell where the folder's name needs it."""
    named = [shlex.quote(override(key, folder)) for key, folder in folders.items()]
    return " ".join([typed(), command, *options, *named])


def override(key: str, folder: Path) -> str:
    """`run=outputs/…` as an override of Hydra. It is not quoted for a shell."""
    return f"{key}={folder if PLAIN.fullmatch(str(folder)) else in_quotes(str(folder))}"


def in_quotes(text: str) -> str:
    """The text in quotes of Hydra's grammar, in which a backslash is special only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


PACKAGES = ("fasttrain", "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "numba", "hydra-core")
GIT_S = 2.0  # time limit of each call of git


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
    """`commit` and the number of tracked files that differ from it (`changed`). None without git or repository."""
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


def summary_in(folder: Path) -> dict[str, Any]:
    """summary.json of a training; of an evaluation its quality, in the same form. Empty if there is neither."""
    quality = read_json(folder / "eval.json").get("quality", {})
    return read_json(folder / "summary.json") or ({"quality": quality.get("greedy", {})} if quality else {})
