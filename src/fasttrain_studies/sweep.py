"""`fasttrain -m`: runs every cell in a new process, then prints one table with the speed and quality of all cells.

Hydra composes the cells, which are commands with one value for each swept key. Hydra itself would run them in one
process, where the first would be slower, because it imports, compiles and has cold caches.
"""

from __future__ import annotations

import csv
import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT, ConfigError
from fasttrain.runs.folders import clear, override
from fasttrain.runs.logs import csv_cell
from fasttrain.runs.progress import clock_text
from fasttrain.runs.view import FittingTable, activity, figure_text, say
from fasttrain.saving.files import lock_folder, read_json, write_json
from fasttrain.spec.precedence import key_of, without_folder
from fasttrain.terminal import command, near, one_line, with_interval
from fasttrain_studies.launched import (
    CellTask,
    cells_in,
    forget_unfinished,
    has_failed,
    parallel_cells,
    watching,
)
from fasttrain_studies.settings import Config, SweepConfig
from fasttrain_studies.study import Cell, last_line, run_cell

USUAL = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # runs one job after the other, in this process
CSV_COLUMNS = ("status", "steps_per_s", "speed_up", "mean_reward", "win_rate", "update_ratio", "env_steps", "wall_s",
               "startup_s", "error", "folder")  # fmt: skip


class SweepEnd(BaseException):
    """No further cell begins: after an error (`__cause__`), a signal or at a limit. Hydra would store an Exception."""


def figures(cell: Cell, reference: float | None) -> dict[str, Any]:
    """The cell's row of the table, with the columns `CSV_COLUMNS`."""
    quality, speed = cell.summary.get("quality", {}), cell.summary.get("steps_per_s")
    own: dict[str, Any] = {"status": cell.status, "error": cell.error, "folder": str(cell.folder)}
    own |= {key: quality.get(key) for key in ("mean_reward", "win_rate")}
    own |= {"speed_up": speed / reference if speed and reference else None}
    return {key: own[key] if key in own else cell.summary.get(key) for key in CSV_COLUMNS}


