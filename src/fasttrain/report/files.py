"""What a run left in its folder, read with patience: every file may be missing, cut or from another version."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.report.words import as_mapping, as_number, as_rows, clean
from fasttrain.runs.logs import FIELDS, Episodes, read_episodes
from fasttrain.saving.files import read_json
from fasttrain.spec.overrides import key_of

FILES = ("summary.json", "plan.json", "episodes.csv")  # any of them makes a folder a run's


@dataclass(frozen=True, slots=True)
class RunFiles:
    """One run's files as plain data."""

    folder: Path
    summary: dict[str, Any]
    flags: list[dict[str, Any]]
    config: dict[str, Any]
    perf: dict[str, Any]
    evaluations: list[dict[str, float | None]]
    episodes: Episodes

    @property
    def env(self) -> str:
        env = as_mapping(self.config.get("env"))
        return clean(env.get("id") or env.get("entry_point") or "")

    @property
    def algorithm(self) -> str:
        return clean(as_mapping(self.config.get("algo")).get("name") or "")

    @property
    def overrides(self) -> list[str]:
        found = self.summary.get("overrides")
        return [str(text) for text in found] if isinstance(found, list) else []

    @property
    def profile(self) -> str:
        """By what was typed, else by where flags got their values."""
        typed = [text.partition("=")[2] for text in self.overrides if key_of(text) == "profile"]
        sources = [str(row.get("source", "")) for row in self.flags]
        found = [*typed, *(source[8:] for source in sources if source.startswith("profile "))]
        return clean(found[0]) if found else ""

    @property
    def total(self) -> dict[str, Any]:
        """[PERF] over the whole run."""
        return as_mapping(self.perf.get("total")) or as_mapping(self.summary.get("perf"))

    @property
    def quality(self) -> dict[str, Any]:
        return as_mapping(self.summary.get("quality"))


def is_run(folder: Path) -> bool:
    """Whether any of a run's files is there."""
    return any((folder / name).is_file() for name in FILES)


def read_run(folder: Path) -> RunFiles:
    """Everything a run's report needs."""
    summary, plan = read_json(folder / "summary.json"), read_json(folder / "plan.json")
    return RunFiles(
        folder=folder,
        summary=summary,
        flags=as_rows(plan.get("flags")) or as_rows(summary.get("plan")),
        config=as_mapping(plan.get("config")),
        perf=read_json(folder / "perf.json"),
        evaluations=_evaluations(folder / "evaluations.csv", as_rows(summary.get("evaluations"))),
        episodes=read_episodes(folder / "episodes.csv"),
    )


def _evaluations(file: Path, stored: Sequence[dict[str, Any]]) -> list[dict[str, float | None]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    whole = text[: text.rfind("\n") + 1]  # a cut number would be a wrong one
    rows = list(csv.DictReader(io.StringIO(whole.replace("\0", ""), newline=""))) or list(stored)
    numbers = [{name: as_number(row.get(name)) for name in FIELDS} for row in rows]
    return [row for row in numbers if row["env_steps"] is not None and row["mean_reward"] is not None]


def date_of(folder: Path) -> str:
    """When the run's last file of numbers was written."""
    times = [(folder / name).stat().st_mtime for name in FILES if (folder / name).is_file()]
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(times))) if times else ""
