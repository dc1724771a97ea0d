"""Runs cells of a study side by side, each on cores of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from fasttrain.errors import EXIT_STOPPED, EXIT_WRONG_INPUT
from fasttrain.machine import usable_cores
from fasttrain.runs.view import activity
from fasttrain.runs.warm import Process, passing_on_signals
from fasttrain_studies.study import Cell, Place, Study, Wanted, last_line

LOOK_S, MOST_LETTERS = 0.2, 60


def shares(parallel: int) -> list[list[int]]:
    """The cores of this process in `parallel` parts. Parts have a core in common only if there are too few cores."""
    every = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(usable_cores())]
    return [every[index::parallel] or [every[index % len(every)]] for index in range(parallel)]


Start = Callable[[Wanted, Place], tuple[Cell, bool]]  # runs a cell, as `Study.start` does


def run_beside(
    study: Study, cells: Sequence[Wanted], parallel: int, start: Start | None = None, until: str = ""
) -> list[tuple[Wanted, Cell]]:
    """Run the unfinished cells like `Study.run`, but `parallel` at a time. Returns the cells that ran, with results.

    Args:
        start: runs a cell in place of `Study.start`.
        until: text for titles if the cells stop early, as " to 20,000". Then the cells are not stored in study.json.
    """
    study.parallel = parallel
    later, free, illegal = [cell for cell in cells if study.find(cell) is None], shares(parallel), set[str]()
    count, begun, stopped, ran = len(later), 0, False, list[tuple[Wanted, Cell]]()
    running: dict[Future[tuple[Cell, bool]], tuple[str, Wanted, Place]] = {}
    processes = list[Process]()

    def detail() -> str:
        lines = []
        for title, wanted, _ in [*running.values()]:
            with suppress(OSError):  # the cell has not begun
                lines.append(f"{title}: {last_line(study.folder_of(wanted))[:MOST_LETTERS]}")
        return " | ".join(lines)

    with (
        passing_on_signals(processes) as signals,
        ThreadPoolExecutor(parallel) as pool,
        activity(study.console, f"{count} trainings{until}, {parallel} side by side", detail),
    ):
        while running or (later and not stopped):
            while later and free and not (stopped := stopped or bool(signals)):
                wanted, begun = later.pop(0), begun + 1
                if wanted.label not in illegal:
                    place = Place(free.pop(0), processes, signals)
                    title = f"[{begun}/{count}] {wanted.label} seed {wanted.seed}{until}"
                    running[pool.submit(start or study.start, wanted, place)] = title, wanted, place
            for future in wait(running, LOOK_S, FIRST_COMPLETED).done:
                title, wanted, place = running.pop(future)
                cell, _ = future.result()
                free.append([*place.cores])
                ran.append((wanted, cell))
                if not until:
                    study.keep(wanted, cell)
                left = [*(each for _, each, _ in running.values()), *later]
                study.say(f"{title}: {cell.described()} · {cell.seconds:.0f} s{study.eta(left)}")
                if cell.exit_code == EXIT_WRONG_INPUT and start is None:
                    illegal.add(wanted.label)
                stopped = stopped or (cell.exit_code == EXIT_STOPPED and not cell.error)
    if stopped or signals:
        raise KeyboardInterrupt
    return ran
