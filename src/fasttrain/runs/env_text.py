"""Text from envs on its way into files and onto terminals. Envs choose keys and end reasons freely."""

from __future__ import annotations

from typing import Any

import numpy as np

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
