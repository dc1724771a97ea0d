"""Text from envs: whatever it is, files stay readable and terminals unharmed."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.runs.logs import FORMULA, csv_cell, from_csv_cell
from fasttrain.terminal import one_line, shown

ANYTHING = st.text(st.characters(), max_size=60)  # surrogates included


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1+cmd|' /C calc'!A0", "'+1+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'=1"),
        ("\r\n=1", "'=1"),
        ("＝1", "'＝1"),
        ("won", "won"),
        ("-3.5", "-3.5"),
        ("-inf", "-inf"),
        ("a\nb\x00c", "a b\N{REPLACEMENT CHARACTER}c"),
        ("'twas", "'twas"),
        (-3.5, -3.5),
        (True, 1),
        (np.bool_(False), 0),
        (None, None),
        (np.str_("=1"), "'=1"),
    ],
)
def test_cells(value: Any, cell: Any):
    assert csv_cell(value) == cell


@given(ANYTHING)
def test_any_text_is_one_cell_of_one_line_and_comes_back(text: str):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(["a", csv_cell(text), "b"])
    raw = file.getvalue()
    raw.encode("utf-8")
    assert raw.count("\n") == 1
    first, cell, last = next(csv.reader(io.StringIO(raw)))
    assert (first, last) == ("a", "b")
    assert from_csv_cell(cell) == one_line(text, 1000)
    if cell.startswith(FORMULA):
        assert not math.isnan(float(cell)) or "nan" in cell.lower(), "a number"


@given(ANYTHING)
def test_no_text_reaches_the_terminal_as_more_than_text(text: str):
    for line in (one_line(text), shown(text)):
        assert "\x1b" not in line
        assert "\x9b" not in line
        assert "\r" not in line
        line.encode("utf-8")
    assert len(one_line(text, 10)) <= 10
    assert shown("a\n\tb\x1b[2J") == "a\n\tb\N{REPLACEMENT CHARACTER}[2J"
