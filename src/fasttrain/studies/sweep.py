"""`fasttrain -m`: every cell in a fresh process, then one table of speed and quality over all of them.

Hydra composes the cells; running them in one process (its default) would let the first pay for imports, compilation
and caches that the others find warm.
"""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain.overrides import key_of, split_options
from fasttrain.runs.files import read_json, write_json
from fasttrain.runs.progress import clock_text

STATUS = {0: "done", 2: "illegal", 4: "stopped"}
CSV_COLUMNS = (
    "status",
    "steps_per_s",
    "speed_up",
    "mean_reward",
    "win_rate",
    "update_ratio",
    "env_steps",
    "wall_s",
    "startup_s",
    "error",
    "folder",
)


@dataclass(slots=True)
class Cell:
    """One combination and what became of it."""

    number: int
    overrides: list[str]
    folder: Path
    exit_code: int
    error: str
    seconds: float
    summary: dict[str, Any]  # summary.json, empty where the cell left none

    @property
    def status(self) -> str:
        return STATUS.get(self.exit_code, "failed")

    def figures(self, reference: float | None) -> dict[str, Any]:
        """The cell's row: what `CSV_COLUMNS` names."""
        summary, quality = self.summary, self.summary.get("quality", {})
        speed = summary.get("steps_per_s")
        return {
            "status": self.status,
            "steps_per_s": speed,
            "speed_up": speed / reference if speed and reference else None,
            "mean_reward": quality.get("mean_reward"),
            "win_rate": quality.get("win_rate"),
            **{key: summary.get(key) for key in ("update_ratio", "env_steps", "wall_s", "startup_s")},
            "error": self.error,
            "folder": str(self.folder),
        }


class Sweep:
    """Runs the cells that Hydra hands over one by one; `finish` prints and writes the table."""

    def __init__(self, command: str, arguments: Sequence[str], console: Console) -> None:
        self.command = command
        self.arguments = list(arguments)
        self.console = console
        self.cells: list[Cell] = []
        self.folder: Path | None = None
        self._swept = _swept_keys(arguments)
        self._total = math.prod(self._swept.values())

    def run_cell(self, job: Any) -> int:
        """Run one composed cell in a process of its own, its output in the cell's log.txt; returns its exit code.

        Raises:
            KeyboardInterrupt: after the cell has stopped and is recorded; ends the sweep.
        """
        self.folder = Path(job.sweep.dir).absolute()
        folder = Path(job.runtime.output_dir).absolute()
        overrides = list(job.overrides.task)
        begun = time.perf_counter()
        exit_code, interrupted = self._run_process(overrides, folder)
        self.cells.append(
            Cell(
                number=len(self.cells),
                overrides=overrides,
                folder=folder,
                exit_code=exit_code,
                error=_why(exit_code, folder / "log.txt"),
                seconds=time.perf_counter() - begun,
                summary=read_json(folder / "summary.json"),
            )
        )
        self._say_cell(self.cells[-1])
        if interrupted or exit_code == 4:
            raise KeyboardInterrupt
        return exit_code

    def _run_process(self, overrides: list[str], folder: Path) -> tuple[int, bool]:
        directory = "hydra.run.dir='" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"
        options = _kept_options(self.arguments)
        command = [sys.executable, "-m", "fasttrain", self.command, *overrides, directory, *options]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                return process.wait(), False
            except KeyboardInterrupt:  # the cell got the signal too and is saving
                return process.wait(), True

    def _say_cell(self, cell: Cell) -> None:
        figures = cell.figures(None)
        facts = [f"{figures['steps_per_s']:,.0f} steps/s"] if figures["steps_per_s"] else []
        facts += [f"reward {figures['mean_reward']:.3g}"] if figures["mean_reward"] is not None else []
        facts += [f"win {100 * figures['win_rate']:.1f} %"] if figures["win_rate"] is not None else []
        facts += [cell.error] if cell.error else []
        left = self._total - len(self.cells)
        mean_s = sum(c.seconds for c in self.cells) / len(self.cells)
        eta = f" · ETA {clock_text(left * mean_s)}" if left > 0 else ""
        swept = " ".join(text for text in cell.overrides if key_of(text) in self._swept) or "the one cell"
        head = f"[{len(self.cells)}/{self._total}] {swept}: {cell.status} · "
        line = head + " · ".join([*facts, f"{cell.seconds:.0f} s"]) + eta
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> int:
        """Print the table, write sweep.csv and sweep.json beside the cells; the sweep's exit code.

        0 if every cell is done, 4 if stopped, else 1 if any failed, else 2 (only illegal ones).
        """
        if self.folder is None:
            return 0
        reference, against = self._reference()
        rows = [cell.figures(reference) for cell in self.cells]
        keys = _varying_keys([cell.overrides for cell in self.cells])
        self._print(rows, keys, against)
        self._write(rows, keys, against)
        codes = {cell.exit_code for cell in self.cells}
        if 4 in codes:
            return 4
        return 0 if codes == {0} else 1 if codes - {0, 2} else 2

    def _reference(self) -> tuple[float | None, str]:
        """What speed-ups are relative to: the baseline profile's cell if there is one, else the first that is done."""
        done = [cell for cell in self.cells if cell.summary.get("steps_per_s")]
        if not done:
            return None, "-"
        baseline = [cell for cell in done if any(o.lstrip("+") == "profile=baseline" for o in cell.overrides)]
        cell = (baseline or done)[0]
        return float(cell.summary["steps_per_s"]), f"cell {cell.number}"

    def _print(self, rows: list[dict[str, Any]], keys: list[str], against: str) -> None:
        table = Table(box=None, pad_edge=False)
        names = [
            "cell",
            *keys,
            "steps/s",
            "speed-up",
            "mean reward [95 %]",
            "win rate [95 %]",
            "updates/step",
            "status",
        ]
        for name in names:
            table.add_column(name, overflow="fold")
        for cell, row in zip(self.cells, rows, strict=True):
            values = _values(cell.overrides)
            quality = cell.summary.get("quality", {})
            table.add_row(
                str(cell.number),
                *(values.get(key, "") for key in keys),
                _form(row["steps_per_s"], "{:,.0f}"),
                _form(row["speed_up"], "{:.2f}×"),
                _with_interval(quality, "mean_reward", 1, "{:.3g}"),
                _with_interval(quality, "win_rate", 100, "{:.1f}"),
                _form(row["update_ratio"], "{:.5f}"),
                f"{row['status']}{': ' + row['error'] if row['error'] else ''}",
            )
        self.console.print(f"\nSweep: {len(rows)} cells, speed-up against {against}", highlight=False)
        self.console.print(table)
        self.console.print(f"written to {self.folder}/sweep.csv and sweep.json", highlight=False, soft_wrap=True)

    def _write(self, rows: list[dict[str, Any]], keys: list[str], against: str) -> None:
        folder = self.folder or Path()
        with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["cell", *keys, *CSV_COLUMNS])
            for cell, row in zip(self.cells, rows, strict=True):
                values = _values(cell.overrides)
                writer.writerow([cell.number, *(values.get(k, "") for k in keys), *(row[c] for c in CSV_COLUMNS)])
        cells = [
            {
                "cell": cell.number,
                "overrides": cell.overrides,
                "exit_code": cell.exit_code,
                **row,
                "summary": cell.summary,
            }
            for cell, row in zip(self.cells, rows, strict=True)
        ]
        write_json(folder / "sweep.json", {"schema": 1, "swept": keys, "speed_up_against": against, "cells": cells})


