"""A study: many cells in one folder, run in turn, stored one by one, continued where they stopped.

A cell is a `fasttrain` command in a process of its own: the first in a shared one would pay for imports, compilation
and caches that the others find warm. What a study recommends is written as a profile: flat values with the evidence
beside them, to be used as `+profile=NAME`.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT
from fasttrain.runs.folders import CELLS, GROUP, PARENT, clear, override
from fasttrain.runs.progress import clock_text
from fasttrain.runs.view import activity, say
from fasttrain.saving.files import holder, read_json, write_json, write_whole
from fasttrain.spec.checks import FLAGS, batch_size_of
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import COMPILES_FIRST, key_of
from fasttrain.spec.removed import texts_without_removed
from fasttrain.terminal import command, one_line, rate_text

LEAST_WINDOWS = 3  # fewer are no steady state that the first could be left out of
STATUS = {EXIT_DONE: "done", EXIT_WRONG_INPUT: "illegal", EXIT_STOPPED: "stopped"}


@dataclass(slots=True)
class Cell:
    """One run and its result."""

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

    @property
    def rate(self) -> float:
        """Steps/s without the first window, in which caches are cold; of a very short run, of all of it."""
        windows = read_json(self.folder / "perf.json").get("windows") or []
        if len(windows) >= LEAST_WINDOWS and (seconds := windows[-1]["wall_s"] - windows[0]["wall_s"]) > 0:
            return float((windows[-1]["env_steps"] - windows[0]["env_steps"]) / seconds)
        return float(self.summary.get("steps_per_s") or 0.0)

    def described(self) -> str:
        """`done · 61,234 steps/s · reward 2.9 · win 61.3 %`, or what went wrong."""
        quality, speed = self.summary.get("quality") or {}, self.summary.get("steps_per_s")
        reward, won = quality.get("mean_reward"), quality.get("win_rate")
        facts = [
            self.status,
            "" if speed is None else f"{rate_text(speed)} steps/s",
            "" if reward is None else f"reward {reward:.3g}",
            "" if won is None else f"win {100 * won:.1f} %",
        ]
        return " · ".join(filter(None, [*facts, self.error]))

    def to_dict(self, study: Path) -> dict[str, Any]:
        """For study.json; the folder relative to the study's, so that the whole can be moved."""
        told = {key: getattr(self, key) for key in ("label", "seed", "status", "exit_code", "error", "overrides")}
        return {**told, "seconds": round(self.seconds, 2), "folder": os.path.relpath(self.folder, study)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], study: Path) -> Cell:
        """What `to_dict` gave; the summary is read from the folder."""
        folder, typed = study / str(stored["folder"]), texts_without_removed(stored["overrides"])
        told = {key: stored[key] for key in ("label", "exit_code", "error", "seconds", "seed")}
        return cls(overrides=typed, folder=folder, summary=read_json(folder / "summary.json"), **told)


