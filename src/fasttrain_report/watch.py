"""`fasttrain watch [FOLDER …]`: a table of all runs below a folder, drawn again and again.

It reads only files of runs: status.json, which a training renews every two seconds, summary.json, and the lock of the
folder. Files of an ended run are read again only if its folder's time stamp shows that a file was replaced.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.runs.folders import DOCTOR_LOG, contents_of
from fasttrain.runs.progress import STATUS, TRAINING, clock_text
from fasttrain.runs.view import make_console, moves
from fasttrain.saving.files import ENDS, LOCK, holder, read_json
from fasttrain.terminal import one_line, rate_text
from fasttrain_report.values import as_mapping, as_number
from fasttrain_report.words import NOTHING, compact, number, percent

USUAL = ("outputs", "multirun", "studies")
EVERY_S = 1.0
RECENT_S = 2.0  # seconds; a folder that changed so recently is read again: its time stamp may miss the next change
SILENT_S = 120.0  # if the lock cannot be read, a run whose status is older than this counts as ended
MOST_BYTES = 16 << 20  # larger files are not read
DEAD = "dead"
STYLES = {"done": "dim", "stopped": "yellow", "crashed": "red", DEAD: "red"}
NAMES = ("run", "state", "steps", "steps/s", "reward", "win", "age", "last message")
LEAST_NAME, LEAST_MESSAGE, PLAIN_WIDTH = 12, 24, 220  # characters; PLAIN_WIDTH: without a terminal


class Row(NamedTuple):
    """One run. `alive`: a process is working on it. Times are in seconds since 1970."""

    state: str
    alive: bool
    began: float
    changed: float
    env_steps: float | None = None
    total: float | None = None
    eta_s: float | None = None
    steps_per_s: float | None = None
    reward: float | None = None
    win_rate: float | None = None
    said: str = ""


def main(arguments: Sequence[str]) -> int:
    """Show the table until Ctrl-C; with --once or without a terminal, show it once. Raises ConfigError for a missing
    folder or an unknown argument.
    """
    once = "--once" in arguments
    watch, console = Watch(_folders([text for text in arguments if text != "--once"])), make_console()
    if once or not moves(console):
        console.width = console.width if console.is_terminal else PLAIN_WIDTH
        console.print(watch.table(console))
        return EXIT_DONE
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(watch.table(console), refresh=True)
            time.sleep(EVERY_S)
    return EXIT_DONE


def _folders(typed: Sequence[str]) -> list[Path]:
    missing = [text for text in typed if not Path(text).is_dir()]
    if wrong := [text for text in missing if text.startswith("-") or "=" in text]:
        raise ConfigError(f"watch takes folders and --once only: {', '.join(wrong)} would do nothing")
    if missing:
        raise ConfigError(f"watch {missing[0]}: no such folder; name one that holds runs")
    found = [Path(text) for text in typed or USUAL if Path(text).is_dir()]
    if not found:
        raise ConfigError(f"watch: none of {', '.join(USUAL)} is here; name a folder that holds runs")
    return found


class Watch:
    """The runs below some folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._ended: dict[str, tuple[int, Row]] = {}  # folder of an ended run → (time stamp in ns, row)

    def rows(self, now: float | None = None) -> list[tuple[str, Row]]:
        """Names and rows: the running runs first, then the ended ones, the newest first."""
        now = time.time() if now is None else now
        found = {}
        for root in self._roots:
            for folder in runs_below(str(root)):
                with suppress(OSError):  # the folder was just removed
                    name = os.path.relpath(folder, root if len(self._roots) == 1 else ".")
                    found[one_line(folder if name == "." else name)] = self._row(folder, now)
        return sorted(found.items(), key=lambda item: (not item[1].alive, -item[1].began))

    def folders(self) -> list[Path]:
        return sorted(Path(folder) for root in self._roots for folder in runs_below(str(root)))

    def table(self, console: Console) -> Table:
        """The table, with as many rows as the terminal has lines for."""
        now = time.time()
        rows = self.rows(now)
        room = max(3, console.height - 5) if console.is_terminal else len(rows)
        counts = Counter(row.state for _, row in rows)
        told = ", ".join(f"{count:,} {state}" for state, count in counts.most_common()) or "no run there yet"
        hidden = f"; {len(rows) - room:,} older ones are not shown" if len(rows) > room else ""
        lines = [[name, *_cells(row, now)] for name, row in rows[:room]]
        widths = [max(cell_len(line[place]) for line in [[*NAMES], *lines]) for place in range(len(NAMES))]
        left = console.width - 1 - sum(widths[1:-1]) - 2 * len(NAMES[1:])  # characters for the name and the message
        longest = max(LEAST_NAME, min(widths[0], left - LEAST_MESSAGE if left > 2 * LEAST_MESSAGE else left))
        names = NAMES if left - longest >= LEAST_MESSAGE else NAMES[:-1]
        table = Table(box=None, pad_edge=False, caption=told + hidden, caption_justify="left")
        for name, width in zip(names, [longest, *widths[1:-1], left - longest], strict=False):
            is_text = name in ("run", "state", NAMES[-1])
            table.add_column(
                name, width=width, no_wrap=True, overflow="ellipsis", justify="left" if is_text else "right"
            )
        for (_, row), line in zip(rows, lines, strict=False):
            line[0] = line[0] if len(line[0]) <= longest else f"…{line[0][1 - longest :]}"
            table.add_row(*map(Text, line[: len(names)]), style=STYLES.get(row.state, ""))
        return table

    def _row(self, folder: str, now: float) -> Row:
        changed = os.stat(folder).st_mtime_ns
        known = self._ended.get(folder)
        if known is not None and known[0] == changed and now - changed / 1e9 >= RECENT_S:
            return known[1]
        status, summary, plan = (_read(Path(folder, name)) for name in (STATUS, "summary.json", "plan.json"))
        row = row_of(status, summary, plan, _at_work(Path(folder), status, now))
        if not row.alive:
            self._ended[folder] = changed, row
        return row


