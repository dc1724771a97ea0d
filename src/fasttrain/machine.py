"""What this machine offers."""

from __future__ import annotations

import os

import psutil


def usable_cores() -> int:
    """Physical cores, but no more than this process may run on (containers, taskset)."""
    try:
        allowed = len(os.sched_getaffinity(0))  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:  # not on Windows or macOS
        allowed = os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))
