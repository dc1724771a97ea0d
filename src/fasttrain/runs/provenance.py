"""Where a run comes from: what was typed, the code in the user's folder, versions, the machine. Part of plan.json."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from fasttrain.machine import usable_cores
from fasttrain.terminal import command

PACKAGES = ("fasttrain", "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "numba", "hydra-core")
GIT_S = 2.0  # at most, for each question


def provenance(overrides: Sequence[str], here: Path | None = None) -> dict[str, Any]:
    """JSON-ready: `command`, `began` (UTC), `folder` with its `git` state, `versions`, `machine`."""
    here = here or Path.cwd()
    return {
        "command": " ".join([command(), *map(shlex.quote, overrides)]),
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
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
