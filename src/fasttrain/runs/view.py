"""What a run shows: the live panel or lines during training, and the tables of plan, [PERF] and quality.

A run has one console, so that the live panel and other lines do not mix. Tables fit its width. Work that can take
longer than two seconds is shown by `activity`: as moving lines at the foot of a terminal, elsewhere as plain lines.
Activities may be nested, also in the live view of a training.
"""

from __future__ import annotations

import errno
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain.machine import usable_cores
from fasttrain.perf.report import PerfWindow, advice, perf_rows
from fasttrain.runs.progress import Progress, clock_text
from fasttrain.spec.plan import RunSpec
from fasttrain.terminal import GLUE, Output, folded, one_line, rate_text, spelt, with_interval

GAP = "  "
LEAST = 40  # characters; with this much room the table's last column is wrapped, with less it goes below the row


class FittingTable:
    """A table of texts that fits the console. If it is too wide, the last columns of each row go on lines below it.

    Args:
        right: names of the columns that are aligned to the right.
        plain: names of the columns that are shown without their name if they go below a row.
    """

    def __init__(self, names: Sequence[str], right: Collection[str] = (), plain: Collection[str] = ()) -> None:
        self.names, self.right, self.plain = list(names), right, plain
        self.rows: list[tuple[list[str], str]] = []  # cells (markup is not interpreted) and style

    def add_row(self, *cells: str, style: str = "") -> None:
        self.rows.append((list(cells), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        rows = [(self.names, "bold"), *self.rows]
        widths = [max(cell_len(cells[column]) for cells, _ in rows) for column in range(len(self.names))]
        before_last = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        if before_last + min(widths[-1], LEAST) <= options.max_width:
            yield self._beside()
            return
        beside = len(widths) - 1
        while beside > 1 and sum(widths[:beside]) + len(GAP) * (beside - 1) > options.max_width:
            beside -= 1
        for cells, style in rows:
            padded = [self._padded(name, cells[i], widths[i]) for i, name in enumerate(self.names[:beside])]
            yield Text(GAP.join(padded).rstrip(), style=style, overflow="fold")
            if cells is not self.names and (below := self._below(cells, beside)):
                yield Text(folded(GAP + below, options.max_width), style=style, overflow="fold")

    def _beside(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in self.names:
            table.add_column(name, overflow="fold", justify="right" if name in self.right else "left")
        for cells, style in self.rows:
            table.add_row(*map(Text, cells), style=style)
        return table

    def _padded(self, name: str, cell: str, width: int) -> str:
        space = " " * (width - cell_len(cell))
        return space + cell if name in self.right else cell + space

    def _below(self, cells: list[str], beside: int) -> str:
        named = list(zip(self.names, cells, strict=True))[beside:]
        told = (cell if name in self.plain else f"{name} {cell}" for name, cell in named if cell)
        return " · ".join(text.replace(" ", GLUE) if cell_len(text) < LEAST else text for text in told)


PLAIN_EVERY_S = 10.0
SHORTEST_BAR = 10  # columns
BAR_COLOURS = {"env": "green", "act": "cyan", "update": "magenta", "rest": "bright_black"}


class LiveView:
    """Shows a `Progress`. It also calls `beside(now)` from time to time; the result is the time of the next call."""

    def __init__(
        self, progress: Progress, console: Console, title: str, panel: bool,
        beside: Callable[[float], float] = lambda _: math.inf,
    ) -> None:  # fmt: skip
        self._progress, self._console, self._title = progress, console, title
        self._panel = panel and moves(console)
        self._drawn = Group()  # the panel of the last tick, which another thread shows
        self._shown = ExitStack()
        self._every_s = MOVING_EVERY_S if self._panel else PLAIN_EVERY_S
        self._draws = time.perf_counter() + self._every_s
        self._beside, self._next = beside, 0.0  # `_next`: before this time `tick` does nothing

    def __enter__(self) -> LiveView:
        if self._panel:
            self._shown.enter_context(moving(self._console, lambda: self._drawn))
            self._shown.enter_context(activity(self._console, self._title))  # its spinner turns also in a long update
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        if self._progress.env_steps:
            say(self._console, self._progress.line())

    def tick(self) -> None:
        """Draw the panel if the last drawing is old enough."""
        now = time.perf_counter()
        if now < self._next:
            return
        if now >= self._draws:
            self._draws = now + self._every_s
            if self._panel:
                self._drawn = self.render()
            else:
                say(self._console, self._progress.line())
        self._next = min(self._draws, self._beside(now))

    def render(self) -> Group:
        """The panel: progress, rates, results, and the shares of the phases."""
        progress, width = self._progress, self._console.width - 1
        eta = "" if progress.eta_s is None else f"  ETA {clock_text(progress.eta_s)}"
        counts = f"{progress.env_steps:,}/{progress.total_timesteps:,}{eta}"
        done, room = min(progress.env_steps, progress.total_timesteps), width - len(counts) - 1
        bar = ProgressBar(progress.total_timesteps, done, width=max(1, min(40, room)))
        head = Table.grid(padding=(0, 1))
        head.add_row(bar, counts)
        facts = [*progress.rates()[: None if width > NARROW else 1], f"{progress.updates:,} updates"]
        if progress.mean_return is not None:
            facts.append(f"reward {progress.mean_return:.3g}{progress.trend()}")
        if progress.win_rate is not None:
            facts.append(f"win {100 * progress.win_rate:.1f} %")
        told = Text(folded("   ".join(fact.replace(" ", GLUE) for fact in facts), width))
        return Group(head, told, self._phase_bar(width))

    def _phase_bar(self, width: int) -> Text:
        shares = self._progress.shares().items()
        words = [f"  {name} {100 * share:.0f} %" for name, share in shares]
        room = min(40, width - len("".join(words)) - 2)  # 2: rounded shares can make the bar two characters longer
        text = Text(no_wrap=True, overflow="crop")
        if room >= SHORTEST_BAR:
            for name, share in shares:
                text.append("█" * round(room * share), style=BAR_COLOURS[name])
        for (name, _), word in zip(shares, words, strict=True):
            text.append(word if text else word.lstrip(), style=BAR_COLOURS[name])
        return text


NARROW = 80  # characters


class LastingConsole(Console):
    """A console on which a closed pipe (Ctrl-C also ends `| tee`) or a full disk ends the output, not the run."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self.on_broken_pipe(error)

    def on_broken_pipe(self, error: OSError | None = None) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # raised if standard output is no file
            Output.end(error or BrokenPipeError(errno.EPIPE, "nobody reads"), sys.stdout.fileno())


def make_console() -> Console:
    """The console on standard output. If that is no terminal, it is wide enough for the tables.

    It keeps this output while `sys.stdout` is redirected for a library, so that activities are still shown.
    """
    plain: dict[str, Any] = {
        "markup": False,
        "emoji": False,
        "file": sys.stdout,
    }  # without markup, emoji and highlighting: texts are shown as they are
    if not sys.stdout.isatty():  # a file gets no colours, also with FORCE_COLOR
        plain |= {"width": 140, "no_color": True, "force_terminal": False}
    return LastingConsole(**plain)


def say(console: Console, line: str, style: str = "") -> None:
    """Print one line; on a terminal it is folded between words."""
    text = folded(line, console.width) if console.is_terminal else line
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


class Voice:
    """`say` on one console. `last`: the last printed line."""

    def __init__(self, console: Console) -> None:
        self._console, self.last = console, ""

    def __call__(self, line: str) -> None:
        self.last = line
        say(self._console, line)


def show_plan(console: Console, plan: RunSpec) -> None:
    """Print the flags that differ from a plain SB3 script or from what was requested."""
    console.print("Plan: what differs from a plain SB3 script", style="bold")
    table = FittingTable(["flag", "requested", "effective", "class", "source", "why"], plain=["why"])
    for row in plan.notable():
        requested, effective = _cell(row.requested), _cell(row.effective)
        style = "bold" if requested != effective else ""
        table.add_row(row.flag, requested, effective, row.flag_class, row.source, row.reason, style=style)
    console.print(table)
    console.print(f"  ({len(plan.rows)} flags in all: plan.json)", style="dim", highlight=False)
    for name, own in plan.config.policies.items():
        say(console, f"  policy {name}: {', '.join(f'{key}={spelt(value)}' for key, value in own.items())}")


def _cell(value: object) -> str:
    return f"{value:,}" if type(value) is int else spelt(value)


def show_perf(console: Console, window: PerfWindow, effective: Mapping[str, Any]) -> None:
    """Print how long each phase of training took. `effective`: the effective flags."""
    rates = "".join(f", {rate_text(rate)} {name.replace('_per_', '/')}" for name, rate in window.rates.items())
    say(
        console,
        f"\n[PERF] {rate_text(window.steps_per_s)} steps/s{rates} over {window.env_steps:,} env steps "
        f"in {window.wall_ns / 1e9:.1f} s, {window.updates:,} updates ({window.update_ratio:.5f} per step)",
        style="bold",
    )
    unit = "1,000 steps" if window.per_thousand else "step"
    names = [f"ms per {unit}", "share", "steps/s if alone"]
    if console.width < NARROW:
        names = [f"ms/{unit.removesuffix(' steps')}", "share", "/s if alone"]
    table = FittingTable(["phase", *names], right=names)
    for row in perf_rows(window):
        table.add_row(*row)
    console.print(table)
    if window.phases_ns.get("train"):
        stock = effective.get("engine") == "stock"
        why = ", measured from outside of SB3's code" if stock else ", in compiled kernels the optimizer too"
        say(console, f"  train_ms: forward and backward together{why}", style="dim")
    say(console, f"  {advice(window, usable_cores(), effective)}")


def show_quality(console: Console, quality: Mapping[str, dict[str, Any]]) -> None:
    """Print evaluation results: a row for greedy and one for sampled play."""
    console.print("\nQuality (seeds not used in training, 95 % intervals)", style="bold")
    draws = any(result.get("draw_rate") for result in quality.values())
    columns = ["acting", "episodes", "mean reward", "win rate", *(["draws"] if draws else []), "score difference"]
    scores = list(dict.fromkeys(name for result in quality.values() for name in result.get("scores", ())))
    table = FittingTable([*columns, *map(one_line, scores), "length", "ends"])
    for acting, result in quality.items():
        ends = ", ".join(f"{name} {100 * share:.0f} %" for name, share in result["end_reason"].items())
        table.add_row(
            acting,
            f"{result['episodes']:,}" + (f" ({alike} distinct)" if (alike := result.get("distinct_episodes")) else ""),
            figure_text(result, "mean_reward", "{:.3g}"),
            figure_text(result, "win_rate", "{:.1f} %", 100),
            *([f"{100 * (result['draw_rate'] or 0):.1f} %"] if draws else []),
            figure_text(result, "score_diff", "{:.1f}"),
            *(figure_text(result, name, "{:.3g}") for name in scores),
            f"{result['mean_length']:.1f}",
            one_line(ends, 2000),
        )
    console.print(table)
    if untold := next((result["untold"] for result in quality.values() if "untold" in result), None):
        held = f"the info at the last episode's end has {', '.join(untold['held']) or 'nothing'}"
        if untold["missing"]:
            say(console, f"  {', '.join(untold['missing'])}: in no info at an episode's end; {held}", style="bold")
        else:
            say(console, f"  {held}; set env.result.win, .scores and .end to keys with the game's result", style="dim")


def figure_text(result: Mapping[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    """`61.3 % [60.1, 62.4]`: a figure of an evaluation with its interval."""
    return with_interval(result.get(name), (result.get("ci95") or {}).get(name), form, scale)


# --- progress lines of longer work

SILENT_S = 2.0  # shorter activities print no line in a log
SAID_EVERY_S = 30.0
MOVING_EVERY_S = 0.25
WHEELS = {"utf": "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "": "|/-\\"}  # key: first letters of the console's encoding


def moves(console: Console) -> bool:
    """Whether the console can draw over lines that it has printed."""
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet


class Activity:
    """Work that takes a while. `now` and `count` may be called often. `ask`: called by `line`; returns the detail."""

    def __init__(self, title: str, ask: Callable[[], str] | None = None) -> None:
        self._title, self._detail, self._more, self._ask = title, "", "", ask
        self._began = time.monotonic()
        self._counted: tuple[int, int, str] | None = None
        self._first: tuple[int, float] = (0, 0.0)  # the first value of `count`, and its time

    def now(self, detail: str) -> None:
        """Set the detail: `3 of 12: act_rows`."""
        self._detail, self._counted = detail, None

    def count(self, done: int, wanted: int, unit: str, more: str = "") -> None:
        """Set the progress, from which the remaining time is estimated. `more`: a text after the numbers."""
        if self._counted is None or self._counted[1:] != (wanted, unit):
            self._first = (done, time.monotonic())
        self._counted, self._more = (done, wanted, unit), more

    def line(self, width: int | None = None) -> str:
        """`compiling kernels: 3 of 12: act_rows, 0:14`. The detail is cut if the line is wider than `width`."""
        detail, tail = self._detail, f", {clock_text(time.monotonic() - self._began)}"
        if self._ask is not None:
            with suppress(OSError, ValueError):
                detail = self._ask()
        if self._counted is not None:
            done, wanted, unit = self._counted
            detail, tail = f"{done:,} of {wanted:,} {unit}{self._more}", tail + self._eta(done, wanted)
        head = f"{self._title}: {detail}" if detail else self._title
        room = len(head) if width is None else max(0, width - len(tail))
        return (head if len(head) <= room else f"{head[: room - 1]}…") + tail

    def _eta(self, done: int, wanted: int) -> str:
        since, took_s = done - self._first[0], time.monotonic() - self._first[1]
        return f", ETA {clock_text(took_s / since * max(0, wanted - done))}" if since > 0 and took_s > 1 else ""


@contextmanager
def moving(console: Console, draw: Callable[[], RenderableType]) -> Iterator[None]:
    """Draw what `draw` returns at the foot of the terminal, below other moving lines, while the block runs."""
    per_s = 1 / MOVING_EVERY_S
    with Live(console=console, refresh_per_second=per_s, transient=True, get_renderable=draw) as live:
        live.refresh()  # draws at once; of nested `Live` objects the outermost draws all
        yield


@contextmanager
def activity(console: Console, title: str, ask: Callable[[], str] | None = None) -> Iterator[Activity]:
    """While the block runs, show `title`, the time, and a detail: what `ask` returns, or what the Activity was told."""
    doing = Activity(title, ask)
    wheel = next(wheel for encoding, wheel in WHEELS.items() if console.encoding.startswith(encoding))

    def drawn() -> Text:
        turn = wheel[int(time.monotonic() / MOVING_EVERY_S) % len(wheel)]
        return Text(f"{turn} {doing.line(console.width - 5)}", no_wrap=True, overflow="crop")

    with moving(console, drawn) if moves(console) else _in_lines(console, doing):
        yield doing


@contextmanager
def _in_lines(console: Console, doing: Activity) -> Iterator[None]:
    """Print plain lines about the activity, unless another activity runs inside it."""
    running, over = vars(console).setdefault("fasttrain_activities", []), threading.Event()

    def go_on() -> None:
        wait_s = SILENT_S
        with suppress(OSError, ValueError):  # if the output was closed
            while not over.wait(wait_s):
                if running[-1] is doing:
                    say(console, doing.line())
                    wait_s = SAID_EVERY_S

    thread = threading.Thread(target=go_on, daemon=True)
    running.append(doing)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        running.remove(doing)
