"""What is being done right now and for how long: a moving line on a terminal, plain lines elsewhere.

Whatever can take longer than two seconds goes through `activity`, so that a person never looks at a screen that stands
still without knowing why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from fasttrain.runs.progress import clock_text

SILENT_S = 2.0  # what is over sooner is not worth a line in a log
PLAIN_EVERY_S = 30.0


class Activity:
    """One thing under way. `now` may be called as often as you like, from the thread that does it."""

    def __init__(self, title: str) -> None:
        self._title, self._detail = title, ""
        self._began = time.monotonic()

    def now(self, detail: str) -> None:
        """Say which part of it is at work: `3 of 12: act_rows`."""
        self._detail = detail

    def line(self) -> str:
        """`compiling kernels: 3 of 12: act_rows, 0:14`."""
        detail = f": {self._detail}" if self._detail else ""
        return f"{self._title}{detail}, {clock_text(time.monotonic() - self._began)}"


@contextmanager
def activity(console: Console, title: str) -> Iterator[Activity]:
    """Show `title`, what `now` says of it and the time it takes, while the block runs."""
    doing, over = Activity(title), threading.Event()
    status = Status(title, console=console) if console.is_terminal else None

    def show() -> None:
        wait_s = 0.5 if status else SILENT_S
        while not over.wait(wait_s):
            if status is None:
                console.print(doing.line(), markup=False, highlight=False, soft_wrap=True)
                wait_s = PLAIN_EVERY_S
            else:
                status.update(doing.line())

    thread = threading.Thread(target=show, daemon=True)
    if status:
        status.start()
    thread.start()
    try:
        yield doing
    finally:
        over.set()
        thread.join()
        if status:
            status.stop()
