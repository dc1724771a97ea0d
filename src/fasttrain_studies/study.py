"""A study: many cells in one folder, run one by one. Each is stored when it ends, so a stopped study can continue.

A cell is one `fasttrain` command in its own process. In a shared process the first cell would be slower, because it
imports, compiles and has cold caches. The settings that a study recommends are written as a profile for
`+profile=NAME`, with the measurements as comments.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT
from fasttrain.runs import warm
from fasttrain.runs.folders import CELLS, GROUP, PARENT, clear, override, summary_in
from fasttrain.runs.progress import clock_text
from fasttrain.runs.view import activity, say
from fasttrain.runs.warm import Process, passing_on_signals
from fasttrain.saving.files import holder, read_json, write_json, write_whole
from fasttrain.spec.checks import FLAGS, NOT_APPLICABLE, batch_size_of
from fasttrain.spec.precedence import COMPILES_FIRST, key_of
from fasttrain.terminal import command, one_line, rate_text, spelt
from fasttrain_studies.settings import Config

# Called about every second with the folder of a running cell. If a reason is returned, the cell saves and ends.
Ended = Callable[[Path], str] | None
LOOK_S = 1.0  # seconds between two calls of an `Ended` function
LEAST_WINDOWS = 3  # with fewer windows `Cell.rate` also uses the first window
STATUS = {EXIT_DONE: "done", EXIT_WRONG_INPUT: "illegal", EXIT_STOPPED: "stopped", 130: "stopped"}


@dataclass(slots=True)
class Cell:
    """One run of a study, and its result."""

    label: str  # name of the candidate or trial; in a sweep the cell's number
    overrides: list[str]
    folder: Path
    exit_code: int
    error: str
    seconds: float  # run time of the whole process
    seed: int | None = None
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json; empty if the cell wrote none

    @property
    def status(self) -> str:
        return STATUS.get(self.exit_code, "failed")

    @property
    def done(self) -> bool:
        return self.exit_code == EXIT_DONE and bool(self.summary)

    @property
    def rate(self) -> float:
        """Steps/s without the first window, in which caches are cold; for a very short run the whole run's steps/s."""
        windows = read_json(self.folder / "perf.json").get("windows") or []
        if len(windows) >= LEAST_WINDOWS and (seconds := windows[-1]["wall_s"] - windows[0]["wall_s"]) > 0:
            return float((windows[-1]["env_steps"] - windows[0]["env_steps"]) / seconds)
        return float(self.summary.get("steps_per_s") or 0.0)

    def described(self) -> str:
        """`done · 61,234 steps/s · reward 2.9 · win 61.3 %`, or the status and error."""
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
        """For study.json. `folder` is relative to the study's folder, so that a study can be moved."""
        fields = {key: getattr(self, key) for key in ("label", "seed", "status", "exit_code", "error", "overrides")}
        return {**fields, "seconds": round(self.seconds, 2), "folder": os.path.relpath(self.folder, study)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], study: Path) -> Cell:
        """The cell that `to_dict` stored, with summary.json as it is now."""
        folder = study / str(stored["folder"])
        fields = {key: stored[key] for key in ("label", "overrides", "exit_code", "error", "seconds", "seed")}
        return cls(folder=folder, summary=summary_in(folder), **fields)


class Place(NamedTuple):
    """For a cell that runs beside others: the cell's cores, the processes of all running cells, received signals."""

    cores: Sequence[int]
    processes: list[Process]
    signals: Sequence[int]


