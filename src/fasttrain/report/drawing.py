"""Charts → matplotlib figures, one function per kind. Imported late: matplotlib takes half a second to load.

The names of points are placed so that they cover neither each other nor other points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fasttrain.report.charts import (
    FAINT,
    INK,
    MUTED,
    PAPER,
    XY,
    Area,
    Axis,
    Chart,
    Floats,
    Heat,
    Level,
    Line,
    Points,
    Row,
    Rows,
    Split,
    color,
)
from fasttrain.report.words import clean, compact, label

Box = tuple[float, float, float, float]  # left, bottom, right, top; inches
CHARACTER, LINE = 0.072, 0.14  # inches of one character and of one line at 8.5 pt
GAP = 0.1  # between a point and its name


def place_labels(
    points: Sequence[tuple[float, float]], texts: Sequence[str], frame: Box, obstacles: Sequence[Box] = ()
) -> list[tuple[float, float]]:
    """Lower left corner of each name: of eight places around its point the one that covers least.

    Greedy, in the order given: put first what must be readable. Names may leave the frame only at a price.
    """
    taken: list[Box] = [*obstacles, *((x - 0.05, y - 0.05, x + 0.05, y + 0.05) for x, y in points)]
    corners: list[tuple[float, float]] = []
    for (x, y), text in zip(points, texts, strict=True):
        width = CHARACTER * len(text)
        right, left, middle = x + GAP, x - GAP - width, x - width / 2
        above, below, level = y + GAP, y - GAP - LINE, y - LINE / 2
        spots = [(right, level), (left, level), (right, above), (left, above), (right, below), (left, below),
                 (middle, above), (middle, below)]  # fmt: skip
        boxes = [(a, b, a + width, b + LINE) for a, b in spots]
        costs = [sum(_common(box, other) for other in taken) + 3 * _outside(box, frame) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        corners.append(spots[best])
    return corners


def _common(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _outside(box: Box, frame: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) - _common(box, frame)


WIDTH, HEIGHT = 6.0, 3.1  # inches: 432 pt, about what one of two columns has on a screen
BAND = 0.18  # opacity
MARKERS = "osD^vPX"
LEGEND_CHARACTER = 0.078  # inches that a legend's character takes, at most


def draw(chart: Chart) -> Figure:
    """The figure, without its title: the page and the PNG write it where they want it."""
    kinds: dict[type[Chart], Callable[[Any], Figure]] = {
        XY: draw_xy, Area: draw_area, Rows: draw_rows, Split: draw_split, Heat: draw_heat
    }  # fmt: skip
    return kinds[type(chart)](chart)


def _figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    return figure, figure.add_subplot()


def _legend(figure: Figure, entries: Sequence[tuple[Artist, str]], least: int = 2) -> None:
    """Above the axes, where it covers no data; as many columns as fit. Fewer than `least` entries need none."""
    if len(entries) < least:
        return
    names = [label(name) for _, name in entries]
    width = max(len(name) for name in names) * LEGEND_CHARACTER + 0.4
    columns = max(1, min(len(names), int(WIDTH / width)))
    figure.legend([handle for handle, _ in entries], names, loc="outside upper left", ncols=columns, fontsize=9)


def _scale_of(axis: Axis, largest: float) -> tuple[float, str]:
    """What to divide by, and the axis's title with its unit."""
    if axis.kind != "seconds":
        return 1.0, clean(axis.label)
    unit, divisor = next((u, d) for u, d, most in TIME_UNITS if largest < most)
    return divisor, f"{clean(axis.label)} ({unit})"


TIME_UNITS = (("s", 1.0, 180.0), ("min", 60.0, 10_800.0), ("h", 3600.0, float("inf")))


def _ticks(along: Any, axis: Axis, count: int = 5) -> None:
    along.set_major_locator(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]))
    if axis.kind == "share":
        along.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 8):.4g} %".replace("-", "−")))
    else:
        along.set_major_formatter(FuncFormatter(lambda value, _: compact(round(value, 10))))


def _frame(axes: Axes, x: Axis, y: Axis) -> None:
    axes.set_xlabel(x.label)
    axes.set_ylabel(clean(y.label))
    _ticks(axes.xaxis, x)
    _ticks(axes.yaxis, y)
    axes.tick_params(labelsize=9)
    axes.margins(x=0.02)


