"""What a chart shows, as plain data: five kinds are enough. `drawing.py` draws them; tests read the numbers here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["number", "steps", "seconds", "share"]
COLORS = 11  # of the palette; index % COLORS
GREY = 7  # what is the rest; the ones after it are for phases only, of which there are many


@dataclass(frozen=True, slots=True)
class Axis:
    """What is measured along an axis, with its unit in `label` (that of `seconds` is chosen when it is drawn)."""

    label: str
    kind: Kind = "number"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve with an optional band; `stepped`: each value holds from the x before it to its own."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    color: int = 0
    stepped: bool = False
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Single measurements with optional intervals and labels."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    labels: tuple[str, ...] = ()
    color: int = 0
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A straight line across the chart at a value worth knowing."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One layer of stacked shares: a value per x, or per row."""

    name: str
    values: Floats
    color: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One name with its value, interval and single observations; `text` is written beside it."""

    name: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    dots: tuple[float, ...] = ()
    color: int = 0
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """`name` is the picture's file name, `title` says what is seen, `note` how to read it."""

    name: str
    title: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class XY(Chart):
    """Curves and points over two axes."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    points: tuple[Points, ...] = ()
    levels: tuple[Level, ...] = ()  # horizontal
    from_zero: bool = False  # y


@dataclass(frozen=True, kw_only=True, slots=True)
class Area(Chart):
    """Shares that fill the height, over x; `stepped` as in `Line`, `start` is where its first value begins."""

    x: Axis
    y: Axis
    at: Floats
    parts: tuple[Part, ...]
    stepped: bool = False
    start: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Chart):
    """Names below each other, values to the right: bars, or dots where no zero makes sense."""

    value: Axis
    rows: tuple[Row, ...]
    bars: bool = True
    levels: tuple[Level, ...] = ()  # vertical


@dataclass(frozen=True, kw_only=True, slots=True)
class Split(Chart):
    """A bar of 100 % per name, split into parts."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heat(Chart):
    """A value per pair of settings; NaN where there is none."""

    x_label: str
    y_label: str
    x_values: tuple[str, ...]
    y_values: tuple[str, ...]
    values: Floats  # (rows of y, columns of x)
    texts: tuple[tuple[str, ...], ...]
    color: int = 0


def color_of(index: int) -> int:
    """The palette's colours in turn, grey left for what is the rest."""
    return index % GREY
