"""evaluations.csv: quality on the way, a row per evaluation, and the same for summary.json."""

from __future__ import annotations

import csv
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

    def go_on(self, rows: list[dict[str, Any]]) -> None:
        """The file with these rows alone, and on from there."""
        self.rows = [{name: row.get(name) for name in FIELDS} for row in rows]
        if not rows:
            self.file.unlink(missing_ok=True)
            return
        with self.file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)

    def known(self, env_steps: int) -> list[dict[str, Any]]:
        """Rows of the file about policies of at most so many steps; what cannot be read is left out."""
        try:
            with self.file.open(newline="", encoding="utf-8") as file:
                rows = [{name: _number(row.get(name)) for name in FIELDS} for row in csv.DictReader(file)]
        except (OSError, ValueError, csv.Error):
            return []
        return [row for row in rows if row["env_steps"] is not None and row["env_steps"] <= env_steps]

    def add(self, env_steps: int, wall_s: float, quality: dict[str, Any]) -> None:
        """Take in the greedy policy's `quality`, of `evaluate.summarise`."""
        row: dict[str, Any] = {"env_steps": env_steps, "wall_s": round(wall_s, 3), "episodes": quality["episodes"]}
        for name in ("mean_reward", "win_rate"):
            row[name] = quality[name]
            low, high = quality["ci95"][name] or (None, None)
            row[f"{name}_low"], row[f"{name}_high"] = low, high
        row["score_diff"] = quality["score_diff"]
        fresh = not self.rows
        self.rows.append(row)
        with self.file.open("w" if fresh else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)


def _number(text: str | None) -> float | int | None:
    """A cell; None where it is empty."""
    if not text:
        return None
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