def draw_xy(chart: XY) -> Figure:
    """Curves with bands, points with intervals, levels with their names."""
    figure, axes = _figure()
    ends = [float(np.max(x)) for x in (*(s.x for s in chart.lines), *(s.x for s in chart.points)) if len(x)]
    divisor, x_label = _scale_of(chart.x, max(ends, default=0.0))
    entries: list[tuple[Artist, str]] = [(_draw_line(axes, line, divisor), line.name) for line in chart.lines]
    for index, points in enumerate(chart.points):
        entries.append((_draw_points(axes, points, divisor, MARKERS[index % len(MARKERS)]), points.name))
    for level in chart.levels:
        axes.axhline(level.value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        where = axes.get_yaxis_transform()
        axes.text(0.01, level.value, label(level.label), transform=where, va="bottom", fontsize=8.5, color=MUTED)
    if chart.from_zero:  # the range would begin where it ends were all values 0
        top = max((float(np.nanmax(line.y)) for line in chart.lines), default=1.0)
        axes.set_ylim(0, 1.1 * (top or 1.0))
    _frame(axes, Axis(x_label, chart.x.kind), chart.y)
    if any(points.labels for points in chart.points):
        _draw_labels(axes, chart.points, divisor)
    _legend(figure, [entry for entry in entries if entry[1]])
    return figure


def _draw_line(axes: Axes, line: Line, divisor: float) -> Artist:
    shade, step = color(line.color), "pre" if line.stepped else None
    x = line.x / divisor
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=shade, alpha=BAND, linewidth=0, step=step)  # type: ignore[arg-type]
    drawn = axes.plot(
        x,
        line.y,
        color=shade,
        linewidth=1.7,
        linestyle=(0, (4, 2)) if line.dashed else "-",
        drawstyle="steps-pre" if line.stepped else "default",
    )
    return drawn[0]


def _draw_points(axes: Axes, points: Points, divisor: float, marker: str) -> Artist:
    shade, x = color(points.color), points.x / divisor
    if points.low is not None and points.high is not None:
        axes.vlines(x, points.low, points.high, color=shade, linewidth=1.3)
    face = PAPER if points.hollow else shade
    drawn = axes.plot(x, points.y, marker, color=shade, markerfacecolor=face, markersize=5.5, linestyle="none")
    return drawn[0]


def _draw_labels(axes: Axes, groups: Sequence[Points], divisor: float) -> None:
    """Names beside their points and their intervals, in a frame wide enough for them."""
    axes.margins(x=0.12, y=0.12)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    wide, high = WIDTH - 0.9, HEIGHT - 0.9  # about what the axes will have, in inches

    def inches(x: float, y: float) -> tuple[float, float]:
        return (x / divisor - left) / (right - left) * wide, (y - bottom) / (top - bottom) * high

    points, texts, bars = [], [], []
    for group in groups:
        for index, text in enumerate(group.labels):
            x, y = float(group.x[index]), float(group.y[index])
            points.append((x, y))
            texts.append(label(text))
            if group.low is not None and group.high is not None:
                (at, low), (_, up) = inches(x, float(group.low[index])), inches(x, float(group.high[index]))
                bars.append((at - 0.03, low, at + 0.03, up))
    spots = [inches(x, y) for x, y in points]
    corners = place_labels(spots, texts, (0.0, 0.0, wide, high), bars)
    for (x, y), text, spot, corner in zip(points, texts, spots, corners, strict=True):
        offset = (72 * (corner[0] - spot[0]), 72 * (corner[1] - spot[1]))
        note = axes.annotate(text, (x / divisor, y), xytext=offset, textcoords="offset points", fontsize=8.5)
        note.set(color=MUTED, in_layout=False)


def draw_area(chart: Area) -> Figure:
    """Shares on top of each other; the legend reads like the stack, from the top."""
    figure, axes = _figure()
    divisor, x_label = _scale_of(chart.x, float(chart.at[-1]))
    at = chart.at / divisor
    lower = np.zeros(len(at))
    entries: list[tuple[Artist, str]] = []
    for part in chart.parts:
        upper = lower + part.values
        x, low, high = _as_steps(at, chart.start / divisor, lower, upper) if chart.stepped else (at, lower, upper)
        axes.fill_between(x, low, high, color=color(part.color), linewidth=0)
        entries.append((Patch(facecolor=color(part.color)), part.name))
        lower = upper
    _frame(axes, Axis(x_label, chart.x.kind), chart.y)
    axes.set_ylim(0, 1)
    axes.set_xlim(chart.start / divisor if chart.stepped else at[0], at[-1])
    axes.grid(False)
    _legend(figure, entries, least=1)
    return figure


def _as_steps(at: Floats, start: float, lower: Floats, upper: Floats) -> tuple[Floats, Floats, Floats]:
    """Each value from the x before it to its own."""
    x = np.repeat(np.concatenate([[start], at]), 2)[1:-1]
    return x, np.repeat(lower, 2), np.repeat(upper, 2)


def _row_axes(count: int, entries: int, names: Sequence[str]) -> tuple[Figure, Axes]:
    figure, axes = _figure(0.75 + 0.31 * max(2, count) + (0.25 if entries > 1 else 0.0))
    axes.set_yticks(range(count), [label(name) for name in names])
    axes.set_ylim(count - 0.45, -0.55)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    return figure, axes


