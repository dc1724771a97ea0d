"""episodes.csv as arrays: only the columns a report needs, and of a huge file an even sample.

What a run left in its folder, read with patience: every file may be missing, cut or from another version.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.overrides import key_of
from fasttrain.report.words import as_mapping, as_number, as_rows, clean
from fasttrain.runs.logs import FIELDS, from_csv_cell
from fasttrain.runs.quality_keys import SCORE_KEYS, WIN_KEYS
from fasttrain.saving.files import read_json

Floats = NDArray[np.float64]
# A native game writes 14 million episodes an hour, 800 MB; 250,000 rows of it take half a second to read.
WHOLE_BYTES = 20_000_000
BLOCK_BYTES, BLOCKS = 65_536, 256
NEEDED = ("env_steps", "return")
NUMBERS = (*NEEDED, "wall_s", "length", *WIN_KEYS, *SCORE_KEYS)
TERM = "reward_"  # prefix of the columns of `reward_debug`


@dataclass(slots=True)
class Episodes:
    """Training episodes in the order in which they ended; columns the file lacks are absent."""

    numbers: dict[str, Floats] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # empty where the env gives none
    sampled: bool = False  # the file was too large to read whole

    def __len__(self) -> int:
        return len(self.numbers.get("env_steps", ()))

    def column(self, names: Sequence[str]) -> Floats | None:
        """The first of the columns `names` that has any number."""
        for name in names:
            values = self.numbers.get(name)
            if values is not None and np.isfinite(values).any():
                return values
        return None


def read_episodes(file: Path, whole_bytes: int = WHOLE_BYTES, blocks: int = BLOCKS) -> Episodes:
    """What can be read; a cut last line, a broken row and a missing file are no errors.

    Of a file larger than `whole_bytes`, `blocks` stretches of `BLOCK_BYTES` at even distances.
    """
    try:
        sampled = file.stat().st_size > max(whole_bytes, blocks * BLOCK_BYTES)
        header, texts = _texts(file, blocks if sampled else 0)
    except OSError:
        return Episodes()
    wanted = [name for name in header if name in NUMBERS or name.startswith(TERM) or name == "end_reason"]
    if not set(NEEDED) <= set(wanted):
        return Episodes()
    pick = itemgetter(*(header.index(name) for name in wanted))
    rows = [pick(row) for text in texts for row in _rows(text) if len(row) == len(header)]
    columns = dict(zip(wanted, zip(*rows, strict=True), strict=True)) if rows else {}
    reasons = columns.pop("end_reason", ())
    numbers = {name: _floats(values) for name, values in columns.items()}
    good = np.logical_and.reduce([np.isfinite(numbers[name]) for name in NEEDED]) if numbers else np.zeros(0, bool)
    return Episodes(
        {name: values[good] for name, values in numbers.items()},
        [from_csv_cell(reason) or "none given" for reason, kept in zip(reasons, good.tolist(), strict=False) if kept],
        sampled,
    )


def _texts(file: Path, blocks: int) -> tuple[list[str], list[str]]:
    """The header, and the rows as one text or as blocks at even distances, without the lines they cut."""
    with file.open("rb") as stream:
        first = stream.readline()
        header = next(iter(_rows(first.decode("utf-8", "replace"))), [])
        if not blocks:
            rest = stream.read()
            return header, [rest[: rest.rfind(b"\n") + 1].decode("utf-8", "replace")]
        texts = []
        step = (file.stat().st_size - len(first) - BLOCK_BYTES) // (blocks - 1)
        for number in range(blocks):
            stream.seek(len(first) + number * step)
            if number:
                stream.readline()
            block = stream.read(BLOCK_BYTES)
            texts.append(block[: block.rfind(b"\n") + 1].decode("utf-8", "replace"))
    return header, texts


def _rows(text: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text, newline=""))
    except csv.Error:  # a NUL byte, a field without end: the rows before it stand
        return


def _floats(values: Sequence[str]) -> Floats:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        found = (as_number(value) for value in values)
        return np.array([np.nan if number is None else number for number in found], dtype=np.float64)


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
