"""Envs that are built anew; how many envs, workers and actors were replaced, why, and when there are too many."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from fasttrain.errors import EnvError, ReplaceEnv

MOST_BUILT = 10  # new envs in a row that may ask to be replaced before their first step
SEED_STRIDE = 1_000_003  # difference between the seeds of an env and of the env that replaces it after a failure
ALL = -1
ASKED, FAILED = "asked to be replaced", "failed"  # causes: the env raised `fasttrain.ReplaceEnv`; it failed


class Replacements:
    """Counts replacements by cause. More than `most` of the same kind within `within_s` seconds are too many."""

    def __init__(self, most: int = 10, within_s: float = 600.0) -> None:
        self.most, self.within_s = most, within_s
        self.causes = Counter[str]()
        self._times = defaultdict[int, deque[float]](deque)

    @property
    def count(self) -> int:
        return self.causes.total()

    @property
    def why(self) -> tuple[tuple[str, int], ...]:
        """Pairs of cause and number; for `perf.report.EnvTimes`."""
        return tuple(sorted(self.causes.items()))

    def add(self, cause: str, env: int = ALL) -> str:
        """Count a replacement. Returns what to say if these are too many, or an empty text.

        Args:
            env: an env that asked for it, which has a limit of its own; ALL: anything that failed.
        """
        self.causes[cause] += 1
        times, now = self._times[env], time.monotonic()
        times.append(now)
        while times[0] < now - self.within_s:
            times.popleft()
        many = len(times) > self.most
        return f"{len(times)} restarts within {self.within_s / 60:g} minutes, {self.most} allowed" if many else ""


def successor_seed(seed: int | None, failures: int = 1) -> int | None:
    """The seed of the env that replaces a failed env. It is new, because the old seed could fail again."""
    return None if seed is None else (seed + failures * SEED_STRIDE) % 2**31


def built_anew(
    old: Any, build: Callable[[], Any], seed: int | None, note: Callable[[ReplaceEnv], None], **options: Any
) -> tuple[Any, int | None, Any]:
    """Close an env, build a new one and reset it. Returns the new env, its seed, and the answer of its reset.

    Args:
        seed: of the old env.
        note: is called with the error if a new env asks to be replaced in this reset.
        options: further arguments of the reset.
    """
    for _ in range(MOST_BUILT):
        with contextlib.suppress(BaseException):
            old.close()
        old, seed = build(), successor_seed(seed)
        try:
            return old, seed, old.reset(seed=seed, **options)
        except ReplaceEnv as error:
            note(error)
    raise EnvError(f"{MOST_BUILT} new envs in a row asked to be replaced in their first reset")
