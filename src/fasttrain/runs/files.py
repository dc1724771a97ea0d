"""The files of a run's folder."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.errors import ConfigError

SUMMARY_SCHEMA = 1
MOST_CONTAINERS, MOST_VALUES = 1_000_000, 20_000_000  # of JSON: 60 bytes each list or object, 40 each number


def write_json(path: Path, content: Any) -> None:
    """Write whole or not at all: to a temporary name first, then renamed. Strict JSON whatever comes in.

    NaN and infinities become null, keys texts.
    """
    temporary = path.with_suffix(path.suffix + ".tmp")
    try:
        temporary.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a full disk; a written one has its name by now


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_whole(str(key)): _finite(item) for key, item in value.items()}
    if isinstance(value, str):
        return _whole(value)
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which are no text and which strict readers refuse."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def parse_json(text: bytes, what: str) -> Any:
    """The value, if making it takes no more memory than a file of so many bytes should.

    Raises:
        ConfigError: it is no JSON in UTF-8, or has more parts than anything that fasttrain or SB3 writes.
    """
    if sum(map(text.count, (b"[", b"{"))) > MOST_CONTAINERS or text.count(b",") > MOST_VALUES:
        raise ConfigError(f"{what} has too many parts for what it should be")
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is no JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty where there is none to read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