class Sweep:
    """Runs the cells one by one as Hydra gives them; `finish` prints and writes the table.

    Args:
        arguments: the typed arguments, stored so that the sweep can be continued.
        overrides: the typed arguments as Hydra's overrides, and the overrides from environment variables.
        files: options with which a cell finds the user's configuration files.
        way: value of `on_existing`.
        config: its `sweep` says when no further cell begins.
    """

    def __init__(
        self, command: str, arguments: Sequence[str], console: Console, overrides: Sequence[str] = (),
        files: Sequence[str] = (), way: str = "refuse", config: Config | None = None,
    ) -> None:  # fmt: skip
        self.command, self.limits = command, SweepConfig() if config is None else config.sweep
        self.arguments, self.overrides, self.files, self.way = list(arguments), list(overrides), list(files), way
        self.console = console
        self.cells: list[Cell] = []
        self.folder: Path | None = None
        self.stopped = False  # True after a signal
        self._stored: list[dict[str, Any]] = []  # cells of the sweep that this one continues
        self._lock = ExitStack()
        self._swept: dict[str, int] = {}
        self._total = self._parallel = 1
        self._until = None if self.limits.minutes is None else time.time() + 60.0 * self.limits.minutes

    def launch(self, job: Any, start: Callable[[CellTask], None]) -> None:
        """Let a launcher plugin of Hydra run all cells. `start(task)` ends when they have ended."""
        self._begin(job)
        parallel = parallel_cells(self.limits.max_parallel, job.launcher)
        self._parallel = max(1, parallel)
        further = *self._without_report(), *self.files, *_search_path(job)
        forget_unfinished(self.folder or Path())
        task = CellTask(self.command, further, parallel, self._until, self.limits.stop_on_error)
        side_by_side = f", {parallel} side by side, each on its own cores" if parallel else ""
        say(self.console, f"{self._total} cells by {job.launcher._target_.rpartition('.')[2]}{side_by_side}")
        try:
            with watching(self.folder or Path(), self._tell_ended):
                start(task)
        finally:
            self.cells = cells_in(self.folder or Path())

    def _tell_ended(self, cells: list[Cell], cell: Cell) -> None:
        self.cells = cells
        say(self.console, f"{self._place(len(cells), cell.overrides)}: {cell.described()}{self._eta()}")

    def _begin(self, job: Any) -> None:
        self._open(Path(job.sweep.dir).absolute())
        of_files = [f"{key}={value}" for key, value in (job.sweeper.get("params") or {}).items()]
        self._swept = {**_swept_keys(of_files), **_swept_keys(self.overrides)}
        self._total = math.prod(self._swept.values())

    def run_cell(self, job: Any) -> int:
        """Run one cell in its own process; returns the exit code. Raises SweepEnd after a signal or at a limit."""
        if self.folder is None:
            self._begin(job)
        if self._until is not None and time.time() > self._until:
            say(self.console, "sweep.minutes are over: no further cell begins")
            raise SweepEnd
        folder = Path(job.runtime.output_dir).absolute()
        label, own = str(len(self.cells)), without_folder(job.overrides.task)
        cell, interrupted = self._known(label, own, folder), False
        if cell is None:
            overrides = [*job.overrides.task, *self._without_report(), *self.files, *_search_path(job)]
            title = self._place(len(self.cells) + 1, job.overrides.task) + self._eta()
            with activity(self.console, title, lambda: last_line(folder)):
                cell, interrupted = run_cell(self.command, overrides, folder, label)
            cell.overrides = own
        self.cells.append(cell)
        self._write(*self._rows())
        place = self._place(len(self.cells), cell.overrides)
        say(self.console, f"{place}: {cell.described()} · {cell.seconds:.0f} s{self._eta()}")
        if interrupted or cell.exit_code == EXIT_STOPPED or (self.limits.stop_on_error and has_failed(cell)):
            raise SweepEnd
        return cell.exit_code

    def _open(self, folder: Path) -> None:
        """Lock the folder until `finish`."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(lock_folder(folder))
        if self.way == "overwrite":
            clear(folder, "sweep")
        elif self.way == "resume":
            self._stored = read_json(folder / "sweep.json").get("cells", [])

    def _known(self, label: str, overrides: list[str], folder: Path) -> Cell | None:
        """The cell, if the stopped sweep that this one continues has finished it; else None."""
        for row in self._stored:
            if (str(row["cell"]), row["overrides"], row["exit_code"]) == (label, overrides, EXIT_DONE):
                seconds = float(row.get("seconds", 0))
                return Cell(label, overrides, folder, EXIT_DONE, "", seconds, summary=row["summary"])
        return None

    def _without_report(self) -> list[str]:
        """The override that leaves out a cell's report (about a second); none if the user typed `report`."""
        typed = {key_of(text) for text in self.arguments}
        return ["report=false"] if self.command == "train" and "report" not in typed else []

    def _place(self, number: int, overrides: Sequence[str]) -> str:
        swept = " ".join(text for text in overrides if key_of(text) in self._swept) or "the one cell"
        return f"[{number}/{self._total}] {swept}"

    def _eta(self) -> str:
        done, left = [cell.seconds for cell in self.cells], self._total - len(self.cells)
        return f" · ETA {clock_text(left * sum(done) / len(done) / self._parallel)}" if done and left > 0 else ""

    def finish(self) -> int:
        """Print the table, write sweep.csv and sweep.json, return the exit code: 0 if every cell is done, 4 if the
        sweep was stopped, else 1 if a cell failed, else 2 (cells with wrong settings).
        """
        if self.folder is None:
            raise ConfigError(f"{' '.join(filter(key_of, self.arguments))}: a list has no values, so nothing can run")
        found = self._rows()
        self._print(*found)
        self._write(*found)
        self._lock.close()
        codes = {cell.exit_code for cell in self.cells}
        stopped = self.stopped or EXIT_STOPPED in codes
        if stopped and not (self.limits.stop_on_error and any(map(has_failed, self.cells))):
            return EXIT_STOPPED
        return (
            EXIT_CRASHED
            if codes - {EXIT_DONE, EXIT_WRONG_INPUT, EXIT_STOPPED}
            else max(codes, default=EXIT_WRONG_INPUT)
        )

    def way_on(self) -> str:
        """How many cells of a stopped sweep are done, and the command that continues it."""
        done = sum(cell.exit_code == EXIT_DONE for cell in self.cells)
        text = f"stopped: {done} of {self._total} cells are done, in {self.folder}"
        if self.command != "train" or self.folder is None:
            return text
        words = [*without_folder(self.arguments), override("hydra.sweep.dir", self.folder), "on_existing=resume"]
        return f"{text}; {command()} {shlex.join(words)} goes on"

    def _rows(self) -> tuple[list[dict[str, Any]], list[str], str]:
        reference, against = self._reference()
        rows = [figures(cell, reference) for cell in self.cells]
        cells = [_values(cell.overrides) for cell in self.cells]
        keys = dict.fromkeys(key for values in cells for key in values)  # in the order they were typed
        return rows, [key for key in keys if len({values.get(key) for values in cells}) > 1], against

    def _reference(self) -> tuple[float | None, str]:
        """Speed and name of the cell with which others are compared: the one with profile=baseline, else the first."""
        done = [cell for cell in self.cells if cell.summary.get("steps_per_s")]
        baseline = [cell for cell in done if any(o.lstrip("+") == "profile=baseline" for o in cell.overrides)]
        cell = next(iter((*baseline, *done)), None)
        return (None, "-") if cell is None else (float(cell.summary["steps_per_s"]), f"cell {cell.label}")

    def _print(self, rows: list[dict[str, Any]], keys: list[str], against: str) -> None:
        figures_of = ["steps/s", "speed-up", "mean reward [95 %]", "win rate [95 %]", "updates/step", "status"]
        table = FittingTable(["cell", *keys, *figures_of])
        for cell, row in zip(self.cells, rows, strict=True):
            values = _values(cell.overrides)
            quality = cell.summary.get("quality", {})
            table.add_row(
                cell.label,
                *(values.get(key, "") for key in keys),
                with_interval(row["steps_per_s"], None, "{:,.0f}"),
                with_interval(row["speed_up"], None, "{:.2f}×"),
                figure_text(quality, "mean_reward", "{:.3g}"),
                figure_text(quality, "win_rate", "{:.1f}", 100),
                with_interval(row["update_ratio"], None, "{:.5f}"),
                one_line(f"{row['status']}{': ' + row['error'] if row['error'] else ''}"),
            )
        self.console.print(f"\nSweep: {len(rows)} cells, speed-up against {against}", highlight=False)
        self.console.print(table)
        say(self.console, f"written to {near(self.folder or Path())}/sweep.csv and sweep.json")

    def _write(self, rows: list[dict[str, Any]], keys: list[str], against: str) -> None:
        folder, cells = self.folder or Path(), []
        with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["cell", *keys, *CSV_COLUMNS])
            for cell, row in zip(self.cells, rows, strict=True):
                values = _values(cell.overrides)
                fields = [cell.label, *(values.get(k, "") for k in keys), *(row[c] for c in CSV_COLUMNS)]
                writer.writerow([csv_cell(value) for value in fields])
                told = {"cell": int(cell.label), "overrides": cell.overrides, "exit_code": cell.exit_code}
                cells.append({**told, "seconds": round(cell.seconds, 2), **row, "summary": cell.summary})
        content = {"schema": 1, "arguments": without_folder(self.arguments), "swept": keys, "speed_up_against": against}
        write_json(folder / "sweep.json", {**content, "cells": cells})


def _swept_keys(given: Sequence[str]) -> dict[str, int]:
    """The keys with several values, and the number of values: `num_envs=64,128` → `{"num_envs": 2}`."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(given))
        return {o.key_or_group: len(list(o.sweep_string_iterator())) for o in overrides if o.is_sweep_override()}
    except HydraException:  # Hydra reports this error itself, later
        return {}


def first_cell(overrides: Sequence[str]) -> list[str]:
    """The overrides of the first cell: each override with several values has the first of them."""
    first = list(overrides)
    for place, one in enumerate(OverridesParser.create().parse_overrides(first)):
        if one.is_sweep_override():
            with suppress(HydraException, StopIteration):  # a list without values is refused later
                first[place] = f"{one.get_key_element()}={next(iter(one.sweep_string_iterator()))}"
    return first


def _search_path(job: Any) -> list[str]:
    """The folders from the command line in which a run of the sweep looks for configuration files."""
    return [text for text in job.overrides.hydra if key_of(text) == "hydra.searchpath"]


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {key_of(o): o.partition("=")[2] for o in overrides}
