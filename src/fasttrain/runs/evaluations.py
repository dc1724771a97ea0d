"""evaluations.csv: quality on the way, a row per evaluation, and the same for summary.json."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

FIELDS = (
    "env_steps", "wall_s", "episodes", "mean_reward", "mean_reward_low", "mean_reward_high",
    "win_rate", "win_rate_low", "win_rate_high", "score_diff",
)  # fmt: skip


class EvaluationLog:
    """Written at once: evaluations are rare, and a run that dies should leave them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self._whole = False  # the file has all rows but the newest

    def go_on(self, rows: list[dict[str, Any]]) -> None:
        """The file with these rows alone, and on from there."""
        self.rows = [{name: row.get(name) for name in FIELDS} for row in rows]
        if rows:
            self._rewrite()
        else:
            self.file.unlink(missing_ok=True)

    def known(self, env_steps: int) -> list[dict[str, Any]]:
        """Rows of the file about policies of at most so many steps; what cannot be read is left out."""
        try:
            with self.file.open(newline="", encoding="utf-8") as file:
                text = file.read()
            whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")  # without half a row of a killed run
            rows = [{name: _number(row.get(name)) for name in FIELDS} for row in csv.DictReader(whole)]
        except (OSError, ValueError, csv.Error):
            return []
        return [
            row
            for row in rows
            if row["env_steps"] is not None and row["env_steps"] <= env_steps and row["mean_reward"] is not None
        ]

    def add(self, env_steps: int, wall_s: float, quality: dict[str, Any]) -> None:
        """Take in the greedy policy's `quality`, of `evaluate.summarise`.

        Raises:
            OSError: the file could not be written; the row is kept, and the next one brings it along.
        """
        row: dict[str, Any] = {"env_steps": env_steps, "wall_s": round(wall_s, 3), "episodes": quality["episodes"]}
        for name in ("mean_reward", "win_rate"):
            row[name] = quality[name]
            low, high = quality["ci95"][name] or (None, None)
            row[f"{name}_low"], row[f"{name}_high"] = low, high
        row["score_diff"] = quality["score_diff"]
        self.rows.append(row)
        if self._whole:
            self._append(row)
        else:
            self._rewrite()

    def _append(self, row: dict[str, Any]) -> None:
        self._whole = False
        with self.file.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, FIELDS).writerow(row)
        self._whole = True

    def _rewrite(self) -> None:
        """All rows, in the place of what is there once they are written."""
        self._whole = False
        draft = self.file.with_name(f"{self.file.name}.tmp")
        try:
            with draft.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(self.rows)
            os.replace(draft, self.file)
        finally:
            draft.unlink(missing_ok=True)
        self._whole = True


def _number(text: str | None) -> float | int | None:
    """A cell; None where it is empty."""
    if not text:
        return None
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
