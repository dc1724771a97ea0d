"""The tables that a run writes during training: episodes.csv and evaluations.csv. A resumed run appends to them.
Some texts come from environments, so cells that a spreadsheet would read as a formula are escaped.
"""

from __future__ import annotations

import csv
import io
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.saving.files import Saving, write_whole
from fasttrain.spec.infos import SCORE_KEYS, WIN_KEYS, WRAPPERS, plain
from fasttrain.terminal import one_line

LONGEST = 1000  # most characters of a cell
# Spreadsheets read text that begins with these as a formula (OWASP, "CSV Injection"). Tabs are removed earlier.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def csv_cell(value: object) -> object:
    """A cell that spreadsheets do not compute: text like a formula gets a quote, which `from_csv_cell` removes."""
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if isinstance(value, (int, float, np.number)) or value is None:
        return value
    text = one_line(value, LONGEST)
    return f"'{text}" if _looks_like_a_formula(text) else text


def from_csv_cell(cell: str) -> str:
    """The text from which `csv_cell` made the cell."""
    return cell[1:] if cell.startswith("'") and _looks_like_a_formula(cell[1:]) else cell


def _looks_like_a_formula(text: str) -> bool:
    """Whether a text begins like a formula. Leading quotes are ignored, so that `from_csv_cell` can undo `csv_cell`."""
    return text.lstrip("'").startswith(FORMULA) and number_in(text) is None


FIXED = ("episode", "env_steps", "env", "return", "length", "wall_s")
FLUSH_EVERY = 2000  # rows (a few hundred kB): one write a second at 2,000 episodes/s
MOST_ROWS = 100_000  # most rows that wait while the disk is full (60 MB); then the oldest are dropped
FLUSH_S = 5.0  # most seconds between two writes, so that a killed run loses few episodes


class EpisodeLog:
    """Collects rows and appends them to `path`. The infos of the first flush decide the columns. Later keys, and values
    that are no scalars, are left out. Rows that cannot be written wait for the next flush.

    Args:
        reward_terms: write a column `reward_NAME` for every entry of the info's `reward_terms` (sums of the episode).
    """

    def __init__(self, path: Path, reward_terms: bool = False, saving: Saving | None = None) -> None:
        self.path, self.reward_terms = path, reward_terms
        self.saving = saving or Saving(warnings.warn)
        self.left_out = 0  # number of rows that were dropped
        self._flush_at = FLUSH_EVERY  # number of waiting rows at which they are written
        self._rows: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._keys: list[str] | None = None
        self._flushed = time.monotonic()

    def add(self, fixed: tuple[Any, ...], info: dict[str, Any]) -> None:
        """Add a row: values in the order of `FIXED`, and the last info of the episode from `InfoReader.read`."""
        if self.reward_terms:
            info = {**info, **{f"{TERM}{name}": value for name, value in info.get("reward_terms", {}).items()}}
        self._rows.append((fixed, info))
        if len(self._rows) >= self._flush_at or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def position(self) -> dict[str, Any]:
        """Write waiting rows; return the file's length and columns. A resumed run cuts the file back to this length."""
        if self._rows:
            self.flush()
        size = self.path.stat().st_size if self._keys is not None and self.path.is_file() else 0
        return {"bytes": size, "keys": self._keys}

    def go_on(self, position: Mapping[str, Any]) -> bool:
        """Cut the file back to `position` and append. False if the file is missing or shorter; its rows are kept."""
        keys, size = position["keys"], int(position["bytes"])
        if size < 0:
            raise ValueError(f"episodes.csv cannot have {size} bytes")
        self._keys = None if keys is None or not size else [str(key) for key in keys]
        there = self.path.stat().st_size if self.path.is_file() else 0
        if there < size:
            self._keys = self._keys_of_shorter(self._keys or []) if there else None
            return False
        if there:
            os.truncate(self.path, size)
        return True

    def _keys_of_shorter(self, keys: list[str]) -> list[str] | None:
        """Cut a too short file back to its last complete line and return its columns; None without a header."""
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
        with self.saving.of(self.path.name):
            self._append()
            self._rows.clear()
        if len(self._rows) > MOST_ROWS:
            self.left_out += len(self._rows) - MOST_ROWS
            del self._rows[:-MOST_ROWS]
        self._flush_at = len(self._rows) + FLUSH_EVERY
        self._flushed = time.monotonic()

    def _append(self) -> None:
        text, first = io.StringIO(), self._keys is None
        writer = csv.writer(text, lineterminator="\n")
        if self._keys is None:
            scalars = {key for _, info in self._rows for key, value in info.items() if plain(value) is not None}
            self._keys = sorted(key for key in scalars if isinstance(key, str) and key not in WRAPPERS)
            writer.writerow([*FIXED, *map(csv_cell, self._keys)])
        for fixed, info in self._rows:
            writer.writerow([*fixed, *(_cell(info.get(key)) for key in self._keys)])
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
        except OSError:
            self._keys = None if first else self._keys
            if self.path.exists():
                os.truncate(self.path, before)  # remove the part of the rows that was written
            raise


def _cell(value: object) -> object:
    value = plain(value)
    return round(value, 6) if isinstance(value, float) else csv_cell(value)


FIELDS = (
    "env_steps", "wall_s", "episodes", "mean_reward", "mean_reward_low", "mean_reward_high",
    "win_rate", "win_rate_low", "win_rate_high", "score_diff",
)  # fmt: skip


