"""episodes.csv as arrays: only the columns a report needs, and of a huge file an even sample."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasttrain.runs.env_text import from_csv_cell
from fasttrain.runs.quality_keys import SCORE_KEYS, WIN_KEYS
from fasttrain.studies.pages.words import as_number

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
