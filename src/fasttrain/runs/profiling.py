"""`profiler=cprofile|torch|pyinstrument`: a profiler around the training, its tables in the run's folder.

A profiler slows what it watches, each in its own way (cProfile every Python call by about 0.3 µs): a profiled run says
where time goes, not how fast training is. Worker processes and compiled kernels are one line each: the call that waits.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.errors import ConfigError

ROWS, SAID = 20, 5  # of the tables, and of these on the console
TRACED_S = 2.0  # of training: a trace grows by some 10 MB a second
Say = Callable[[str], None]


def check_profiler(profiler: str) -> None:
    """Before anything else of a run.

    Raises:
        ConfigError: its package is missing.
    """
    if profiler == "pyinstrument" and find_spec("pyinstrument") is None:
        raise ConfigError(
            "profiler=pyinstrument: that package is not installed; pip install fasttrain[profile], or take "
            "profiler=cprofile"
        )


@contextmanager
def profiling(profiler: str, folder: Path, say: Say) -> Iterator[Sequence[BaseCallback]]:
    """Profile what happens inside; then write profile.txt and what else there is, and say the first lines of it.

    Yields callbacks that `learn` must get.
    """
    if profiler == "off":
        yield ()
        return
    say(f"profiler={profiler} is on: steps/s and [PERF] of this run are not comparable")
    watch = {"cprofile": _cprofile, "torch": _torch, "pyinstrument": _pyinstrument}[profiler]
    with watch(folder, say) as callbacks:
        yield callbacks


@contextmanager
def _cprofile(folder: Path, say: Say) -> Iterator[Sequence[BaseCallback]]:
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield ()
    finally:
        profile.disable()
        profile.dump_stats(folder / "profile.prof")
        tables = [_table(profile, "tottime"), _table(profile, "cumulative")]
        (folder / "profile.txt").write_text("\n".join(tables), encoding="utf-8")
        _tell(say, _first_rows(tables[0], "ncalls"), folder, ("profile.txt", "profile.prof"))


def _table(profile: cProfile.Profile, order: str) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats(order).print_stats(ROWS)
    return text.getvalue().strip() + "\n"


@contextmanager
def _torch(folder: Path, say: Say) -> Iterator[Sequence[BaseCallback]]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    watched = profile(activities=activities)
    end = TraceEnd(watched, TRACED_S)
    watched.start()
    try:
        yield (end,)
    finally:
        end.stop()
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = watched.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        (folder / "profile.txt").write_text(table, encoding="utf-8")
        watched.export_chrome_trace(str(folder / "trace.json"))
        _tell(say, _first_rows(table, "Name"), folder, ("profile.txt", "trace.json"))
        say(f"  of the first {end.seconds:.1f} s of training: a longer trace would be too large to open")


class TraceEnd(BaseCallback):
    """Ends a trace after `most_s` of training."""

    def __init__(self, watched: Any, most_s: float) -> None:
        super().__init__()
        self._watched, self._most_s, self._begun = watched, most_s, time.perf_counter()
        self.seconds = 0.0  # that were traced; 0 while it goes on

    def stop(self) -> None:
        """Now, if it goes on."""
        if not self.seconds:
            self.seconds = max(1e-9, time.perf_counter() - self._begun)
            self._watched.stop()

    def _on_step(self) -> bool:
        if time.perf_counter() - self._begun > self._most_s:
            self.stop()
        return True


@contextmanager
def _pyinstrument(folder: Path, say: Say) -> Iterator[Sequence[BaseCallback]]:
    import pyinstrument

    watched = pyinstrument.Profiler(async_mode="disabled")
    watched.start()
    try:
        yield ()
    finally:
        watched.stop()
        text = watched.output_text(unicode=True, color=False)
        (folder / "profile.txt").write_text(text, encoding="utf-8")
        (folder / "profile.html").write_text(watched.output_html(), encoding="utf-8")
        tree = [line for line in text.splitlines() if line[:1].isdigit() or "─" in line]
        _tell(say, tree[:SAID], folder, ("profile.txt", "profile.html"))


def _first_rows(table: str, heading: str) -> list[str]:
    """The heading and the first rows of a table, without rules and empty lines."""
    lines = [line.rstrip() for line in table.splitlines() if line.strip(" -")]
    first = next((number for number, line in enumerate(lines) if line.split()[0] == heading), 0)
    return lines[first : first + 1 + SAID]


def _tell(say: Say, lines: Sequence[str], folder: Path, files: Sequence[str]) -> None:
    for line in lines:
        say(f"  {line}")
    say(f"profile: {', '.join(str(folder / name) for name in files)}")
