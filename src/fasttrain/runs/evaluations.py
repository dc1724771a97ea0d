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