def _swept_keys(arguments: Sequence[str]) -> dict[str, int]:
    """Keys with several values and how many: `num_envs=64,128` → `{"num_envs": 2}`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        overrides = OverridesParser.create().parse_overrides(split_options(arguments)[1])
    except HydraException:  # Hydra itself will say what is wrong
        return {}
    return {o.key_or_group: len(list(o.sweep_string_iterator())) for o in overrides if o.is_sweep_override()}


def _kept_options(arguments: Sequence[str]) -> list[str]:
    """Hydra's options that a cell needs too: where the user's own configuration lies."""
    options = split_options(arguments)[0]
    return [
        option
        for index, option in enumerate(options)
        if option.startswith("--config-dir=")
        or option in ("--config-dir", "-cd")
        or (index and options[index - 1] in ("--config-dir", "-cd"))
    ]


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {key_of(o): o.partition("=")[2] for o in overrides}


def _varying_keys(cells: Sequence[Sequence[str]]) -> list[str]:
    """Keys whose value differs between cells, in the order they were typed."""
    keys = list(dict.fromkeys(key_of(o) for overrides in cells for o in overrides))
    return [key for key in keys if len({_values(overrides).get(key) for overrides in cells}) > 1]


def _why(exit_code: int, log: Path) -> str:
    """What ended a cell: a signal, its `fasttrain: error:` line, else the last line it wrote; empty if it went well."""
    if exit_code in (0, 4):
        return ""
    if exit_code < 0:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    marked = [line.partition("fasttrain: error: ")[2] for line in lines if line.startswith("fasttrain: error: ")]
    return (marked or lines or ["no output"])[-1]


def _form(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _with_interval(quality: dict[str, Any], key: str, scale: float, form: str) -> str:
    value, interval = quality.get(key), (quality.get("ci95") or {}).get(key)
    if value is None or interval is None:
        return "-"
    low, high = (form.format(scale * bound) for bound in interval)
    return f"{form.format(scale * value)} [{low}, {high}]"