def run_cell(
    command: str, overrides: Sequence[str], folder: Path, label: str = "", seed: int | None = None
) -> tuple[Cell, bool]:
    """Run `fasttrain COMMAND overrides…` into `folder`, its output in log.txt there.

    Returns the cell, and whether SIGINT or SIGTERM came meanwhile: the process gets it too, saves and ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    one = [override("hydra.run.dir", folder), "hydra.mode=RUN"]  # whatever mode a profile chooses
    command_line = [sys.executable, "-u", "-m", "fasttrain", command, *overrides, *one]
    group = folder.parent.parent if folder.parent.name == CELLS else folder.parent
    # All are compared, and end with this process.
    environment = {**COMPILES_FIRST, **os.environ, GROUP: str(group), PARENT: str(os.getpid())}
    with (folder / "log.txt").open("a" if "on_existing=resume" in overrides else "w", encoding="utf-8") as log:
        process = subprocess.Popen(command_line, stdout=log, stderr=subprocess.STDOUT, env=environment)
        with _passing_on_signals(process) as signals:
            exit_code = process.wait()
    error, took, summary = why(exit_code, folder / "log.txt"), time.perf_counter() - begun, folder / "summary.json"
    return Cell(label, list(overrides), folder, exit_code, error, took, seed, read_json(summary)), bool(signals)


def last_line(folder: Path) -> str:
    """What the cell in `folder` said last; read while it runs. Raises OSError: it has not begun."""
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


STUDY_SCHEMA = 1
# Keys that speak to the study, not to its cells.
OWN_KEYS = ("candidates", "on_existing", "seeds", "minutes", "run", "seed", "gate", "tune", "report", "live")
MINUTES = 10.0  # for a whole search, where nobody says how many
FIXED = ("schema", "command", "arguments", "cells")  # entries of study.json that are no notes
CELL_OVERRIDES = ("live=off", "report=false")
# Unless it is typed: a cell that was not finished is started again, so that a checkpoint would only take time.
BESIDES = ("on_existing=overwrite", "checkpoint_every=0")
Compose = Callable[[Sequence[str]], Config]  # command line arguments → the typed configuration


class Wanted(NamedTuple):
    label: str
    seed: int
    overrides: tuple[str, ...]  # without seed and folder


def base_overrides(overrides: Sequence[str]) -> list[str]:
    """The typed overrides that every cell shares."""
    return [text for text in overrides if key_of(text).split(".")[0] not in OWN_KEYS]


class Study:
    """The cells of one folder. `study.json` is rewritten after each; `notes` are its further entries.

    Args:
        folder: of the study; finished cells that it holds already are not run again.
        overrides: what was typed, stored so that `run=FOLDER` alone goes on.
        anew: what the folder holds of a study is removed.
    """

    def __init__(
        self, command: str, folder: Path, overrides: Sequence[str], console: Console, anew: bool = False
    ) -> None:
        self.command, self.folder, self.console = command, folder.absolute(), console
        self.arguments = [text for text in overrides if key_of(text) not in ("run", "on_existing")]
        if anew:
            clear(self.folder, "study")
        stored = read_json(self.folder / "study.json")
        self.notes: dict[str, Any] = {key: value for key, value in stored.items() if key not in FIXED}
        self.cells = [Cell.from_dict(cell, self.folder) for cell in stored.get("cells", [])]
        self.begun = time.perf_counter()
        self.store()  # from now on the folder is known for a study's

    def find(self, wanted: Wanted) -> Cell | None:
        """The finished cell for just this. Of two candidates that ask for the same each has its own."""
        return next((cell for cell in self.cells if cell.done and self._is(cell, wanted)), None)

    def _is(self, cell: Cell, wanted: Wanted) -> bool:
        return cell.label == wanted.label and cell.overrides == self._overrides(wanted)

    def run(self, cells: Iterable[Wanted], until_s: float = math.inf) -> dict[str, dict[int, Cell]]:
        """Run what is not finished, in this order; returns the finished ones by label and seed.

        A cell that fails is said and stored and stops nothing; a label whose cell was illegal is not tried again with
        other seeds. None is begun when `until_s` seconds of the study are over. Raises KeyboardInterrupt: SIGINT or
        SIGTERM came; what is finished is stored.
        """
        todo = list(cells)
        illegal: set[str] = set()
        for number, wanted in enumerate(todo):
            cell = self.find(wanted)
            if cell is None and wanted.label not in illegal and self.spent_s() < until_s:
                cell = self._run(wanted, f"[{number + 1}/{len(todo)}]", todo[number + 1 :], until_s)
                if cell.exit_code == EXIT_WRONG_INPUT:
                    illegal.add(wanted.label)
        return self.finished(todo)

    def finished(self, cells: Iterable[Wanted]) -> dict[str, dict[int, Cell]]:
        """Those of `cells` that are finished, by label and seed; labels without any are there too."""
        found: dict[str, dict[int, Cell]] = {}
        for wanted in cells:
            by_seed = found.setdefault(wanted.label, {})
            if (cell := self.find(wanted)) is not None:
                by_seed[wanted.seed] = cell
        return found

    def failed(self, cells: Iterable[Wanted] | None = None) -> list[Cell]:
        """Those of `cells` that ended with an error; None: of all, also of candidates that are asked for no more."""
        asked = None if cells is None else list(cells)
        failures = [cell for cell in self.cells if cell.exit_code not in (EXIT_DONE, EXIT_STOPPED)]
        return [cell for cell in failures if asked is None or any(self._is(cell, wanted) for wanted in asked)]

    def conclude(self, failures: Iterable[Cell]) -> None:
        """Say what failed, and write study.json."""
        for cell in failures:
            self.say(f"{cell.status}: {cell.label} seed {cell.seed}: {cell.error} ({cell.folder / 'log.txt'})")
        self.store()

    def _run(self, wanted: Wanted, place: str, later: Sequence[Wanted], until_s: float) -> Cell:
        title, folder = f"{place} {wanted.label} seed {wanted.seed}", self._folder_of(wanted)
        with activity(self.console, title + self._eta([wanted, *later], until_s), lambda: last_line(folder)):
            overrides = self._overrides(wanted)
            while holder(folder):  # the cell of a study that was killed; it is continued when it has ended
                time.sleep(0.2)
            cell, stopped = run_cell("train", merged(BESIDES, overrides), folder, wanted.label, wanted.seed)
            cell.overrides = overrides
        self.cells = [*(other for other in self.cells if not self._is(other, wanted)), cell]
        self.store()
        self.say(f"{title}: {cell.described()} · {cell.seconds:.0f} s{self._eta(later, until_s)}")
        if stopped or cell.exit_code == EXIT_STOPPED:
            raise KeyboardInterrupt
        return cell

    def _overrides(self, wanted: Wanted) -> list[str]:
        return [*wanted.overrides, *CELL_OVERRIDES, f"seed={wanted.seed}"]

    def _folder_of(self, wanted: Wanted) -> Path:
        """Told apart by what was asked for: a candidate may keep its name and change."""
        mark = hashlib.sha256("\n".join(self._overrides(wanted)).encode()).hexdigest()[:6]
        name = "".join(letter if letter.isalnum() or letter in "-+.=_" else "-" for letter in wanted.label)[:60]
        return self.folder / CELLS / f"{name}_seed{wanted.seed}_{mark}"

    def _eta(self, later: Sequence[Wanted], until_s: float) -> str:
        """From what cells of the same label took, else from all; no later than when no more are begun."""
        done = [cell for cell in self.cells if cell.done]
        todo = [wanted for wanted in later if self.find(wanted) is None]
        if not done or not todo:
            return ""
        same = ([cell.seconds for cell in done if cell.label == wanted.label] for wanted in todo)
        total = sum(fmean(seconds or [cell.seconds for cell in done]) for seconds in same)
        return f" · ETA {clock_text(min(total, max(0.0, until_s - self.spent_s())))}"

    def store(self) -> None:
        content = {"schema": STUDY_SCHEMA, "command": self.command, "arguments": self.arguments, **self.notes}
        write_json(self.folder / "study.json", {**content, "cells": [cell.to_dict(self.folder) for cell in self.cells]})

    def say(self, line: str) -> None:
        say(self.console, line)

    def spent_s(self) -> float:
        """Seconds since the study was begun or continued."""
        return time.perf_counter() - self.begun

    def write_profile(self, name: str, values: Mapping[str, Any], head: str, notes: Mapping[str, str]) -> Path:
        """conf/profile/NAME.yaml in its folder; `notes` become comments behind the keys they are about."""
        lines = ["# @package _global_", *(f"# {line}".rstrip() for line in head.splitlines())]
        for key in sorted(values, key=lambda key: key.startswith("algo.")):  # the group of the algorithm's last
            group, _, inner = key.rpartition(".")
            if group and f"{group}:" not in lines:
                lines.append(f"{group}:")
            text = yaml.safe_dump({inner: values[key]}, default_flow_style=False, allow_unicode=True).strip()
            lines.append(("  " if group else "") + text + (f" # {notes[key]}" if notes.get(key) else ""))
        path = self.folder / "conf" / "profile" / f"{name}.yaml"
        write_whole(path, "\n".join(lines) + "\n")
        return path

    def use_profile(self, name: str) -> list[str]:
        """The arguments that run with such a profile, wherever else the user's configuration lies."""
        place = str(self.folder / "conf").replace("\\", "/").replace("'", "\\'")
        return [f"hydra.searchpath=['file://{place}']", f"+profile={name}"]

    def say_profile(self, name: str, path: Path) -> None:
        """Where it is, and what to type to train with it."""
        config_dir = shlex.quote(str(self.folder / "conf"))
        self.say(f"written to {path}: {command()} --config-dir {config_dir} +profile={name}")


def settings(config: Config) -> dict[str, Any]:
    """What a profile may choose, by dotted key: every flag, and what belongs to the tier of algorithm and game."""
    found = {flag.name: getattr(config, flag.name) for flag in FLAGS}
    natives = config.own.num_envs if config.algo.spec.on_policy else None
    if natives is not None and config.vec_env in ("auto", "native"):
        found["num_envs"] = natives
    found["batch_size"] = batch_size_of(config)
    below = {f"algo.{name}": getattr(config.algo, name, None) for name in ("learning_rate", "n_epochs", "rollout_size")}
    return {**found, **{key: value for key, value in below.items() if value is not None}}
