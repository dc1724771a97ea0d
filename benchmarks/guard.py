"""Two revisions of fasttrain, each in a checkout of its own, measured in turn on the works of the speed targets."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.runner import Side, judged, measure, run
from benchmarks.work import Sample, Work, every_work

TARGETS = ("T1", "T2", "T3", "T4", "T5", "T6", "T10", "T11", "T15")


def guarded() -> list[Work]:
    """The works of those targets."""
    return [work for work in every_work().values() if work.target in TARGETS]


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """A git worktree at that revision, removed at the end.

    Raises:
        SystemExit: git knows no such revision.
    """
    with tempfile.TemporaryDirectory(prefix="fasttrain-guard-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "checkout"
        done = _git("worktree", "add", "--detach", str(place), revision)
        if done.returncode:
            raise SystemExit(f"git worktree add {revision}: {done.stderr.strip()}")
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def guard(
    revision: str, against: str, works: Sequence[Work], repeats: int, say: Callable[[str], None],
    measured: Callable[[Work, Side, int], Sample] = measure,
) -> list[dict[str, Any]]:  # fmt: skip
    """A result for each work: `ratios` are `revision` ÷ `against`, `verdict` says slower, faster or neither."""
    results = []
    with checkout_of(revision) as new, checkout_of(against) as old:
        for work in works:
            say(work.name)
            ours = next(iter(work.measurements))
            sides = [Side(revision, ours, new), Side(against, ours, old)]
            result = run(work, sides, repeats, say, measured)
            ratio = result["ratios"].get(against)
            result["verdict"] = judged(ratio) if ratio else "not compared"
            low, high = (ratio or {}).get("interval") or (float("nan"), float("nan"))
            say(f"  {result['verdict']}" + (f": {ratio['median']:.3f} [{low:.3f}, {high:.3f}]" if ratio else ""))
            results.append(result)
    return results
