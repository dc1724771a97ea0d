"""What this machine offers."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # CPU flag → name, the fastest first


def usable_cores() -> int:
    """Physical cores, but no more than this process may run on (containers, taskset)."""
    try:
        allowed = len(os.sched_getaffinity(0))  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:  # not on Windows or macOS
        allowed = os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def bf16_units(cpuinfo: Path = _CPUINFO) -> str:
    """Name of the CPU's units for bfloat16 products; empty where it has none or the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((name for flag, name in _BF16_UNITS.items() if flag in flags), "")
