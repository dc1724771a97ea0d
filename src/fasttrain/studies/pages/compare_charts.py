"""The charts of a comparison, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.runs.files import read_json
from fasttrain.runs.quality_keys import WIN_KEYS
from fasttrain.studies.pages.charts import XY, Axis, Chart, Level, Line, Row, Rows, color_of
from fasttrain.studies.pages.curves import Curve, across_seeds, mean_interval, spread_curve
from fasttrain.studies.pages.episodes import Episodes, read_episodes
from fasttrain.studies.pages.metrics import Form, Found, found, metric_of, quality_of
from fasttrain.studies.pages.run_charts import OVER, OVER_WORDS
from fasttrain.studies.pages.words import NOTHING, interval, number, percent

NEVER = "time_to_"  # of these an open value says that it never came about
# 30 cells of a native game would be half a gigabyte; 32 blocks of each are 2 MB and still 30,000 episodes.
CELL_BYTES, CELL_BLOCKS = 2_000_000, 32
BINS = 40  # of a seed's curve: fewer than in a run's own report, because the band over seeds shows the noise


def signed(value: float | None, is_rate: bool) -> str:
    """`+1.2` of a difference; of win rates in percentage points."""
    if value is None:
        return NOTHING
    value = round(100 * value if is_rate else value, 9)  # what is left of two equal means is no difference
    text = f"{value:.1f}".replace("-", "−") if is_rate else number(value)
    return f"+{text}" if value > 0 else text


def difference_text(change: Found, is_rate: bool) -> str:
    """`+1.2 [−0.8, +3.1] points`."""
    bounds = interval(change.low, change.high, lambda value: signed(value, is_rate))
    return " ".join(part for part in (signed(change.value, is_rate), bounds, "points" if is_rate else "") if part)


def margin_text(margin: float | None, is_rate: bool) -> str:
    """`3 points`."""
    if margin is None:
        return NOTHING
    return f"{number(100 * margin)} points" if is_rate else number(margin)


def interval_text(value: Found, form: Form) -> str:
    """`[2.1, 2.4]`; empty where there is none."""
    return interval(value.low, value.high, form)


def difference_chart(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], is_rate: bool, margin: float | None
) -> Chart | None:
    """Paired differences to the baseline beside zero and the margin."""
    scale = 100.0 if is_rate else 1.0
    shown = []
    for row in rows:
        change, name = found(row.get("difference")), str(row.get("name"))
        if change.value is not None:
            values = [None if bound is None else scale * bound for bound in change]
            both = change.low is not None and change.high is not None
            shown.append(Row(name=name, value=values[0], low=values[1] if both else None,
                             high=values[2] if both else None, color=_color(name, names),
                             text=difference_text(change, is_rate).removesuffix(" points")))  # fmt: skip
    if not shown:
        return None
    levels = [Level(0.0, "equal")]
    if margin:
        levels.append(Level(-scale * margin, f"margin −{number(scale * margin)}"))
    unit = "percentage points" if is_rate else "in units of the reward"
    return Rows(name="differences", title="Difference to the baseline, by paired seeds", rows=tuple(shown), bars=False,
                value=Axis(f"candidate − baseline, {unit}"), levels=tuple(levels),
                note="lines: 95 % intervals; to the right of the margin is no worse")  # fmt: skip


def seeds_chart(folders: Mapping[str, Sequence[Path]], metric: str, is_rate: bool) -> Chart | None:
    """Final quality, a dot per seed."""
    known, rows = metric_of(metric), []
    form: Form = percent if is_rate else number
    for place, (name, cells) in enumerate(folders.items()):
        values = [value for cell in cells if (value := _final(cell, metric, is_rate)) is not None]
        if values:
            mean = mean_interval(values)[0]
            rows.append(Row(name=name, value=mean, dots=tuple(values), color=color_of(place), text=form(mean)))
    if not rows:
        return None
    return Rows(name="seeds", title=f"{_capital(known.title)}, a dot per seed", rows=tuple(rows), bars=False,
                value=Axis(known.title, "share" if is_rate else known.kind), note="upright line: mean")  # fmt: skip


def _final(cell: Path, metric: str, is_rate: bool) -> float | None:
    if metric != "tail":
        return quality_of(read_json(cell / "summary.json"), metric).value
    episodes = _episodes(cell)
    steps, values = episodes.column(("env_steps",)), episodes.column(WIN_KEYS if is_rate else ("return",))
    if steps is None or values is None:
        return None
    last = values[steps > 0.8 * steps.max()]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def figure_chart(rows: Sequence[Mapping[str, Any]], names: Sequence[str], key: str) -> Chart | None:
    """One figure of all candidates with its intervals."""
    metric = metric_of(key)
    values = [(str(row.get("name")), row.get(key)) for row in rows if row.get(key) is not None]
    rated = [(name, found(value)._replace(never=key.startswith(NEVER))) for name, value in values]
    if all(value.value is None for _, value in rated):
        return None
    shown = tuple(value.row(name, metric, _color(name, names)) for name, value in rated)
    note = "lines: 95 % intervals over seeds" if any(row.low is not None for row in shown) else ""
    return Rows(name=key, title=_capital(metric.title), rows=shown, bars=key != "elo", note=note,
                value=Axis(metric.title.removesuffix(" of the learner"), metric.kind))  # fmt: skip


def curve_charts(folders: Mapping[str, Sequence[Path]], by_wins: bool, threshold: float | None) -> list[Chart]:
    """Win rate and return of training episodes over env steps and over time, mean and interval over seeds."""
    runs = {name: [_episodes(cell) for cell in cells] for name, cells in folders.items()}
    wins = [_curve_chart(runs, over, "Win rate", threshold if by_wins else None) for over in OVER]
    returns = [_curve_chart(runs, over, "Return per episode", None if by_wins else threshold) for over in OVER]
    charts = [*wins, *returns] if by_wins else [*returns, *wins]
    return [chart for chart in charts if chart is not None]


def _curve_chart(
    runs: Mapping[str, Sequence[Episodes]], over: tuple[str, Axis, str], title: str, threshold: float | None
) -> Chart | None:
    is_rate, (key, axis, x), lines = title == "Win rate", over, []
    for place, (name, episodes) in enumerate(runs.items()):
        curves = [_curve(each, x, WIN_KEYS if is_rate else ("return",)) for each in episodes]
        if (mean := across_seeds([curve for curve in curves if curve is not None])) is not None:
            low, high = (np.clip(bound, 0, 1) if is_rate else bound for bound in (mean.low, mean.high))
            lines.append(Line(name=name, x=mean.x, y=mean.y, low=low, high=high, color=color_of(place)))
    if not lines:
        return None
    text = percent(threshold) if is_rate else number(threshold)
    return XY(name=f"{title.split()[0].lower()}_over_{key}", title=f"{title} over {OVER_WORDS[key]}", x=axis,
              y=Axis(title.lower(), "share" if is_rate else "number"), lines=tuple(lines),
              levels=() if threshold is None else (Level(threshold, f"threshold {text}"),),
              note="training episodes; band: 95 % interval over seeds")  # fmt: skip


def _curve(run: Episodes, x: str, names: Sequence[str]) -> Curve | None:
    at, values = run.column((x,)), run.column(names)
    if at is None or values is None:
        return None
    known = np.isfinite(at) & np.isfinite(values)
    return spread_curve(at[known], values[known], BINS) if known.any() else None


def _episodes(cell: Path) -> Episodes:
    return read_episodes(cell / "episodes.csv", CELL_BYTES, CELL_BLOCKS)


def _color(name: str, names: Sequence[str]) -> int:
    return color_of(list(names).index(name)) if name in names else 0


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
