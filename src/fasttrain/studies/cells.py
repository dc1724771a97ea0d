"""One cell of a study: a `fasttrain` command in a process of its own, and what became of it.

A fresh process each, because the first in a shared one would pay for imports, compilation and caches that the others
find warm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT
from fasttrain.runs.folders import override
from fasttrain.saving.files import read_json
from fasttrain.spec.overrides import key_of
from fasttrain.terminal import one_line

STATUS = {EXIT_DONE: "done", EXIT_WRONG_INPUT: "illegal", EXIT_STOPPED: "stopped"}


@dataclass(slots=True)
class Cell:
    """One run and what became of it."""

    label: str  # candidate, trial, or what a sweep changed
    overrides: list[str]
    folder: Path
    exit_code: int
    error: str
    seconds: float  # the whole process, start-up included
    seed: int | None = None
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json, empty where the cell left none

    @property
    def status(self) -> str:
        return STATUS.get(self.exit_code, "failed")

    @property
    def done(self) -> bool:
        return self.exit_code == EXIT_DONE and bool(self.summary)

    def to_dict(self, study: Path) -> dict[str, Any]:
        """For study.json; the folder relative to the study's, so that the whole can be moved."""
        return {
            "label": self.label,
            "seed": self.seed,
            "status": self.status,
            "exit_code": self.exit_code,
            "error": self.error,
            "seconds": round(self.seconds, 2),
            "folder": os.path.relpath(self.folder, study),
            "overrides": self.overrides,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], study: Path) -> Cell:
        """What `to_dict` gave; the summary is read from the folder."""
        folder = study / str(stored["folder"])
        return cls(
            label=str(stored["label"]),
            overrides=list(stored["overrides"]),
            folder=folder,
            exit_code=int(stored["exit_code"]),
            error=str(stored["error"]),
            seconds=float(stored["seconds"]),
            seed=stored["seed"],
            summary=read_json(folder / "summary.json"),
        )


def run_cell(
    command: str, overrides: Sequence[str], folder: Path, label: str = "", seed: int | None = None
) -> tuple[Cell, bool]:
    """Run `fasttrain COMMAND overrides…` into `folder`, its output in log.txt there.

    Returns the cell, and whether SIGINT or SIGTERM came meanwhile: the process gets it too, saves and ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    command_line = [sys.executable, "-m", "fasttrain", command, *overrides, override("hydra.run.dir", folder)]
    environment = {"ENGINE_SWITCH_AT": "0", **os.environ, "PYTHONUNBUFFERED": "1"}  # they are compared
    with (folder / "log.txt").open("a" if "on_existing=resume" in overrides else "w", encoding="utf-8") as log:
        process = subprocess.Popen(command_line, stdout=log, stderr=subprocess.STDOUT, env=environment)
        with _passing_on_signals(process) as signals:
            exit_code = process.wait()
    cell = Cell(
        label=label,
        overrides=list(overrides),
        folder=folder,
        exit_code=exit_code,
        error=why(exit_code, folder / "log.txt"),
        seconds=time.perf_counter() - begun,
        seed=seed,
        summary=read_json(folder / "summary.json"),
    )
    return cell, bool(signals)


def last_line(folder: Path) -> str:
    """What the cell in `folder` said last; read while it runs.

    Raises:
        OSError: it has not begun.
    """
    with (folder / "log.txt").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
        lines = log.read().decode(errors="replace").splitlines()
    return one_line(next((line.strip() for line in reversed(lines) if line.strip()), "starting"))


@contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, not to die of them. The cell stops and saves at the first, the second kills it.

    Ctrl-C at a terminal reaches the cell by itself, so only SIGTERM is passed on.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            process.kill()
        elif number == signal.SIGTERM:
            process.terminate()

    previous = [(number, signal.signal(number, receive)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield received
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def merged(base: Sequence[str], more: Sequence[str]) -> list[str]:
    """`base` with `more`: the same key, and another profile or group of the same name, is replaced."""
    keys = {key_of(text) for text in more} - {""}
    return [text for text in base if key_of(text) not in keys] + list(more)


def why(exit_code: int, log: Path) -> str:
    """What ended a cell: a signal, its `fasttrain: error:` line, else the last line it wrote; empty if it went well."""
    if exit_code in (EXIT_DONE, EXIT_STOPPED):
        return ""
    if exit_code < 0:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    marked = [line.partition("fasttrain: error: ")[2] for line in lines if line.startswith("fasttrain: error: ")]
    return (marked or lines or ["no output"])[-1]
