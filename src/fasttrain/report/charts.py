"""What a chart shows, as plain data, and the ink it is drawn with.

Five kinds of charts are enough. `drawing.py` draws them; tests read the numbers here. Figures are drawn with the light
theme's colours. In the SVG every one of them becomes `var(--…)`, so that the page's style sheet decides; text stays
text, in the page's font. Nothing here touches pyplot or its global state.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# --- ink

# Palette: Okabe and Ito 2008, told apart with any colour vision; darker where white paper needs it, lighter for dark.
LIGHT = {
    "paper": "#ffffff", "ink": "#1b232c", "muted": "#57626e", "faint": "#e2e6ea",
    "c0": "#0a6ebd", "c1": "#d55e00", "c2": "#008f68", "c3": "#b4508f",
    "c4": "#dd9a05", "c5": "#4fb0e6", "c6": "#6b5bd0", "c7": "#a3adb8",
    "c8": "#85603f", "c9": "#3d4954", "c10": "#c8a6e0",
}  # fmt: skip
DARK = {
    "paper": "#171c22", "ink": "#e8ecf0", "muted": "#a2adb9", "faint": "#313a44",
    "c0": "#55aaf2", "c1": "#ff8a45", "c2": "#2ec49a", "c3": "#e28cc4",
    "c4": "#f3bd4a", "c5": "#93d6ff", "c6": "#a99cff", "c7": "#6f7a86",
    "c8": "#c59c78", "c9": "#c6d0d9", "c10": "#8d63ad",
}  # fmt: skip
BY_HEX = {value: f"var(--{name})" for name, value in LIGHT.items()}
INK, MUTED, FAINT, PAPER = (LIGHT[name] for name in ("ink", "muted", "faint", "paper"))
PNG_DPI = 144
TITLE_INCHES = 0.33
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib; the page puts its own in its place
    "font.size": 9.5,
    "text.parse_math": False,  # an env may call something "$x"
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "figure.facecolor": "none",
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.3,
}


def color(index: int) -> str:
    """The light theme's colour number `index`."""
    return LIGHT[f"c{index % COLORS}"]


def css_variables(theme: dict[str, str]) -> str:
    """`--ink: #1b232c; …`."""
    return " ".join(f"--{name}: {value};" for name, value in theme.items())


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for the figures made inside, whatever a user's matplotlibrc says."""
    logger = logging.getLogger("matplotlib")  # says that it builds its font cache, on the first use after installing
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib.style import context

        with warnings.catch_warnings():
            # A glyph that DejaVu Sans lacks is a box in the PNG; the page's own font may have it.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            with context(["default", STYLE]):
                yield
    finally:
        logger.setLevel(level)


def to_svg(figure: Figure, prefix: str) -> str:
    """Inline SVG whose ids all begin with `prefix`, for several pictures share a page."""
    from matplotlib import rc_context

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.hashsalt": "fasttrain"}):  # the same figure gives the same text
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", lambda tag: _tag(tag[0], prefix), text).strip()


def _tag(tag: str, prefix: str) -> str:
    """One tag for the page. Text between tags has its `<` and `>` escaped, so that this never sees it."""
    if tag.startswith("<!--"):
        return ""
    if tag.startswith("<svg"):
        box = re.search(r'viewBox="[^"]*"', tag)
        return f'<svg {box[0] if box else ""} role="presentation" focusable="false">'
    tag = tag.replace("xlink:href=", "href=")
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", tag)
    tag = re.sub(r"font: ([\d.]+px|[a-z0-9]+ [\d.]+px) [^;\"]*", r"font: \1 var(--font)", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: BY_HEX.get(found[0], found[0]), tag)


def to_png(figure: Figure, file: Path, title: str) -> None:
    """The light theme, with the title that the page writes above the picture.

    The title is a strip of pixels of its own: inside the figure it would lie on a legend that stands outside the axes.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    strip = Figure(figsize=(figure.get_size_inches()[0], TITLE_INCHES))
    strip.text(0.012, 0.2, title, fontsize=11, fontweight="bold", color=INK)
    imsave(file, np.vstack([_pixels(strip), _pixels(figure)]), format="png")


def _pixels(figure: Figure) -> NDArray[np.uint8]:  # (height, width, 4)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(PNG_DPI)
    figure.set_facecolor(PAPER)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