def draw_rows(chart: Rows) -> Figure:
    """Bars from zero or dots, with whiskers, single observations and the value as text."""
    figure, axes = _row_axes(len(chart.rows), 0, [row.name for row in chart.rows])
    ends = [b for r in chart.rows for b in (r.value, r.low, r.high, *r.dots) if b is not None]
    divisor, x_label = _scale_of(chart.value, max(map(abs, ends), default=0.0))
    for place, row in enumerate(chart.rows):
        _draw_row(axes, row, place, divisor, chart.bars)
    _draw_upright(axes, chart.levels, divisor)
    axes.set_xlabel(x_label)
    _ticks(axes.xaxis, chart.value)
    low, high = min([*ends, *([0.0] if chart.bars else [])]), max([*ends, *([0.0] if chart.bars else [])])
    marks = [level.value for level in chart.levels]
    low, high = min([low, *marks]) / divisor, max([high, *marks]) / divisor
    width = (high - low) or 1.0
    written = max((len(label(row.text)) for row in chart.rows), default=0)
    axes.set_xlim(low - (0 if chart.bars and low >= 0 else 0.06 * width), high + width * (0.05 + 0.021 * written))
    return figure


def _draw_upright(axes: Axes, levels: Sequence[Level], divisor: float) -> None:
    """Dashed lines, the names of two turned away from each other: they may lie close together."""
    places = sorted(level.value for level in levels)
    for level in levels:
        axes.axvline(level.value / divisor, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        side = "center" if len(places) < 2 else "right" if level.value == places[0] else "left"
        where, spot = axes.get_xaxis_transform(), (level.value / divisor, 1.0)
        axes.annotate(label(level.label), spot, xycoords=where, xytext=({"right": 3, "left": -3}.get(side, 0), 3),
                      textcoords="offset points", ha=side, va="bottom", fontsize=8.5, color=MUTED)  # fmt: skip


def _draw_row(axes: Axes, row: Row, place: int, divisor: float, bars: bool) -> None:
    shade = color(row.color)
    bounds = [bound / divisor for bound in (row.low, row.high) if bound is not None]
    dots = [dot / divisor for dot in row.dots]
    if row.value is not None and bars:
        axes.barh(place, row.value / divisor, height=0.6, color=shade, linewidth=0)
    if len(bounds) == 2:
        axes.hlines(place, bounds[0], bounds[1], color=INK if bars else shade, linewidth=1.3 if bars else 2)
    if dots:
        spread = [place + 0.13 * (index % 3 - 1) for index in range(len(dots))]  # equal ones would cover each other
        axes.plot(dots, spread, "o", color=shade, markersize=5, alpha=0.85, markeredgewidth=0)
    if row.value is not None and not bars:
        mark = "|" if dots else "o"
        axes.plot([row.value / divisor], [place], mark, color=INK if dots else shade, markersize=14 if dots else 7,
                  markeredgewidth=2 if dots else 0)  # fmt: skip
    if row.text:
        right = max([*bounds, *dots, *([] if row.value is None else [row.value / divisor]), *([0.0] if bars else [])])
        text = axes.annotate(label(row.text), (right, place), xytext=(6, 0), textcoords="offset points", va="center")
        text.set(fontsize=9, color=MUTED, bbox={"facecolor": PAPER, "linewidth": 0, "pad": 1.5})  # over a level's line


def draw_split(chart: Split) -> Figure:
    """A bar of 100 % per name; shares from 6 % on are written inside."""
    figure, axes = _row_axes(len(chart.names), len(chart.parts), chart.names)
    left = np.zeros(len(chart.names))
    entries: list[tuple[Artist, str]] = []
    for part in chart.parts:
        axes.barh(range(len(chart.names)), part.values, left=left, height=0.62, color=color(part.color), linewidth=0)
        entries.append((Patch(facecolor=color(part.color)), part.name))
        for place, share in enumerate(part.values.tolist()):
            if share >= 0.06:
                axes.text(float(left[place]) + share / 2, place, f"{100 * share:.0f} %", ha="center", va="center",
                          fontsize=8.5, color=PAPER, fontweight="bold")  # fmt: skip
        left = left + part.values
    axes.set_xlim(0, 1)
    _ticks(axes.xaxis, Axis("", "share"))
    axes.set_xlabel("share of episodes")
    _legend(figure, entries, least=1)
    return figure


def draw_heat(chart: Heat) -> Figure:
    """Fields that are the fuller coloured, the larger the value; its text in each, readable on any of them."""
    rows, columns = chart.values.shape
    figure, axes = _figure(0.9 + 0.42 * max(2, rows))
    known = chart.values[np.isfinite(chart.values)]
    low, span = (float(known.min()), float(np.ptp(known)) or 1.0) if len(known) else (0.0, 1.0)
    for row in range(rows):
        for column in range(columns):
            value = float(chart.values[row, column])
            opacity = 0.0 if np.isnan(value) else 0.06 + 0.5 * (value - low) / span
            field = partial(Rectangle, (column - 0.47, row - 0.45), 0.94, 0.9, linewidth=0)
            axes.add_patch(field(facecolor=color(chart.color), alpha=opacity) if opacity else field(facecolor=FAINT))
            best = len(known) > 1 and value == low + span
            axes.text(column, row, label(chart.texts[row][column]), ha="center", va="center", fontsize=10,
                      fontweight="bold" if best else "normal")  # fmt: skip
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xticks(range(columns), [label(value) for value in chart.x_values])
    axes.set_yticks(range(rows), [label(value) for value in chart.y_values])
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_xlabel(label(chart.x_label))
    axes.set_ylabel(label(chart.y_label))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure
