"""status.json: what a run says of itself while it goes, for whoever looks from outside (`fasttrain watch`)."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fasttrain.runs.progress import Progress
from fasttrain.saving.files import FAILED_WRITES, write_whole
from fasttrain.terminal import one_line

STATUS = "status.json"
TRAINING, EVALUATING = "training", "evaluating"
EVERY_S = 2.0
MOST_SHARE = 0.001  # of the time, however slow the disk is: a write of 0.1 ms every two seconds is a twentieth of it
LONGEST = 300  # characters of the line said last


class StatusFile:
    """Written whole or not at all; where that fails nothing is said, for nobody needs it to go on.

    Args:
        said: gives the line that the run said last.
    """

    def __init__(self, folder: Path, progress: Progress, said: Callable[[], str]) -> None:
        self._file, self._progress, self._said = folder / STATUS, progress, said
        self._phase, self._due = TRAINING, -math.inf
        self._who = {"pid": os.getpid(), "host": platform.node()}

    def tick(self, now: float) -> float:
        """Write if it is time; `now` and what is returned, when it will be again, are of `time.perf_counter`."""
        if now >= self._due:
            self.write()
        return self._due

    def now(self, phase: str) -> None:
        """Another phase begins, which the file says at once."""
        self._phase = phase
        self.write()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Another phase while the block runs."""
        before = self._phase
        self.now(phase)
        try:
            yield
        finally:
            self._phase = before

    def write(self) -> None:
        """What is known now."""
        began = time.perf_counter()
        with suppress(*FAILED_WRITES, ValueError):  # a number that is none; the next time may be better
            write_whole(self._file, json.dumps(self._content(), allow_nan=False) + "\n")
        took = time.perf_counter() - began
        self._due = began + max(EVERY_S, took / MOST_SHARE)

    def _content(self) -> dict[str, Any]:
        progress = self._progress
        figures = {
            "steps_per_s": progress.steps_per_s, "reward": progress.mean_return, "win_rate": progress.win_rate,
            "eta_s": progress.eta_s if self._phase == TRAINING else None,
        }  # fmt: skip
        return {
            "phase": self._phase,
            "env_steps": progress.env_steps,
            "total_timesteps": progress.total_timesteps,
            **{name: None if value is None or not math.isfinite(value) else value for name, value in figures.items()},
            "said": one_line(self._said(), LONGEST),
            "time": time.time(),
            **self._who,
        }
