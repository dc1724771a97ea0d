"""Where and when a result was measured, and a machine that others keep busy."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba", "stable-baselines3", "sb3-contrib", "gymnasium")


def about() -> dict[str, Any]:
    """`machine`, `versions`, `measured`."""
    installed = {found.metadata["Name"].lower().replace("_", "-"): found.version for found in distributions()}
    versions = {"python": platform.python_version()}
    versions |= {name: installed[name] for name in PACKAGES if name in installed}
    return {"machine": machine_line(), "versions": versions, "measured": datetime.date.today().isoformat()}


def machine_line() -> str:
    """`2 cores, AMD EPYC, 23 GB, x86_64, Linux`."""
    parts = [f"{os.cpu_count()} cores", cpu_name(), memory(), platform.machine(), platform.system()]
    return ", ".join(part for part in parts if part)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it; empty where it does not."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() if platform.processor() != platform.machine() else ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def memory() -> str:
    """`23 GB`."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return ""
    return f"{size / 2**30:.0f} GB"


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """So many processes that compute all the time, at our own priority."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()
