"""The view of a running training: a rich panel on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
        self._live = Live(console=console, auto_refresh=False, transient=True) if panel else None
        self._every_s = REFRESH_S if panel else PLAIN_EVERY_S
        self._next = time.perf_counter() + self._every_s

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._progress.env_steps:
            self._console.print(self._progress.line(), highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Draw if the last drawing is old enough."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + self._every_s
        if self._live is None:
            self._console.print(self._progress.line(), highlight=False, soft_wrap=True)
        else:
            self._live.update(self.render(), refresh=True)

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
