"""Charts as plain data, which tests read, and how they are drawn with matplotlib.

`bool(chart)` is True if the chart has something to show. Figures have the colours of the light theme; `page.py`
replaces each colour by `var(--…)` of the page's style sheet. matplotlib is imported only with the first figure, because
this takes half a second. pyplot and its global state are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.terminal import one_line
from fasttrain_report.values import Estimate
from fasttrain_report.words import NOTHING, Metric, compact, label, percent, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

Floats = NDArray[np.float64]

# The palette of Okabe and Ito 2008, which works with any colour vision, with some colours darker for white paper.
LIGHT = {
    "paper": "#ffffff", "ink": "#1b232c", "muted": "#57626e", "faint": "#e2e6ea",
    "c0": "#0a6ebd", "c1": "#d55e00", "c2": "#008f68", "c3": "#b4508f",
    "c4": "#dd9a05", "c5": "#4fb0e6", "c6": "#6b5bd0", "c7": "#a3adb8",
    "c8": "#85603f", "c9": "#3d4954", "c10": "#c8a6e0",
}  # fmt: skip
INK, MUTED, FAINT, PAPER = (LIGHT[name] for name in ("ink", "muted", "faint", "paper"))
GREY = 7  # index of the colour of "others"; the colours after it are only for phases
WIDTH, HEIGHT = 6.0, 3.1  # inches; a page has two columns, and 6 inches (432 pt) are about the width of a column
BAND = 0.18  # opacity of bands
MARKERS = "osD^vPX"
LEGEND_CHARACTER = 0.078  # largest width of a character in a legend, in inches
TIME_UNITS = ((180.0, "s", 1.0), (10_800.0, "min", 60.0), (float("inf"), "h", 3600.0))  # (limit in s, unit, s per unit)
GAP = 7  # unit of the PLACES below, in points
# Where a point's name may stand: units of GAP to the right, and up. Of equally good places the first is used.
PLACES = ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1))


def color_of(index: int) -> int:
    """The palette's colour for curve number `index`: the colours in turn, without grey."""
    return index % GREY