def run_cell(
    command: str, overrides: Sequence[str], folder: Path, label: str = "", seed: int | None = None,
    ended: Ended = None, place: Place | None = None,
) -> tuple[Cell, bool]:  # fmt: skip
    """Run `fasttrain COMMAND overrides…` into `folder`, never a profile's sweep. The output goes into `folder`/log.txt.

    Returns the cell, and whether SIGINT or SIGTERM came while it ran. The cell also gets the signal, saves and ends.
    `place`: None for a cell that may use all cores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    one = [] if command == "resume" else [override("hydra.run.dir", folder), "hydra.mode=RUN"]
    group = folder.parent.parent if folder.parent.name == CELLS else folder.parent
    environment = {**COMPILES_FIRST, **os.environ, GROUP: str(group)}
    goes_on = command == "resume" or "on_existing=resume" in overrides
    with (folder / "log.txt").open("a" if goes_on else "w", encoding="utf-8") as log:
        cores = None if place is None else place.cores
        process = warm.start([command, *overrides, *one], log, environment, PARENT, cores)
        with passing_on_signals([process]) if place is None else _standing_in(place, process) as signals:
            reason, exit_code = "", None
            while exit_code is None:
                with suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(None if ended is None or reason else LOOK_S)
                if exit_code is None and ended is not None and (reason := ended(folder)):
                    process.terminate()
    took = time.perf_counter() - begun
    error = reason if exit_code == EXIT_STOPPED else why(exit_code, folder / "log.txt")
    return Cell(label, list(overrides), folder, exit_code, error, took, seed, summary_in(folder)), bool(signals)


@contextmanager
def _standing_in(place: Place, process: Process) -> Iterator[list[int]]:
    place.processes.append(process)
    if place.signals:  # one came while the process was started
        process.terminate()
    try:
        yield []
    finally:
        place.processes.remove(process)


def last_line(folder: Path) -> str:
    """The last line of a running cell's log. Raises OSError if the cell has not begun."""
    with (folder / "log.txt").open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
        lines = log.read().decode(errors="replace").splitlines()
    return one_line(next((line.strip() for line in reversed(lines) if line.strip()), "starting"))


def merged(base: Sequence[str], more: Sequence[str]) -> list[str]:
    """`base` followed by `more`, without overrides of `base` whose key, group or profile is also in `more`."""
    keys = {key_of(text) for text in more} - {""}
    return [text for text in base if key_of(text) not in keys] + list(more)


def why(exit_code: int, log: Path) -> str:
    """Why a cell failed: a signal, the `fasttrain: error:` line, or the last line. Empty if the cell did not fail."""
    if exit_code in (EXIT_DONE, EXIT_STOPPED):
        return ""
    if exit_code < 0:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    marked = [line.partition("fasttrain: error: ")[2] for line in lines if line.startswith("fasttrain: error: ")]
    return (marked or lines or ["no output"])[-1]


STUDY_SCHEMA = 1
# Settings of the study, not of the cells.
OWN_KEYS = ("candidates", "on_existing", "seeds", "minutes", "run", "seed", "gate", "tune", "sweep", "population",
            "report", "live")  # fmt: skip
MINUTES = 10.0  # length of an ablation or a search, if minutes=… is not given
FIXED = ("schema", "command", "arguments", "cells")  # the entries of study.json that every study has
CELL_OVERRIDES = ("live=off", "report=false")
# An unfinished cell starts again from the beginning, so it needs no checkpoints. Typed overrides win over these values.
CELL_DEFAULTS = ("on_existing=overwrite", "checkpoint_every=0")
Compose = Callable[[Sequence[str]], Config]  # command line arguments → typed configuration


class Wanted(NamedTuple):
    """A cell that a study must have."""

    label: str
    seed: int
    overrides: tuple[str, ...]  # overrides of the run, without seed and folder


def base_overrides(overrides: Sequence[str]) -> list[str]:
    """The typed overrides that all cells get."""
    return [text for text in overrides if key_of(text).split(".")[0] not in OWN_KEYS]


