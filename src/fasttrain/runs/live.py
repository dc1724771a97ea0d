"""The view of a running training: a rich panel on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain.runs.activity import activity, moves, screen_of
from fasttrain.runs.console import say
from fasttrain.runs.progress import Progress, clock_text
from fasttrain.terminal import GLUE, folded, rate_text

REFRESH_S = 0.25  # of the panel
PLAIN_EVERY_S = 10.0
SHORTEST_BAR = 10  # columns
BAR_COLOURS = {"env": "green", "act": "cyan", "update": "magenta", "rest": "bright_black"}


class LiveView:
    """Shows a `Progress`; `tick` may be called as often as you like, it draws only when it is time."""

    def __init__(self, progress: Progress, console: Console, title: str, panel: bool) -> None:
        self._progress = progress
        self._console = console
        self._title = title
        self._panel = panel and moves(console)
        self._drawn = Group()  # what is drawn beside the training is what was there at the last tick: counters change
        self._shown = ExitStack()
        self._every_s = REFRESH_S if self._panel else PLAIN_EVERY_S
        self._next = time.perf_counter() + self._every_s

    def __enter__(self) -> LiveView:
        if self._panel:
            screen = screen_of(self._console)
            screen.show(self._last_drawn)
            self._shown.callback(screen.hide, self._last_drawn)
            self._shown.enter_context(activity(self._console, self._title))  # it moves while an update takes long
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.close()
        if self._progress.env_steps:
            say(self._console, self._progress.line())

    def tick(self) -> None:
        """Draw if the last drawing is old enough."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._every_s
        if self._panel:
            self._drawn = self.render()  # and drawn by the activity's thread
        else:
            say(self._console, self._progress.line())

    def _last_drawn(self) -> Group:
        return self._drawn

    def render(self) -> Group:
        """The panel: progress, rates, where the time goes, how it learns."""
        progress, width = self._progress, self._console.width - 1
        eta = "" if progress.eta_s is None else f"  ETA {clock_text(progress.eta_s)}"
        counts = f"{progress.env_steps:,}/{progress.total_timesteps:,}{eta}"
        done, room = min(progress.env_steps, progress.total_timesteps), width - len(counts) - 1
        bar = ProgressBar(progress.total_timesteps, done, width=max(1, min(40, room)))
        head = Table.grid(padding=(0, 1))
        head.add_row(bar, counts)
        facts = [f"{rate_text(progress.steps_per_s)} steps/s", f"{progress.updates:,} updates"]
        if progress.mean_return is not None:
            facts.append(f"reward {progress.mean_return:.3g}{progress.trend()}")
        if progress.win_rate is not None:
            facts.append(f"win {100 * progress.win_rate:.1f} %")
        told = Text(folded("   ".join(fact.replace(" ", GLUE) for fact in facts), width))
        return Group(head, told, self._phase_bar(width))

    def _phase_bar(self, width: int) -> Text:
        shares = self._progress.shares().items()
        words = [f"  {name} {100 * share:.0f} %" for name, share in shares]
        room = min(40, width - len("".join(words)) - 2)  # rounding up may add two
        text = Text(no_wrap=True, overflow="crop")
        if room >= SHORTEST_BAR:
            for name, share in shares:
                text.append("█" * round(room * share), style=BAR_COLOURS[name])
        for (name, _), word in zip(shares, words, strict=True):
            text.append(word if text else word.lstrip(), style=BAR_COLOURS[name])
        return text