class EvaluationLog:
    """evaluations.csv. Each row is written immediately, so that a killed run keeps its rows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []

    def go_on(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file's rows by `rows`. New rows are added after these."""
        self.rows = [{name: row.get(name) for name in FIELDS} for row in rows]
        if rows:
            self._write()
        else:
            self.file.unlink(missing_ok=True)

    def known(self, env_steps: int) -> list[dict[str, Any]]:
        """The file's rows of at most `env_steps`. Unreadable rows are left out."""
        try:
            with self.file.open(newline="", encoding="utf-8") as file:
                text = file.read()
            whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")  # without the incomplete row of a killed run
            rows: list[dict[str, Any]] = [
                {name: _number(row.get(name)) for name in FIELDS} for row in csv.DictReader(whole)
            ]
        except (OSError, ValueError, csv.Error):
            return []
        return [
            row for row in rows
            if None not in (row["env_steps"], row["mean_reward"]) and row["env_steps"] <= env_steps
        ]  # fmt: skip

    def add(self, env_steps: int, wall_s: float, quality: dict[str, Any]) -> None:
        """Add a row: `evaluate.summarise` of greedy play. If writing fails, the row is written with the next one."""
        row: dict[str, Any] = {"env_steps": env_steps, "wall_s": round(wall_s, 3), "episodes": quality["episodes"]}
        for name in ("mean_reward", "win_rate"):
            row[name] = quality[name]
            low, high = quality["ci95"][name] or (None, None)
            row[f"{name}_low"], row[f"{name}_high"] = low, high
        row["score_diff"] = quality["score_diff"]
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.file, text.getvalue())


def _number(text: str | None) -> float | int | None:
    """The number in a cell; None if the cell is empty."""
    if not text:
        return None
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value


# --- reading episodes.csv: the columns that reports need, and only some blocks of a large file

Floats = NDArray[np.float64]
# Larger files are not read whole. A native game writes 800 MB an hour; reading 250,000 rows takes half a second.
WHOLE_BYTES = 20_000_000
BLOCK_BYTES, BLOCKS = 65_536, 256
NEEDED = ("env_steps", "return")
NUMBERS = (*NEEDED, "wall_s", "length", *WIN_KEYS, *SCORE_KEYS)
NAMES = ("end_reason", "task")
TERM = "reward_"  # prefix of the columns of `reward_debug`


@dataclass(slots=True)
class Episodes:
    """Training episodes in the order in which they ended."""

    numbers: dict[str, Floats] = field(default_factory=dict)  # column → (E,); only columns that the file has
    reasons: list[str] = field(default_factory=list)  # end reasons; empty if the env gives none
    tasks: list[str] = field(default_factory=list)  # names of tasks; empty without a curriculum
    sampled: bool = False  # True: the file was too large, so only some rows were read

    def __len__(self) -> int:
        return len(self.numbers.get("env_steps", ()))

    def column(self, names: Sequence[str]) -> Floats | None:
        """The first of the columns `names` in which there is a number."""
        for name in names:
            values = self.numbers.get(name)
            if values is not None and np.isfinite(values).any():
                return values
        return None


def read_episodes(file: Path, whole_bytes: int = WHOLE_BYTES, blocks: int = BLOCKS) -> Episodes:
    """The readable rows of episodes.csv. If it is larger than `whole_bytes`, only `blocks` blocks of it."""
    try:
        sampled = file.stat().st_size > max(whole_bytes, blocks * BLOCK_BYTES)
        header, texts = _texts(file, blocks if sampled else 0)
    except OSError:
        return Episodes()
    wanted = [name for name in header if name in NUMBERS or name.startswith(TERM) or name in NAMES]
    if not set(NEEDED) <= set(wanted):
        return Episodes()
    pick = itemgetter(*(header.index(name) for name in wanted))
    rows = [pick(row) for text in texts for row in _rows(text) if len(row) == len(header)]
    columns = dict(zip(wanted, zip(*rows, strict=True), strict=True)) if rows else {}
    named = [columns.pop(name, ()) for name in NAMES]
    numbers = {name: _floats(values) for name, values in columns.items()}
    good = np.logical_and.reduce([np.isfinite(numbers[name]) for name in NEEDED]) if numbers else np.zeros(0, bool)
    reasons, tasks = (
        [from_csv_cell(name) or "none given" for name, ok in zip(names, good.tolist(), strict=False) if ok]
        for names in named
    )
    return Episodes({name: values[good] for name, values in numbers.items()}, reasons, tasks, sampled)


def _texts(file: Path, blocks: int) -> tuple[list[str], list[str]]:
    """The header, and the complete lines after it: as one text, or as blocks from places at equal distances."""
    texts = []
    with file.open("rb") as stream:
        first = stream.readline()
        header = next(iter(_rows(first.decode("utf-8", "replace"))), [])
        step = (file.stat().st_size - len(first) - BLOCK_BYTES) // (blocks - 1) if blocks else 0
        for number in range(blocks or 1):
            stream.seek(len(first) + number * step)
            if number:
                stream.readline()
            block = stream.read(BLOCK_BYTES if blocks else -1)
            texts.append(block[: block.rfind(b"\n") + 1].decode("utf-8", "replace"))
    return header, texts


def _rows(text: str) -> Iterator[list[str]]:
    with suppress(csv.Error):  # a NUL byte or an unclosed quote: the rows before it are used
        yield from csv.reader(io.StringIO(text, newline=""))


def number_in(cell: str) -> float | None:
    """The number in a cell; None if the cell holds no number."""
    with suppress(ValueError):
        return float(cell)
    return None


def _floats(values: Sequence[str]) -> Floats:
    with suppress(ValueError):
        return np.array(values, dtype=np.float64)
    return np.array([number_in(value) for value in values], dtype=np.float64)  # None becomes NaN
