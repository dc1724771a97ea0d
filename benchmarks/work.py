"""What is measured: a `Work`, one in a file of `benchmarks/works/` or a family of them that share all but numbers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS = "fasttrain"
# What a measurement gives: `rate`, the keys of `Work.equal`, and further figures. `{"skipped": reason}` where it cannot
# be made on this machine. It runs in a process of its own, so that it may set threads and environment variables.
Sample = dict[str, Any]
TRAINING = ("env_steps", "updates", "samples_per_update")


@dataclass(frozen=True)
class Work:
    """One comparison. The first measurement is ours; ratios are ours ÷ each other one."""

    name: str
    text: str
    measurements: Mapping[str, Callable[..., Sample]]
    unit: str = "env steps/s"
    equal: tuple[str, ...] = TRAINING  # keys of the samples that must be the same, or there is no ratio
    peers: frozenset[str] = field(default_factory=frozenset)  # measurements that are made with --peers alone
    target: str = ""  # the speed target that it measures, T1 …; the guard takes some of them
    seeded: bool = False  # a turn is a seed: the measurement gets its number, `quality` is compared pair by pair
    is_rate: bool = False  # `quality` is a share, as a win rate


def works_of(*works: Work) -> dict[str, Work]:
    """By name."""
    return {work.name: work for work in works}


def every_work() -> dict[str, Work]:
    """All works of the modules in `benchmarks/works/`, in the order of the modules' names."""
    package = importlib.import_module("benchmarks.works")
    found: dict[str, Work] = {}
    for module in pkgutil.iter_modules(package.__path__):
        found |= importlib.import_module(f"benchmarks.works.{module.name}").WORKS
    return found


def chosen(names: list[str]) -> list[Work]:
    """The works with these names, or whose names begin with `NAME-`; `all`: every one.

    Raises:
        SystemExit: a name means none.
    """
    works = every_work()
    found: dict[str, Work] = {}
    for name in names:
        means = {key: work for key, work in works.items() if name in (key, "all") or key.startswith(f"{name}-")}
        if not means:
            raise SystemExit(f"no work {name}: `python -m benchmarks list` shows them")
        found |= means
    return list(found.values())
