"""Text from envs on its way into files and onto terminals. Envs choose keys and end reasons freely.

episodes.csv: one row per finished training episode, written in batches.

evaluations.csv: quality on the way, a row per evaluation, and the same for summary.json.

progress.csv of a resumed run: SB3's own file, gone on with instead of begun anew.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import CSVOutputFormat, HumanOutputFormat, KVWriter, Logger

from fasttrain.saving.files import Saving

LONGEST = 1000  # characters of a cell
# What spreadsheets take for a formula (OWASP, "CSV Injection"), in full width too; tabs and returns are spaces by then.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
MOST_BITS = 1024  # of a whole number: as far as a float reaches; Python refuses to write very long ones


def one_line(text: Any, limit: int = 400) -> str:
    """`text` in one line without control characters, lone surrogates and marks that turn the writing direction."""
    line = " ".join(str(text).split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shown(text: str) -> str:
    """Lines for a terminal as they are, without control characters: no escape sequence gets through."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def csv_cell(value: Any) -> Any:
    """A cell that spreadsheets show and do not compute: numbers as they are, of text what looks like a formula quoted.

    `from_csv_cell` takes the quote away again.
    """
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if isinstance(value, int):
        return value if value.bit_length() <= MOST_BITS else ""
    if isinstance(value, (float, np.number)) or value is None:
        return value
    text = one_line(value, LONGEST)
    return f"'{text}" if _looks_like_a_formula(text) else text


def from_csv_cell(cell: str) -> str:
    """The text of which `csv_cell` made this."""
    return cell[1:] if cell.startswith("'") and _looks_like_a_formula(cell[1:]) else cell


def _looks_like_a_formula(text: str) -> bool:
    """Behind quotes too, so that every quote that was there before stays."""
    if not text.lstrip("'").startswith(FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


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


STEPS = "time/total_timesteps"


class ContinuedCSV(CSVOutputFormat):
    """Rows and columns that are there stay; SB3's class would empty the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.with_name(f"{file.name}.unused")))
        self.file.close()
        file.with_name(f"{file.name}.unused").unlink()
        file.touch()
        self.file = file.open("r+", encoding="utf-8", newline="")
        self._find_end()

    def cut(self, env_steps: int) -> None:
        """Forget rows of more env steps."""
        self.file.seek(0)
        rows = list(csv.reader(io.StringIO(self.file.read())))
        if rows and STEPS in rows[0]:
            column = rows[0].index(STEPS)
            kept = [row for row in rows[1:] if len(row) > column and _steps_of(row[column]) <= env_steps]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([rows[0], *kept])
            self.file.seek(0)
            self.file.truncate()
            self.file.write(text.getvalue())
            self.file.flush()
        self._find_end()

    def _find_end(self) -> None:
        self.file.seek(0)
        header = self.file.readline().rstrip("\n")
        self.keys = header.split(",") if header else []
        self.file.seek(0, io.SEEK_END)


def continued_logger(folder: str, formats: list[str]) -> Logger:
    """As SB3's `configure`, for a folder with the files of a run that goes on."""
    writers: list[KVWriter] = [
        ContinuedCSV(Path(folder) / "progress.csv") if name == "csv" else HumanOutputFormat(sys.stdout)
        for name in formats
    ]
    return Logger(folder, writers)


def cut_back(logger: Logger, env_steps: int) -> None:
    """What was logged after that is logged again."""
    for writer in logger.output_formats:
        if isinstance(writer, ContinuedCSV):
            writer.cut(env_steps)


def _steps_of(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0