def _shade(index: int) -> str:
    return LIGHT[f"c{index}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A curve with an optional band, or points with optional intervals and names. Arrays are (n,).

    `stepped`: each value is drawn as a horizontal line from the previous x (the first value: from 0) to its own x.
    """

    name: str = ""
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    color: int = 0
    stepped: bool = False
    dashed: bool = False
    labels: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[Floats, Floats]:
        """The drawn points: a stepped curve begins at x = 0."""
        return (np.append(0.0, self.x), np.append(self.y[:1], self.y)) if self.stepped else (self.x, self.y)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A name with its value, interval and single observations (`dots`). `text` is written beside the bar."""

    name: str
    value: float | None = None
    bounds: tuple[float, float] | None = None
    dots: tuple[float, ...] = ()
    color: int = 0
    text: str = ""

    @property
    def numbers(self) -> list[float]:
        return [*([] if self.value is None else [self.value]), *(self.bounds or ()), *self.dots]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    """`name`: the picture's file name; `title`: what it shows; `note`: how to read it."""

    name: str
    title: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class XY(_Chart):
    """Curves with bands, points with intervals, and horizontal levels; or stacked shares."""

    x: Metric
    y: Metric
    lines: Sequence[Series] = ()
    points: Sequence[Series] = ()
    levels: Mapping[str, float] = field(default_factory=dict)  # name → height of a horizontal line
    from_zero: bool = False  # the y axis begins at 0
    stacked: bool = False  # the lines have the same x and are stacked

    def __bool__(self) -> bool:
        return bool(self.lines or self.points)

    def draw(self) -> Figure:
        figure, axes = _figure()
        if self.stacked:
            paths = [line.path for line in self.lines]
            axes.stackplot(paths[0][0], [y for _, y in paths], labels=[label(line.name) for line in self.lines],
                           colors=[_shade(line.color) for line in self.lines], linewidth=0,
                           step="pre" if self.lines[0].stepped else None)  # fmt: skip
            axes.set_ylim(0, 1)
            axes.grid(False)
        else:
            self._draw_curves(axes)
        named = [points for points in self.points if points.labels]
        axes.set_xmargin(0.12 if named else 0.0 if self.stacked else 0.02)
        if named:
            axes.set_ymargin(0.12)
        _measure(axes.xaxis, self.x)
        _measure(axes.yaxis, self.y)
        axes.tick_params(labelsize=9)
        _legend(figure, axes, least=1 if self.stacked else 2)
        if named:
            _name_points(figure, axes, named)
        return figure

    def _draw_curves(self, axes: Axes) -> None:
        for line in self.lines:
            shade, (x, y) = _shade(line.color), line.path
            if line.low is not None and line.high is not None:
                axes.fill_between(x, line.low, line.high, color=shade, alpha=BAND, linewidth=0)
            axes.plot(x, y, label=label(line.name), color=shade, linewidth=1.7,
                      linestyle=(0, (4, 2)) if line.dashed else "-",
                      drawstyle="steps-pre" if line.stepped else "default")  # fmt: skip
        for points, marker in zip(self.points, MARKERS, strict=False):
            axes.plot(points.x, points.y, marker, label=label(points.name), color=_shade(points.color), markersize=5.5)
            if points.low is not None and points.high is not None:
                axes.vlines(points.x, points.low, points.high, color=_shade(points.color), linewidth=1.3)
        for text, level in self.levels.items():
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.text(0.01, level, label(text), transform=axes.get_yaxis_transform(), va="bottom", fontsize=8.5,
                      color=MUTED)  # fmt: skip
        if self.from_zero:
            top = max((float(np.nanmax(line.y)) for line in self.lines), default=1.0)
            axes.set_ylim(0, 1.1 * (top or 1.0))  # 1.0 if all values are 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(_Chart):
    """Names below each other with horizontal bars from zero, or with dots if a bar from zero has no meaning."""

    value: Metric
    rows: Sequence[Row]
    bars: bool = True
    levels: Mapping[str, float] = field(default_factory=dict)  # name → place of a vertical line

    def __bool__(self) -> bool:
        return any(row.numbers for row in self.rows)

    @classmethod
    def of(
        cls, name: str, metric: Metric, values: Sequence[tuple[str, Estimate, int]], note: str = "", **more: Any
    ) -> Rows:
        """A chart of `metric` from (name, value, colour) of each row. `note` is shown if there are intervals."""
        rows = [Row(name=n, value=v.value, bounds=v.bounds, color=c, text=metric.text(v)) for n, v, c in values]
        note = note if any(row.bounds for row in rows) else ""
        return cls(name=name, title=metric.heading, value=metric, rows=rows, note=note, **more)

    def draw(self) -> Figure:
        figure, axes = _row_figure([row.name for row in self.rows])
        for place, row in enumerate(self.rows):
            _draw_row(axes, row, place, self.bars)
        _draw_uprights(axes, self.levels)
        ends = [*self.levels.values(), *(end for row in self.rows for end in row.numbers)] + [0.0] * self.bars
        low, high = min(ends), max(ends)
        width = (high - low) or 1.0
        written = max(len(label(row.text)) for row in self.rows)
        axes.set_xlim(low - (0 if self.bars and low >= 0 else 0.06 * width), high + width * (0.05 + 0.021 * written))
        _measure(axes.xaxis, self.value)
        return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Split(_Chart):
    """A bar of 100 % for each name, split into parts. Shares of at least 6 % are written inside."""

    value: Metric
    names: Sequence[str]
    parts: Mapping[str, tuple[int, Floats]]  # part → (colour, share of the part in each bar)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def draw(self) -> Figure:
        figure, axes = _row_figure(self.names, 0.25 if len(self.parts) > 1 else 0.0)
        left = np.zeros(len(self.names))
        for name, (color, shares) in self.parts.items():
            bars = axes.barh(range(len(self.names)), shares, left=left, height=0.62, linewidth=0, color=_shade(color),
                             label=label(name))  # fmt: skip
            texts = [percent(share, 0) if share >= 0.06 else "" for share in shares.tolist()]
            axes.bar_label(bars, texts, label_type="center", fontsize=8.5, color=PAPER, fontweight="bold")
            left = left + shares
        axes.set_xlim(0, 1)
        _measure(axes.xaxis, self.value)
        _legend(figure, axes, least=1)
        return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Heat(_Chart):
    """A heat map: a value for each pair of settings; NaN: no value."""

    x_label: str
    y_label: str
    x_values: Sequence[str]
    y_values: Sequence[str]
    values: Floats  # (rows of y, columns of x)
    metric: Metric
    color: int = 0

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.values).any())

    def draw(self) -> Figure:
        from matplotlib.patches import Rectangle

        rows, columns = self.values.shape
        figure, axes = _figure(0.9 + 0.42 * max(2, rows))
        low, high = float(np.nanmin(self.values)), float(np.nanmax(self.values))
        for (row, column), value in np.ndenumerate(self.values):
            field = Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, linewidth=0, facecolor=FAINT)
            if np.isfinite(value):
                field.set(facecolor=_shade(self.color), alpha=0.06 + 0.5 * (value - low) / ((high - low) or 1.0))
            axes.add_patch(field)
            best = np.isfinite(self.values).sum() > 1 and value == high > low
            axes.text(column, row, self.metric.form(value), ha="center", va="center", fontsize=10,
                      fontweight="bold" if best else "normal")  # fmt: skip
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        axes.set(xlabel=label(self.x_label), ylabel=label(self.y_label))
        axes.set_xticks(range(columns), [label(value) for value in self.x_values])
        axes.set_yticks(range(rows), [label(value) for value in self.y_values])
        axes.tick_params(length=0, labelcolor=INK)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        return figure


Chart = XY | Rows | Split | Heat  # each has `draw`, which makes a figure without title; page and PNG add it


