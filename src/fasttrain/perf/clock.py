"""PhaseClock: every nanosecond of the main thread belongs to exactly one phase, so that the phases add up.

Entering a phase ends the previous one. This takes about 0.1 µs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# In the order of the [PERF] table.
PHASES = (
    "action",  # policy forward and sampling
    "env_step",  # stepping the envs and reading masks, with opponents' turns
    "buffer",  # storing transitions, counting episodes, bootstrapping, advantages
    "replay_sample",  # drawing minibatches from a replay buffer
    "train_fwd",  # losses, forward
    "train_bwd",  # gradients
    "train",  # forward and backward together if they are not timed separately (stock classes, kernels)
    "optim",  # gradient clipping and the optimizer's step
    "log",  # loggers, live view, [PERF] itself, episodes.csv
    "eval",  # evaluation during training
    "checkpoint",  # saving during training
    "other",  # everything else
)
UPDATE_PHASES = ("replay_sample", "train_fwd", "train_bwd", "train", "optim")


class PhaseClock:
    """Adds up the main thread's time by phase. `totals_ns` lacks the time since the current phase began."""

    __slots__ = ("_current", "_since_ns", "totals_ns")

    def __init__(self) -> None:
        self.totals_ns: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._current = "other"
        self._since_ns = time.perf_counter_ns()

    def enter(self, phase: str) -> str:
        """End the current phase and begin `phase`; returns the name of the one that ended. KeyError: unknown name."""
        now = time.perf_counter_ns()
        previous = self._current
        self.totals_ns[previous] += now - self._since_ns
        self.totals_ns[phase] += 0  # so that an unknown phase fails here, not in the report
        self._current = phase
        self._since_ns = now
        return previous

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time inside the block belongs to phase `name`, time after the block to the previous phase again."""
        previous = self.enter(name)
        try:
            yield
        finally:
            self.enter(previous)

    def reset(self) -> None:
        """Set all totals to zero; the current phase continues."""
        self.totals_ns = dict.fromkeys(PHASES, 0)
        self._since_ns = time.perf_counter_ns()

    def snapshot(self) -> dict[str, int]:
        """Nanoseconds of each phase up to now; their sum is the time since `reset`."""
        self.enter(self._current)
        return dict(self.totals_ns)
