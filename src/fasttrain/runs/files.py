"""The files of a run's folder."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

SUMMARY_SCHEMA = 1


def write_json(path: Path, content: Any) -> None:
    """Write whole or not at all: to a temporary name first, then renamed. NaN and infinities become null."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty where there is none to read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
