"""Cells of a sweep that a launcher plugin of Hydra starts, such as hydra/launcher=joblib or submitit_slurm.

The plugin decides when and where a `CellTask` is called. Each cell is a `fasttrain` command in a process of its own, as
with Hydra's usual launcher, and leaves its result in cell.json. The table of the sweep is made from these files.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, ConfigError
from fasttrain.machine import usable_cores
from fasttrain.saving.files import lock_folder, read_json, write_json
from fasttrain.spec.precedence import without_folder
from fasttrain_studies.study import Cell, run_cell

RESULT = "cell.json"
LOOK_S = 0.5


@dataclass(frozen=True)
class CellTask:
    """Runs one composed cell. Hydra's plugin pickles this object, and calls it in a process that it chooses.

    Attributes:
        further: overrides and options that every cell gets besides its own overrides.
        parallel: cells that run side by side on one machine, each on cores of its own; 0: the plugin gives the cores.
        until: time in seconds since the epoch after which no cell begins; None: no limit.
    """

    command: str
    further: tuple[str, ...]
    parallel: int
    until: float | None
    stop_on_error: bool

    def __call__(self, _: object) -> int:
        """Run the job that HydraConfig describes; returns the exit code of the cell."""
        from hydra.core.hydra_config import HydraConfig

        job = HydraConfig.get()
        folder, sweep = Path(job.runtime.output_dir).absolute(), Path(job.sweep.dir).absolute()
        label, own, interrupted = str(job.job.num), without_folder(job.overrides.task), False
        if "on_existing=resume" in job.overrides.task and is_done(folder, own):
            return EXIT_DONE
        with own_cores(sweep / ".cores", self.parallel):
            if reason := self._why_not(sweep):
                cell = Cell(label, own, folder, EXIT_STOPPED, reason, 0.0)
            else:
                cell, interrupted = run_cell(self.command, [*job.overrides.task, *self.further], folder, label)
        cell.overrides = own
        write_json(folder / RESULT, cell.to_dict(sweep))
        if interrupted:
            raise KeyboardInterrupt
        return cell.exit_code

    def _why_not(self, sweep: Path) -> str:
        if self.until is not None and time.time() > self.until:
            return "not begun: sweep.minutes are over"
        failed = self.stop_on_error and any(has_failed(cell) for cell in cells_in(sweep))
        return "not begun: another cell has failed" if failed else ""


def has_failed(cell: Cell) -> bool:
    return cell.exit_code not in (EXIT_DONE, EXIT_STOPPED)


def is_done(folder: Path, overrides: list[str]) -> bool:
    """Whether the cell in `folder` has finished with these overrides."""
    stored = read_json(folder / RESULT)
    return stored.get("exit_code") == EXIT_DONE and stored["overrides"] == overrides


def cells_in(sweep: Path) -> list[Cell]:
    """The cells that have left a result, by number."""
    files = sorted(sweep.glob(f"*/{RESULT}"))
    return sorted((Cell.from_dict(read_json(file), sweep) for file in files), key=lambda cell: int(cell.label))


def forget_unfinished(sweep: Path) -> None:
    """Remove the results of cells that will run again."""
    for file in sweep.glob(f"*/{RESULT}"):
        if read_json(file).get("exit_code") != EXIT_DONE:
            file.unlink()


def parallel_cells(asked: int | str, launcher: Any) -> int:
    """How many cells run side by side on one machine; 0 if the launcher gives each cell its cores.

    Args:
        asked: `sweep.max_parallel`.
        launcher: Hydra's configuration of the launcher.
    """
    if "slurm" in str(launcher.get("_target_")).lower():
        return 0
    cores, jobs = usable_cores(), launcher.get("n_jobs")  # joblib's n_jobs; -1: all cores, -2: all but one
    if asked != "auto":
        return int(asked)
    if jobs is not None:
        return int(jobs) if jobs > 0 else max(1, cores + 1 + int(jobs))
    return max(1, cores // int(launcher.get("cpus_per_task") or 1))


@contextmanager
def own_cores(folder: Path, parallel: int) -> Iterator[None]:
    """Wait until fewer than `parallel` cells run on this machine. In the block this process has its share of the cores.

    A share is a folder with a lock, which the operating system frees if the process dies.
    """
    if not parallel or not hasattr(os, "sched_setaffinity"):
        yield
        return
    every, share = sorted(os.sched_getaffinity(0)), 0
    with ExitStack() as held:
        while True:
            place = folder / f"{platform.node()}-{share}"
            place.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(lock_folder(place))
                break
            except ConfigError:  # another cell has this share
                share = (share + 1) % parallel
        os.sched_setaffinity(0, every[share::parallel] or every)
        held.callback(os.sched_setaffinity, 0, every)
        yield


@contextmanager
def watching(sweep: Path, tell: Callable[[list[Cell], Cell], None]) -> Iterator[None]:
    """In the block, call `tell` for each cell that ends, with all cells that have ended and this one."""
    known, stop = {cell.label for cell in cells_in(sweep)}, threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = stop.wait(LOOK_S)
            cells = cells_in(sweep)
            for cell in cells:
                if cell.label not in known:
                    known.add(cell.label)
                    tell([one for one in cells if one.label in known], cell)

    thread = threading.Thread(target=look, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