# --- drawing that all kinds of charts share


def _figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    return figure, figure.add_subplot()


def _row_figure(names: Sequence[str], legend: float = 0.0) -> tuple[Figure, Axes]:
    """A figure with names below each other; `legend`: inches above them for a legend."""
    figure, axes = _figure(0.75 + 0.31 * max(2, len(names)) + legend)
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axes: Axes, least: int = 2) -> None:
    """Draw a legend above the axes, with as many columns as fit, if there are at least `least` names."""
    entries = {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True) if name != NOTHING}
    if len(entries) >= least:
        width = max(map(len, entries)) * LEGEND_CHARACTER + 0.4
        columns = max(1, min(len(entries), int(WIDTH / width)))
        figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=columns, fontsize=9)


def _measure(axis: Axis, metric: Metric) -> None:
    """Set the title of an axis and ticks at round numbers, in a unit that fits the drawn values."""
    from matplotlib.ticker import MaxNLocator

    title, unit = one_line(metric.title), 1.0
    if metric.form is seconds:
        largest = max(map(abs, axis.get_data_interval()))
        name, unit = next((name, unit) for most, name, unit in TIME_UNITS if largest < most)
        title = f"{title} ({name})"
    low, high = sorted(axis.get_view_interval())
    ticks = unit * np.asarray(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low / unit, high / unit))
    slack = 1e-9 * (high - low)
    ticks = ticks[(ticks >= low - slack) & (ticks <= high + slack)]
    shown, sign = (100 * ticks, " %") if metric.form is percent else (ticks / unit, "")
    axis.set_ticks(ticks, [compact(round(value, 8)) + sign for value in shown.tolist()])
    axis.set_label_text(title)


def _name_points(figure: Figure, axes: Axes, groups: Sequence[Series]) -> None:
    """Write names beside their points, each at the place where it covers the fewest points, intervals and earlier
    names. A place outside the frame is as bad as three covered points.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # this computes the positions on the paper
    inch, to_paper = figure.dpi, axes.transData.transform
    taken = [Bbox([to_paper(each)] * 2).padded(0.05 * inch) for g in groups for each in zip(g.x, g.y, strict=True)]
    for group in groups:
        if group.low is not None and group.high is not None:
            ends = zip(group.x, group.low, group.high, strict=True)
            taken += [Bbox([to_paper((x, low)), to_paper((x, up))]).padded(0.03 * inch, 0) for x, low, up in ends]
    for x, y, text in (each for g in groups for each in zip(g.x, g.y, g.labels, strict=True)):
        note = axes.annotate(label(text), (x, y), (0, 0), textcoords="offset points", fontsize=8.5, color=MUTED)
        note.set_in_layout(False)
        costs = []
        for place in PLACES:
            box = _moved(note, place)
            inside = axes.bbox.count_contains(box.corners()) == 4
            costs.append(box.count_overlaps(taken) + (0 if inside else 3))
        taken.append(_moved(note, PLACES[int(np.argmin(costs))]))


def _moved(note: Annotation, place: tuple[int, int]) -> Bbox:
    """Move the name to one of the `PLACES`; returns the area that it covers."""
    right, up = place
    note.set(
        position=(GAP * right, GAP * up), ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up]
    )
    return note.get_window_extent()


def _draw_uprights(axes: Axes, levels: Mapping[str, float]) -> None:
    """Draw dashed vertical lines. If there are two, their names are on the outer sides."""
    for text, level in levels.items():
        axes.axvline(level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        first = level == min(levels.values())
        side, gap = ("center", 0) if len(levels) < 2 else ("right", 3) if first else ("left", -3)
        axes.annotate(label(text), (level, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(gap, 3),
                      textcoords="offset points", ha=side, va="bottom", fontsize=8.5, color=MUTED)  # fmt: skip


def _draw_row(axes: Axes, row: Row, place: int, bars: bool) -> None:
    shade = _shade(row.color)
    if row.value is not None and bars:
        axes.barh(place, row.value, height=0.6, color=shade, linewidth=0)
    if row.bounds is not None:
        axes.hlines(place, *row.bounds, color=INK if bars else shade, linewidth=1.3 if bars else 2)
    if row.dots:
        spread = [place + 0.13 * (index % 3 - 1) for index in range(len(row.dots))]  # spreads equal values
        axes.plot(row.dots, spread, "o", color=shade, markersize=5, alpha=0.85, markeredgewidth=0)
    if row.value is not None and not bars:
        mark, shade, length, edge = ("|", INK, 14, 2) if row.dots else ("o", shade, 7, 0)
        axes.plot([row.value], [place], mark, color=shade, markersize=length, markeredgewidth=edge)
    if row.text:
        right = max([*row.numbers, *([0.0] if bars else [])])
        text = axes.annotate(label(row.text), (right, place), xytext=(6, 0), textcoords="offset points", va="center")
        text.set(fontsize=9, color=MUTED, bbox={"facecolor": PAPER, "linewidth": 0, "pad": 1.5})
