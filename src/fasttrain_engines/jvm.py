"""Support for engines in Java: checks the JVM's flags and keeps its log off stdout."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

PROBE_TIMEOUT_S = 30.0
# A JVM logs to stdout, which carries the messages if an engine is connected by pipes.
QUIET_STDOUT = ("-Xlog:disable", "-Xlog:all=warning:stderr")


def is_java(command: Sequence[str]) -> bool:
    return bool(command) and Path(command[0]).name in ("java", "java.exe")


def refused_flags(java: str, flags: Sequence[str]) -> dict[str, str]:
    """Flags with which this JVM does not start → its message. If each flag works alone, they are tried together."""
    if not flags or not _says(java, flags):
        return {}
    each = {flag: _says(java, [flag]) for flag in flags}
    return {flag: why for flag, why in each.items() if why} or {" ".join(flags): _says(java, flags)}


def _says(java: str, flags: Sequence[str]) -> str:
    """The JVM's error message; empty if it starts."""
    try:
        done = subprocess.run([java, *flags, "-version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    said = (done.stdout + done.stderr).strip().splitlines()
    return (said or [f"exit code {done.returncode}"])[0] if done.returncode else ""


def with_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command with `flags` before its own flags, which take precedence."""
    return [command[0], *flags, *command[1:]]
