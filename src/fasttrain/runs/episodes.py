"""episodes.csv: one row per finished training episode, written in batches."""

from __future__ import annotations

import csv
import io
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain.runs.env_text import csv_cell, from_csv_cell
from fasttrain.runs.saving import Saving

FIXED = ("episode", "env_steps", "env", "return", "length", "wall_s")
FLUSH_EVERY = 2000  # rows; about one write a second at 2,000 episodes/s, a few hundred kB of memory
MOST_ROWS = 100_000  # that wait while the disk is full, 60 MB of memory; of more the oldest are left out
FLUSH_S = 5.0  # where episodes are rarer: what a killed run loses of them, and what whoever watches the file waits


class EpisodeLog:
    """Collects rows and appends them to `path`. Columns are fixed by the first batch's infos; later keys are left out.

    Values that are no scalars are left out too: the file is for spreadsheets and plots.

    Args:
        reward_terms: a column `reward_NAME` for every entry of the info's `reward_terms`, the episode's sums.
        saving: is told when the file cannot be written; the rows then wait for the next time.
    """

    def __init__(self, path: Path, reward_terms: bool = False, saving: Saving | None = None) -> None:
        self.path, self.reward_terms = path, reward_terms
        self.saving = saving or Saving(warnings.warn)
        self.left_out = 0  # episodes
        self._flush_at = FLUSH_EVERY  # rows
        self._rows: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._keys: list[str] | None = None
        self._flushed = time.monotonic()

    def add(self, fixed: tuple[Any, ...], info: dict[str, Any]) -> None:
        """`fixed` in the order of `FIXED`; `info` of the episode's last step."""
        if self.reward_terms:
            info = {**info, **{f"reward_{name}": value for name, value in info.get("reward_terms", {}).items()}}
        self._rows.append((fixed, info))
        if len(self._rows) >= self._flush_at or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def position(self) -> dict[str, Any]:
        """How long the file is now and which columns it has: what a resumed run cuts it back to. Writes what waits."""
        if self._rows:
            self.flush()
        size = self.path.stat().st_size if self._keys is not None and self.path.is_file() else 0
        return {"bytes": size, "keys": self._keys}

    def go_on(self, position: Mapping[str, Any]) -> bool:
        """Drop what was written after `position` and append from there; False: the file is shorter, or is gone.

        Of a shorter one the whole rows stay.
        """
        keys, size = position["keys"], int(position["bytes"])
        if size < 0:
            raise ValueError(f"episodes.csv of {size} bytes")
        self._keys = None if keys is None or not size else [str(key) for key in keys]
        there = self.path.stat().st_size if self.path.is_file() else 0
        if there < size:
            self._keys = self._keys_of_shorter(self._keys or []) if there else None
            return False
        if there:
            os.truncate(self.path, size)
        return True

    def _keys_of_shorter(self, keys: list[str]) -> list[str] | None:
        """The columns that the file has, cut back to its last whole line; None: it is without a header then."""
        content = self.path.read_bytes()
        header, end, _ = content.partition(b"\n")
        os.truncate(self.path, content.rfind(b"\n") + 1)
        if not end:
            return None
        names = next(csv.reader([header.decode("utf-8", "replace")]), [])
        if names == [*FIXED, *map(csv_cell, keys)]:
            return keys
        return [from_csv_cell(name) for name in names[len(FIXED) :]] if names[: len(FIXED)] == [*FIXED] else None

    def flush(self) -> None:
        """Append what was collected."""
        with self.saving.of(self.path.name):
            self._append()
            self._rows.clear()
        if len(self._rows) > MOST_ROWS:
            self.left_out += len(self._rows) - MOST_ROWS
            del self._rows[:-MOST_ROWS]
        self._flush_at = len(self._rows) + FLUSH_EVERY
        self._flushed = time.monotonic()

    def _append(self) -> None:
        first = self._keys is None
        if first:
            self._keys = sorted(
                {key for _, info in self._rows for key, value in info.items() if _is_scalar(key, value)}
            )
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if first:
            writer.writerow([*FIXED, *map(csv_cell, self._keys or ())])
        for fixed, info in self._rows:
            writer.writerow([*fixed, *(_cell(info.get(key)) for key in self._keys or ())])
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
        except OSError:
            self._keys = None if first else self._keys
            if self.path.exists():
                os.truncate(self.path, before)  # half a row, which would be written again
            raise


def _is_scalar(key: Any, value: Any) -> bool:
    if not isinstance(key, str):
        return False
    reserved = key in ("episode", "TimeLimit.truncated", "terminal_observation", "action_mask", "perf")
    return not reserved and (isinstance(value, (bool, int, float, str)) or getattr(value, "shape", None) == ())


def _cell(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else csv_cell(value)