class Study:
    """The cells of one folder. `study.json` is written after each cell; `notes` are more entries of that file.

    Args:
        folder: the study's folder. Cells that are finished in this folder are not run again.
        overrides: the typed overrides, stored so that `run=FOLDER` alone continues the study.
        anew: remove an earlier study from the folder.
        lock: held while study.json is written, if several processes work on the study.
    """

    def __init__(
        self, command: str, folder: Path, overrides: Sequence[str], console: Console, anew: bool = False,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:  # fmt: skip
        self.command, self.folder, self.console = command, folder.absolute(), console
        self.arguments = [text for text in overrides if key_of(text) not in ("run", "on_existing")]
        if anew:
            clear(self.folder, "study")
        stored = read_json(self.folder / "study.json")
        self.notes: dict[str, Any] = {key: value for key, value in stored.items() if key not in FIXED}
        self.cells: list[Cell] = []
        self.lock = lock or nullcontext()
        self.ended: Ended = None
        self.parallel = 1  # cells that run side by side
        self.begun = time.perf_counter()
        self.store()  # study.json marks the folder as a study

    def find(self, wanted: Wanted) -> Cell | None:
        """The finished cell with this label and these overrides, or None."""
        return next((cell for cell in self.cells if cell.done and self._is(cell, wanted)), None)

    def _is(self, cell: Cell, wanted: Wanted) -> bool:
        return cell.label == wanted.label and cell.overrides == self.overrides_of(wanted)

    def run(self, cells: Iterable[Wanted], until_s: float = math.inf) -> dict[str, dict[int, Cell]]:
        """Run the cells that are not finished, in this order. Returns the finished cells by label and seed.

        If a cell fails, its error is printed and stored, and the study continues. If a cell had wrong settings, its
        label is not run with other seeds. No cell begins after `until_s` seconds. Raises KeyboardInterrupt after
        SIGINT or SIGTERM; finished cells are stored.
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
        """The finished cells among `cells`, by label and seed. Labels without a finished cell have an empty entry."""
        found: dict[str, dict[int, Cell]] = {}
        for wanted in cells:
            by_seed = found.setdefault(wanted.label, {})
            if (cell := self.find(wanted)) is not None:
                by_seed[wanted.seed] = cell
        return found

    def failed(self, cells: Iterable[Wanted] | None = None) -> list[Cell]:
        """The cells among `cells` that ended with an error. None: all cells, also those of removed candidates."""
        asked = None if cells is None else list(cells)
        failures = [cell for cell in self.cells if cell.status in ("illegal", "failed")]
        return [cell for cell in failures if asked is None or any(self._is(cell, wanted) for wanted in asked)]

    def conclude(self, failures: Iterable[Cell]) -> None:
        """Print the failures and write study.json."""
        for cell in failures:
            self.say(f"{cell.status}: {cell.label} seed {cell.seed}: {cell.error} ({cell.folder / 'log.txt'})")
        self.store()

    def _run(self, wanted: Wanted, place: str, later: Sequence[Wanted], until_s: float) -> Cell:
        title, folder = f"{place} {wanted.label} seed {wanted.seed}", self.folder_of(wanted)
        with activity(self.console, title + self.eta([wanted, *later], until_s), lambda: last_line(folder)):
            cell, stopped = self.start(wanted)
        self.keep(wanted, cell)
        self.say(f"{title}: {cell.described()} · {cell.seconds:.0f} s{self.eta(later, until_s)}")
        if stopped or (cell.exit_code == EXIT_STOPPED and not cell.error):
            raise KeyboardInterrupt
        return cell

    def start(self, wanted: Wanted, place: Place | None = None) -> tuple[Cell, bool]:
        """Run the cell; returns the result of `run_cell`."""
        overrides, folder = self.overrides_of(wanted), self.folder_of(wanted)
        self.wait_for(folder)
        typed, beside = merged(self.usual(wanted), overrides), {} if place is None else {"place": place}
        cell, stopped = run_cell("train", typed, folder, wanted.label, wanted.seed, self.ended, **beside)
        cell.overrides = overrides
        return cell, stopped

    def wait_for(self, folder: Path) -> None:
        """Wait until no process works in the folder: a training of a killed study may still run."""
        while holder(folder):
            time.sleep(0.2)

    def usual(self, wanted: Wanted) -> list[str]:
        """Overrides that typed ones replace. Later seeds on this computer get what the first seed chose for `auto`: so
        all seeds have one plan, and neither the checkup nor `check.with_trial` runs again.
        """
        here = platform.platform()
        for cell in self.cells:
            if cell.done and (cell.label, cell.overrides[:-1]) == (wanted.label, self.overrides_of(wanted)[:-1]):
                plan = read_json(cell.folder / "plan.json")
                if plan.get("provenance", {}).get("machine", {}).get("system") == here:
                    rows = [row for row in plan["flags"] if row["requested"] == "auto"]
                    chosen = [
                        f"{row['flag']}={spelt(row['effective'])}" for row in rows if row["effective"] != NOT_APPLICABLE
                    ]
                    return [*CELL_DEFAULTS, "checkup=off", *chosen]
        return [*CELL_DEFAULTS]

    def cell_in_folder(self, wanted: Wanted) -> Cell:
        """The cell as a training in its folder that ended, or crashed, after its study was killed."""
        folder, overrides = self.folder_of(wanted), self.overrides_of(wanted)
        summary = read_json(folder / "summary.json")
        code, took = (EXIT_DONE if summary["status"] == "done" else EXIT_CRASHED), summary.get("wall_s", 0.0)
        return Cell(wanted.label, overrides, folder, code, summary.get("error", ""), took, wanted.seed, summary)

    def keep(self, wanted: Wanted, cell: Cell) -> None:
        """Store the cell in place of an earlier one."""
        self.cells = [*(other for other in self.cells if not self._is(other, wanted)), cell]
        self.store()

    def overrides_of(self, wanted: Wanted) -> list[str]:
        return [*wanted.overrides, *CELL_OVERRIDES, f"seed={wanted.seed}"]

    def folder_of(self, wanted: Wanted) -> Path:
        """The cell's folder. A hash of the overrides is in the name, because a label may later get other overrides."""
        mark = hashlib.sha256("\n".join(self.overrides_of(wanted)).encode()).hexdigest()[:6]
        name = "".join(letter if letter.isalnum() or letter in "-+.=_" else "-" for letter in wanted.label)[:60]
        return self.folder / CELLS / f"{name}_seed{wanted.seed}_{mark}"

    def eta(self, later: Sequence[Wanted], until_s: float = math.inf) -> str:
        """The remaining time, estimated from finished cells of the same label, or from all if no such cell exists."""
        done = [cell for cell in self.cells if cell.done]
        todo = [wanted for wanted in later if self.find(wanted) is None]
        if not done or not todo:
            return ""
        same = ([cell.seconds for cell in done if cell.label == wanted.label] for wanted in todo)
        total = sum(fmean(seconds or [cell.seconds for cell in done]) for seconds in same) / self.parallel
        return f" · ETA {clock_text(min(total, max(0.0, until_s - self.spent_s())))}"

    def store(self) -> None:
        content = {"schema": STUDY_SCHEMA, "command": self.command, "arguments": self.arguments, **self.notes}
        with self.lock:
            self.read_others()
            cells = [cell.to_dict(self.folder) for cell in self.cells]
            write_json(self.folder / "study.json", {**content, "cells": cells})

    def read_others(self) -> None:
        """Add the cells that other processes have stored in study.json."""
        ours = {(cell.label, *cell.overrides) for cell in self.cells}
        stored = [Cell.from_dict(cell, self.folder) for cell in read_json(self.folder / "study.json").get("cells", [])]
        self.cells += [cell for cell in stored if (cell.label, *cell.overrides) not in ours]

    def say(self, line: str) -> None:
        say(self.console, line)

    def spent_s(self) -> float:
        """Seconds since the study was started or continued."""
        return time.perf_counter() - self.begun

    def write_profile(self, name: str, values: Mapping[str, Any], head: str, notes: Mapping[str, str]) -> Path:
        """Write conf/profile/NAME.yaml in the study's folder. `notes`: key → comment in the same line."""
        lines = ["# @package _global_", *(f"# {line}".rstrip() for line in head.splitlines())]
        for key in sorted(values, key=lambda key: key.startswith("algo.")):  # keys of the group `algo` come last
            group, _, inner = key.rpartition(".")
            if group and f"{group}:" not in lines:
                lines.append(f"{group}:")
            text = yaml.safe_dump({inner: values[key]}, default_flow_style=False, allow_unicode=True).strip()
            lines.append(("  " if group else "") + text + (f" # {notes[key]}" if notes.get(key) else ""))
        path = self.folder / "conf" / "profile" / f"{name}.yaml"
        write_whole(path, "\n".join(lines) + "\n")
        return path

    def use_profile(self, name: str) -> list[str]:
        """The arguments that make `fasttrain` use a written profile, beside the user's own configuration files."""
        place = str(self.folder / "conf").replace("\\", "/").replace("'", "\\'")
        return [f"hydra.searchpath=['file://{place}']", f"+profile={name}"]

    def say_profile(self, name: str, path: Path, typed: Sequence[str] = ()) -> None:
        """Print where a profile is, and the command that trains with it and with the arguments `typed`."""
        files = [text for text in typed if text.startswith("--")]
        before = [text.partition("=")[2].strip("[]") for text in typed if key_of(text) == "profile"]
        place = self.use_profile(name)[:1] if files else ["--config-dir", str(self.folder / "conf")]
        profiles = f"+profile=[{','.join([*before, name])}]" if before else f"+profile={name}"
        words = [*place, profiles, *(text for text in typed if key_of(text) != "profile")]
        self.say(f"written to {path}: {command()} {shlex.join(words)}")


def settings(config: Config) -> dict[str, Any]:
    """The settings that a profile may choose, by dotted key: all flags, and some settings of the algorithm."""
    found = {flag.name: getattr(config, flag.name) for flag in FLAGS}
    natives = config.own.num_envs if config.algo.spec.on_policy else None
    if natives is not None and config.vec_env in ("auto", "native"):
        found["num_envs"] = natives
    found["batch_size"] = batch_size_of(config)
    below = {f"algo.{name}": getattr(config.algo, name, None) for name in ("learning_rate", "n_epochs", "rollout_size")}
    return {**found, **{key: value for key, value in below.items() if value is not None}}
