"""The folders that commands write into, and how to name them in a command that goes on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PLAIN = re.compile(r"[\w./:+-]+")


def command_line(command: str, *options: str, **folders: Path) -> str:
    """`fasttrain resume run=outputs/…`: to be typed as it is, whatever is in the folder's name."""
    return " ".join(["fasttrain", *command.split(), *options, *(argument(key, f) for key, f in folders.items())])


def argument(key: str, folder: Path) -> str:
    """`run=outputs/…` for a shell and for Hydra behind it."""
    text = str(folder)
    if PLAIN.fullmatch(text):
        return f"{key}={text}"
    return shlex.quote(f"{key}=" + "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'")