def runs_below(root: str) -> Iterator[str]:
    """Folders of runs at or below `root`, without those inside a run's folder."""
    for folder, below, names in os.walk(root):
        found = contents_of(Path(folder), {*names})
        if DOCTOR_LOG not in names and (found.kind == "run" if found else STATUS in names):
            yield folder
            below.clear()
        below[:] = [name for name in below if name[0] != "."]


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in a file, with the file's time stamp as `written`; empty if it cannot be read."""
    with suppress(OSError):
        found = file.stat()
        if found.st_size <= MOST_BYTES:
            return {**read_json(file), "written": found.st_mtime}
    return {}


def _at_work(folder: Path, status: dict[str, Any], now: float) -> str:
    """Id of a run's process, or empty. From the lock (if the run has one on this machine), else from status.json."""
    if status.get("host") in (None, platform.node()) and (folder / LOCK).exists():
        return holder(folder)
    lives = status.get("phase") not in (None, *ENDS) and now - (as_number(status.get("time")) or 0.0) < SILENT_S
    return str(status.get("pid")) if lives else ""


def row_of(status: dict[str, Any], summary: dict[str, Any], plan: dict[str, Any], process: str) -> Row:
    """The row of a run from its files, which may be missing or wrong. `process`: the run's process, or empty."""
    phase, ended = str(status.get("phase") or ""), summary.get("status")
    changed = max((as_number(part.get("written")) or 0.0 for part in (status, summary, plan)), default=0.0)
    newer = (as_number(status.get("time")) or 0.0) > (as_number(summary.get("written")) or 0.0)  # True after a resume
    if process:  # if status.json is still an earlier process's, the run is starting
        state = "starting" if status and (phase in ENDS or str(status.get("pid")) != process) else phase or TRAINING
    elif phase in ENDS or newer or not isinstance(ended, str):
        state = phase if phase in ENDS else DEAD
    else:
        state = ended
    quality = as_mapping(summary.get("quality"))
    final = {**summary, "reward": quality.get("mean_reward"), "win_rate": quality.get("win_rate")}
    known = (final, status) if state in ENDS and not process else (status or final,)

    def told(name: str) -> float | None:
        return next((value for part in known if (value := as_number(part.get(name))) is not None), None)

    total = status.get("total_timesteps", as_mapping(plan.get("config")).get("total_timesteps"))
    how = summary.get("stopped_by") if state == "done" else None
    words = {"crashed": summary.get("error"), "done": f"ended by {how}" if how not in (None, "horizon") else None}
    return Row(
        state=one_line(state, 20), alive=bool(process), changed=changed,
        began=as_number(plan.get("written")) or changed, total=as_number(total),
        eta_s=as_number(status.get("eta_s")) if state == TRAINING else None,
        said=one_line(words.get(state) or status.get("said") or "", 200),
        **{name: told(name) for name in ("env_steps", "steps_per_s", "reward", "win_rate")},
    )  # fmt: skip


def _cells(row: Row, now: float) -> list[str]:
    eta = "" if row.eta_s is None else f", ETA {clock_text(row.eta_s)}"
    steps = compact(row.env_steps) if row.total is None else f"{compact(row.env_steps)} of {compact(row.total)}"
    speed = NOTHING if row.steps_per_s is None else rate_text(row.steps_per_s)
    win = "" if row.win_rate is None else percent(row.win_rate)
    return [row.state + eta, steps, speed, number(row.reward), win, _age(now - row.changed), row.said]


def _age(seconds: float) -> str:
    """`5 s`, `12 min`, `3 h`, `9 d`."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{max(0, int(seconds // length)):,} {unit}"
