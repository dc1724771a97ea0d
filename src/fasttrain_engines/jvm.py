"""What a Java engine needs besides its command: flags for small machines, probed ones, profiles, a clean stdout."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

PROBE_TIMEOUT_S = 30.0
# A JVM logs to stdout, where messages go under pipes.
QUIET_STDOUT = ("-Xlog:disable", "-Xlog:all=warning:stderr")


def is_java(command: Sequence[str]) -> bool:
    """Whether the program is a JVM's launcher."""
    return bool(command) and Path(command[0]).name in ("java", "java.exe")


def refused_flags(java: str, flags: Sequence[str]) -> dict[str, str]:
    """Flags that this JVM does not start with, and what it says: of all at once, then of each by itself."""
    if not flags or not _says(java, flags):
        return {}
    each = {flag: _says(java, [flag]) for flag in flags}
    return {flag: why for flag, why in each.items() if why} or {" ".join(flags): _says(java, flags)}


def _says(java: str, flags: Sequence[str]) -> str:
    """The complaint with which it ends, empty if it starts."""
    try:
        done = subprocess.run([java, *flags, "-version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    said = (done.stdout + done.stderr).strip().splitlines()
    return (said or [f"exit code {done.returncode}"])[0] if done.returncode else ""


def with_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command with `flags` before its own, which win."""
    return [command[0], *flags, *command[1:]]
