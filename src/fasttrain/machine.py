"""Cores, memory and processes of this machine."""

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
    """Physical cores; not more than this process may use (taskset) or has CPU time for (docker --cpus)."""
    try:
        allowed = len(os.sched_getaffinity(0))  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:  # Windows and macOS lack this function
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(psutil.cpu_count(logical=False) or allowed, allowed, _cpu_quota())))


def free_memory() -> int:
    """Free memory in bytes: of the machine, or of the container if its limit is lower."""
    free = int(psutil.virtual_memory().available)
    for folder in _own_folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError, IndexError):  # no limit: there is no file, or it says "max"
                left = _number(folder / limit) - _number(folder / used) + _reclaimable(folder / "memory.stat")
                free = min(free, max(0, int(left)))
    return free


def process_age_s() -> float:
    """Seconds since this process was created; 0 if the clock has been set back meanwhile."""
    return max(0.0, time.time() - psutil.Process().create_time())


def stop_after(parent: int, look_every_s: float = 2.0) -> None:
    """Wait for the end of the parent process, then send SIGTERM to this process: a run then saves and ends (POSIX)."""
    while os.getppid() == parent:
        time.sleep(look_every_s)
    os.kill(os.getpid(), signal.SIGTERM)


def outgrows(pid: int) -> int:
    """Bytes that the process `pid` and its children use, if they are about to exhaust the memory; else 0.

    That is the case if the free memory is less than a sixteenth of (their memory + free memory).
    """
    free = free_memory()
    if free > 2**31:
        return 0
    held = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                held += each.memory_info().rss
    return held if held > free and free < max((held + free) // 16, 2**26) else 0


def _cpu_quota() -> float:
    """The number of cores whose time the container gets; infinite without a limit."""
    quota = math.inf
    for folder in _own_folders("cpu"):
        with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            quota = min(quota, _number(folder / "cpu.max") / _number(folder / "cpu.max", 1))
        with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            limit = _number(folder / "cpu.cfs_quota_us")  # -1 means no limit
            quota = min(quota, limit / _number(folder / "cpu.cfs_period_us") if limit > 0 else math.inf)
    return quota


def _own_folders(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of its parent groups, in cgroup versions 2 and 1 (Linux).

    Inside a container the group's folder is the root of the mount; the path in /proc may not exist there.
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
    """Bytes of cached files, which the system frees when memory is needed; 0 if unknown."""
    with suppress(OSError, ValueError):
        named = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return float(named.get("total_inactive_file", named.get("inactive_file", 0)))
    return 0.0


def lived_at(pid: int, at_s: float) -> bool:
    """Whether the process `pid` lives and already lived at `at_s` (`time.time`), because the system reuses ids."""
    with suppress(psutil.Error, ValueError, OverflowError):
        return psutil.Process(pid).create_time() <= at_s + 1.0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def bf16_units(cpuinfo: Path = _CPUINFO) -> str:
    """Name of the CPU's units for bfloat16 products; empty if there are none, or it is unknown."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # other systems than Linux
        return ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((name for flag, name in _BF16_UNITS.items() if flag in flags), "")


def auto_device(images: bool, cuda: bool) -> str:
    """CUDA for images, else the CPU, on which a small MLP is faster (SB3 too warns against a GPU for it)."""
    return "cuda" if images and cuda else "cpu"
