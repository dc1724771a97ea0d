"""The view of a running training: a rich panel on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain.runs.activity import moves, screen_of
from fasttrain.runs.console import say
from fasttrain.runs.progress import Progress, clock_text

REFRESH_S = 0.25  # of the panel
PLAIN_EVERY_S = 10.0
BAR_COLOURS = {"env": "green", "act": "cyan", "update": "magenta", "rest": "bright_black"}


class LiveView:
    """Shows a `Progress`; `tick` may be called as often as you like, it draws only when it is time."""

    def __init__(self, progress: Progress, console: Console, title: str, panel: bool) -> None:
        self._progress = progress
        self._console = console
        self._title = title
        self._panel = panel and moves(console)
        self._drawn = Group()  # an activity beside the training draws what is there, and reads no counters that change
        self._every_s = REFRESH_S if self._panel else PLAIN_EVERY_S
        self._next = time.perf_counter() + self._every_s

    def __enter__(self) -> LiveView:
        if self._panel:
            screen_of(self._console).show(self._last_drawn)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._panel:
            screen_of(self._console).hide(self._last_drawn)
        if self._progress.env_steps:
            say(self._console, self._progress.line())

    def tick(self) -> None:
        """Draw if the last drawing is old enough."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._every_s
        if self._panel:
            self._drawn = self.render()
            screen_of(self._console).draw()
        else:
            say(self._console, self._progress.line())

    def _last_drawn(self) -> Group:
        return self._drawn

    def render(self) -> Group:
        """The panel: progress, rates, where the time goes, how it learns."""
        progress = self._progress
        bar = ProgressBar(progress.total_timesteps, min(progress.env_steps, progress.total_timesteps), width=40)
        eta = "" if progress.eta_s is None else f"  ETA {clock_text(progress.eta_s)}"
        head = Table.grid(padding=(0, 1))
        head.add_row(Text(self._title, style="bold"), bar, f"{progress.env_steps:,}/{progress.total_timesteps:,}{eta}")
        facts = [f"{progress.steps_per_s:,.0f} steps/s", f"{progress.updates:,} updates"]
        if progress.mean_return is not None:
            facts.append(f"reward {progress.mean_return:.3g}{progress.trend()}")
        if progress.win_rate is not None:
            facts.append(f"win {100 * progress.win_rate:.1f} %")
        return Group(head, Text("   ".join(facts)), self._phase_bar())

    def _phase_bar(self) -> Text:
        text = Text()
        for name, share in self._progress.shares().items():
            text.append("█" * round(40 * share), style=BAR_COLOURS[name])
        for name, share in self._progress.shares().items():
            text.append(f"  {name} {100 * share:.0f} %", style=BAR_COLOURS[name])
        return text
