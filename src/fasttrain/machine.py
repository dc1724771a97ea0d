"""What this machine offers."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # CPU flag → name, the fastest first


def usable_cores() -> int:
    """Physical cores, but no more than this process may run on (taskset) or get the time of (`docker run --cpus`)."""
    try:
        allowed = len(os.sched_getaffinity(0))  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:  # not on Windows or macOS
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(psutil.cpu_count(logical=False) or allowed, allowed, _cpu_quota())))


def free_memory() -> int:
    """Bytes that can still be had: of the machine, or of the container if that is allowed less."""
    free = int(psutil.virtual_memory().available)
    for folder in _own_folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError, IndexError):  # not there, or the word "max": no limit
                left = _number(folder / limit) - _number(folder / used) + _reclaimable(folder / "memory.stat")
                free = min(free, max(0, int(left)))
    return free


def process_age_s() -> float:
    """Seconds since this process was created; 0 if the clock was set back meanwhile."""
    return max(0.0, time.time() - psutil.Process().create_time())


def stop_after(parent: int, look_every_s: float = 2.0) -> None:
    """Wait for the end of the process that started this one; then SIGTERM, at which a run saves and ends (POSIX)."""
    while os.getppid() == parent:
        time.sleep(look_every_s)
    os.kill(os.getpid(), signal.SIGTERM)


def outgrows(pid: int) -> int:
    """Bytes that the process `pid` and those it started hold, if they are what the memory is about to end for; else 0.

    Known a moment before the system kills something: with a sixteenth left of what they could have at most.
    """
    free = free_memory()
    if free > 2**31:  # counting takes longer than this
        return 0
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                held += each.memory_info().rss
    return held if held > free and free < max((held + free) // 16, 2**26) else 0


def _cpu_quota() -> float:
    """How many cores' time the container gets; infinite without a limit."""
    quota = math.inf
    for folder in _own_folders("cpu"):
        with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            quota = min(quota, _number(folder / "cpu.max") / _number(folder / "cpu.max", 1))
        with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            given = _number(folder / "cpu.cfs_quota_us")  # -1: no limit
            quota = min(quota, given / _number(folder / "cpu.cfs_period_us") if given > 0 else math.inf)
    return quota


def _own_folders(controller: str) -> Iterator[Path]:
    """Where Linux says what this process may have: its control group and those above it, version 2 and 1.

    Inside a container the group is the root of what is mounted, whatever path /proc names.
    """
    with suppress(OSError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            root = _CGROUPS / controller if names else _CGROUPS
            place = Path(path.lstrip("/"))
            yield root
            yield from (root / folder for folder in (place, *place.parents) if folder != Path())


def _number(file: Path, place: int = 0) -> float:
    return float(file.read_text(encoding="utf-8").split()[place])


def _reclaimable(file: Path) -> float:
    """Bytes of files read or written that the system drops when memory is needed; 0 where it does not say."""
    with suppress(OSError, ValueError):
        named = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return float(named.get("total_inactive_file", named.get("inactive_file", 0)))
    return 0.0


def lived_at(pid: int, at_s: float) -> bool:
    """Whether the process lives and did at that time (of `time.time`): numbers are used again."""
    with suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).create_time() <= at_s + 1.0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def bf16_units(cpuinfo: Path = _CPUINFO) -> str:
    """Name of the CPU's units for bfloat16 products; empty where it has none or the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((name for flag, name in _BF16_UNITS.items() if flag in flags), "")
