"""What is being done right now and for how long: moving lines at the foot of a terminal, plain lines elsewhere.

Whatever can take longer than two seconds goes through `activity`, so that a person never looks at a screen that stands
still without knowing why. Activities may lie within each other and below the live view of a training: a console has one
`Screen`, which shows them together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fasttrain.runs.progress import clock_text

T = TypeVar("T")
SILENT_S = 2.0  # what is over sooner is not worth a line in a log
PLAIN_EVERY_S = 30.0
MOVING_EVERY_S = 0.25
WHEELS = {"utf": "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "": "|/-\\"}  # by the beginning of the console's encoding


def moves(console: Console) -> bool:
    """Whether lines can be drawn over there."""
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet


class Activity:
    """One thing under way. `now` and `count` may be called as often as you like, from the thread that does it.

    Args:
        ask: gives the detail instead, whenever a line is drawn.
    """

    def __init__(self, title: str, ask: Callable[[], str] | None = None) -> None:
        self._title, self._detail, self._ask = title, "", ask
        self._began = time.monotonic()
        self._counted: tuple[int, int, str] | None = None
        self._first: tuple[int, float] = (0, 0.0)  # what was counted first, and when

    def now(self, detail: str) -> None:
        """Say which part of it is at work: `3 of 12: act_rows`."""
        self._detail, self._counted = detail, None

    def count(self, done: int, wanted: int, unit: str) -> None:
        """Say how far it is; how long it will take follows from that."""
        if self._counted is None or self._counted[1:] != (wanted, unit):
            self._first = (done, time.monotonic())
        self._counted = (done, wanted, unit)

    def line(self, width: int | None = None) -> str:
        """`compiling kernels: 3 of 12: act_rows, 0:14`, the detail cut where that is wider than `width`."""
        detail, tail = self._detail, f", {clock_text(time.monotonic() - self._began)}"
        if self._ask is not None:
            with suppress(OSError, ValueError):
                detail = self._ask()
        if self._counted is not None:
            done, wanted, unit = self._counted
            detail, tail = f"{done:,} of {wanted:,} {unit}", tail + self._eta(done, wanted)
        head = f"{self._title}: {detail}" if detail else self._title
        room = len(head) if width is None else max(0, width - len(tail))
        return (head if len(head) <= room else f"{head[: room - 1]}…") + tail

    def _eta(self, done: int, wanted: int) -> str:
        since, took_s = done - self._first[0], time.monotonic() - self._first[1]
        return f", ETA {clock_text(took_s / since * max(0, wanted - done))}" if since > 0 and took_s > 1 else ""


class Screen:
    """What moves at the foot of a console. rich draws one thing at a time there: this is it."""

    def __init__(self, console: Console) -> None:
        self._console, self._lock = console, threading.RLock()
        self._parts: list[Callable[[], RenderableType]] = []  # in the order in which they came
        self._live: Live | None = None

    def show(self, part: Callable[[], RenderableType]) -> None:
        """Draw `part` below what is there, until `hide`."""
        with self._lock:
            self._parts.append(part)
            if self._live is None and moves(self._console):
                self._live = Live(
                    console=self._console, auto_refresh=False, transient=True, get_renderable=self._everything
                )
                self._live.start()
            self.draw()

    def hide(self, part: Callable[[], RenderableType]) -> None:
        """Draw it no more; the last one takes the display with it."""
        with self._lock:
            if self._live is not None and len(self._parts) == 1:
                self._live.stop()
                self._live = None
            self._parts.remove(part)
            self.draw()

    def draw(self) -> None:
        """Draw everything anew."""
        with self._lock:
            if self._live is not None:
                self._live.refresh()

    def is_last(self, part: Callable[[], RenderableType]) -> bool:
        """Whether nothing within `part` is shown: it is what is done just now."""
        with self._lock:
            return self._parts[-1:] == [part]

    def _everything(self) -> Group:
        return Group(*(part() for part in self._parts))


def screen_of(console: Console) -> Screen:
    """The one of this console, which keeps it."""
    screen: Screen = vars(console).setdefault("fasttrain_screen", Screen(console))
    return screen


def telling(factories: Sequence[Callable[[], T]], tell: Callable[[str], None]) -> list[Callable[[], T]]:
    """Functions that build envs, each saying first which one it is: `env 3 of 12`."""

    def build(index: int) -> T:
        tell(f"env {index + 1} of {len(factories)}")
        return factories[index]()

    return [partial(build, index) for index in range(len(factories))]


@contextmanager
def activity(console: Console, title: str, ask: Callable[[], str] | None = None) -> Iterator[Activity]:
    """Show `title`, what `now`, `count` or `ask` say of it and the time it takes, while the block runs."""
    doing, over = Activity(title, ask), threading.Event()
    screen, moving = screen_of(console), moves(console)
    wheel = next(wheel for encoding, wheel in WHEELS.items() if console.encoding.startswith(encoding))

    def drawn() -> Text:
        turn = wheel[int(time.monotonic() / MOVING_EVERY_S) % len(wheel)]
        return Text(f"{turn} {doing.line(console.width - 5)}", no_wrap=True, overflow="crop")

    def go_on() -> None:
        wait_s = MOVING_EVERY_S if moving else SILENT_S
        with suppress(OSError, ValueError):  # nobody reads any more
            while not over.wait(wait_s):
                if moving:
                    screen.draw()
                elif screen.is_last(drawn):
                    console.print(doing.line(), markup=False, highlight=False, soft_wrap=True)
                    wait_s = PLAIN_EVERY_S

    thread = threading.Thread(target=go_on, daemon=True)
    screen.show(drawn)
    thread.start()
    try:
        yield doing
    finally:
        over.set()
        thread.join()
        screen.hide(drawn)
