"""The report of a sweep: every combination of settings, its speed and its quality."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.report.charts import GREY, XY, Axis, Chart, Heat, Line, Points, Row, Rows
from fasttrain.report.curves import mean_interval, pareto_front
from fasttrain.report.metrics import METRICS, Found, Metric, link_to, quality_of
from fasttrain.report.page import Banner, Cell, Page, Section, Table, Tile
from fasttrain.report.words import as_mapping, as_number, as_rows, clean, number, percent, seconds, times
from fasttrain.saving.files import read_json
from fasttrain.spec.overrides import key_of

FILE = "sweep.json"
MOST_BARS = 40
TONES: dict[str, Any] = {"done": "", "illegal": "open", "stopped": "open", "failed": "bad"}


@dataclass(slots=True)
class Setting:
    """Cells that differ in nothing but the seed."""

    values: tuple[str, ...]
    name: str
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def speed(self) -> Found:
        return _over_cells([Found(as_number(cell.get("steps_per_s"))) for cell in self.cells])

    def quality(self, metric: str) -> Found:
        return _over_cells([quality_of(as_mapping(cell.get("summary")), metric) for cell in self.cells])


def _over_cells(values: Sequence[Found]) -> Found:
    """One cell's own interval, or that of the mean over several seeds."""
    known = [each for each in values if each.value is not None]
    if len(known) < 2:
        return known[0] if known else Found(None)
    return Found(*mean_interval([float(each.value or 0.0) for each in known]))


def sweep_page(folder: Path) -> Page:
    """What there is to say of the sweep in `folder`."""
    stored = read_json(folder / FILE)
    cells = as_rows(stored.get("cells"))
    swept = [clean(key) for key in stored.get("swept") or [] if isinstance(key, str)]
    keys = [key for key in swept if key != "seed"] or swept
    settings = settings_of(cells, keys)
    metric = quality_metric(cells)
    sections = [
        Section("Speed and quality", charts=_charts(settings, keys, metric)),
        Section("Cells", tables=[_table(folder, cells, swept, str(stored.get("speed_up_against") or "-"))]),
    ]
    return Page(
        kind="Sweep",
        title=" × ".join(keys) if keys else "One cell",
        facts=_facts(folder, cells, swept),
        banners=_banners(cells),
        tiles=_tiles(cells, settings, metric),
        sections=[section for section in sections if section],
    )


def settings_of(cells: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Setting]:
    """Cells by their values of `keys`, in the order in which they ran."""
    settings: dict[tuple[str, ...], Setting] = {}
    for cell in cells:
        typed = _typed(cell)
        values = tuple(typed.get(key, "-") for key in keys)
        name = " ".join(f"{key.split('.')[-1]}={value}" for key, value in zip(keys, values, strict=True))
        settings.setdefault(values, Setting(values, name or f"cell {cell.get('cell')}")).cells.append(dict(cell))
    return list(settings.values())


def _typed(cell: Mapping[str, Any]) -> dict[str, str]:
    overrides = cell.get("overrides")
    texts = [str(text) for text in overrides] if isinstance(overrides, list) else []
    return {key_of(text): text.partition("=")[2] for text in texts}


def quality_metric(cells: Sequence[Mapping[str, Any]]) -> str:
    """`win_rate` where every finished cell has one, else `mean_reward`."""
    summaries = [as_mapping(cell.get("summary")) for cell in cells]
    done = [summary for summary in summaries if as_number(summary.get("steps_per_s"))]
    return "win_rate" if done and all(quality_of(s, "win_rate").value is not None for s in done) else "mean_reward"


def _facts(folder: Path, cells: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> list[tuple[str, str]]:
    same = [text for text in cells[0].get("overrides") or [] if key_of(str(text)) not in swept] if cells else []
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / FILE).stat().st_mtime))
    shared = " ".join(str(text) for text in same)
    return [*([("all cells", shared)] if shared else []), ("date", date), ("folder", folder.resolve().name)]


def _banners(cells: Sequence[Mapping[str, Any]]) -> list[Banner]:
    if not cells:
        return [Banner("Nothing to show", "sweep.json has no cells that can be read", "bad")]
    count = {status: sum(cell.get("status") == status for cell in cells) for status in ("failed", "illegal", "stopped")}
    return [
        Banner(f"{number} of {len(cells)} cells {status}", "the reasons stand in the table", TONES[status])
        for status, number in count.items()
        if number
    ]


def _tiles(cells: Sequence[Mapping[str, Any]], settings: Sequence[Setting], metric: str) -> list[Tile]:
    done = sum(cell.get("status") == "done" for cell in cells)
    tiles = [Tile("Cells", number(len(cells)), f"{done} done")]
    fast = [each for each in settings if each.speed.value is not None]
    good = [each for each in settings if each.quality(metric).value is not None]
    if fast:
        best = max(fast, key=lambda each: each.speed.value or 0.0)
        tiles.append(Tile("Most env steps/s", number(best.speed.value), best.name))
    if good:
        best = max(good, key=lambda each: each.quality(metric).value or 0.0)
        known = METRICS[metric]
        tiles.append(Tile(f"Best {known.title}", known.form(best.quality(metric).value), best.name))
    return tiles


def _charts(settings: Sequence[Setting], keys: Sequence[str], metric: str) -> list[Chart]:
    speed = [each.speed for each in settings]
    quality = [each.quality(metric) for each in settings]
    charts: list[Chart | None] = []
    if len(keys) == 2:
        charts += [_heat(settings, keys, speed, "steps_per_s", 0), _heat(settings, keys, quality, metric, 2)]
    elif len(settings) <= MOST_BARS:
        names = [each.name for each in settings]
        charts += [_rows(names, speed, "steps_per_s", 0, True), _rows(names, quality, metric, 2, False)]
    labels = [" · ".join(each.values) or each.name for each in settings]
    charts.append(pareto_chart(labels, speed, quality, METRICS[metric], " · ".join(keys)))
    return [chart for chart in charts if chart is not None]


def _heat(
    settings: Sequence[Setting], keys: Sequence[str], values: Sequence[Found], metric: str, color: int
) -> Chart | None:
    if all(value.value is None for value in values):
        return None
    known = METRICS[metric]
    down, across = (_ordered([each.values[place] for each in settings]) for place in (0, 1))
    grid = np.full((len(down), len(across)), np.nan)
    texts = [["–"] * len(across) for _ in down]
    for setting, found in zip(settings, values, strict=True):
        row, column = down.index(setting.values[0]), across.index(setting.values[1])
        if found.value is not None:
            grid[row, column] = found.value
            texts[row][column] = known.form(found.value)
    title = known.title[0].upper() + known.title[1:]
    return Heat(name=f"heat_{metric}", title=f"{title} by {keys[0]} and {keys[1]}", note="the best one in bold",
                x_label=keys[1], y_label=keys[0], x_values=tuple(across), y_values=tuple(down), values=grid,
                texts=tuple(tuple(row) for row in texts), color=color)  # fmt: skip


def _ordered(values: Sequence[str]) -> list[str]:
    """Each once: numbers by size, else as they came."""
    once = list(dict.fromkeys(values))
    numbers = [as_number(value) for value in once]
    if any(value is None for value in numbers):
        return once
    return sorted(once, key=lambda value: as_number(value) or 0.0)


def _rows(names: Sequence[str], values: Sequence[Found], metric: str, color: int, bars: bool) -> Chart | None:
    known = METRICS[metric]
    rows: list[Row] = [
        found.row(name, known, color) for name, found in zip(names, values, strict=True) if found.value is not None
    ]
    if not rows:
        return None
    title = known.title[0].upper() + known.title[1:]
    note = "line: 95 % interval" if any(row.low is not None for row in rows) else ""
    return Rows(name=f"rows_{metric}", title=title, value=Axis(known.title, known.kind), rows=tuple(rows), bars=bars,
                note=note)  # fmt: skip


def pareto_chart(
    names: Sequence[str], speed: Sequence[Found], quality: Sequence[Found], metric: Metric, keys: str
) -> Chart | None:
    """Speed against quality; the front is what nothing else beats in both. `keys`: what the names are values of."""
    both = [i for i in range(len(names)) if speed[i].value is not None and quality[i].value is not None]
    if len(both) < 2:
        return None
    x = np.array([speed[i].value for i in both], dtype=np.float64)
    y = np.array([quality[i].value for i in both], dtype=np.float64)
    front = pareto_front(x.tolist(), y.tolist())
    bounds = [np.array([quality[i][side] for i in both], dtype=np.float64) for side in (1, 2)]  # NaN where unknown
    known = bool(np.isfinite(bounds).all())
    rest = [i for i in range(len(both)) if i not in front]
    points = tuple(
        Points(name=name, x=x[chosen], y=y[chosen], labels=tuple(names[both[i]] for i in chosen), color=color,
               low=bounds[0][chosen] if known else None, high=bounds[1][chosen] if known else None)
        for name, chosen, color in (("not beaten in both", front, 0), ("beaten in both", rest, GREY))
        if chosen
    )  # fmt: skip
    line = Line(name="", x=x[front], y=y[front], dashed=True)
    note = f"labels: {keys}" + ("; upright lines: 95 % intervals" if known else "")
    return XY(name="pareto", title=f"Speed against {metric.title}", x=Axis("env steps/s"),
              y=Axis(metric.title, metric.kind), lines=(line,), points=points, note=note)  # fmt: skip


def _table(folder: Path, cells: Sequence[Mapping[str, Any]], swept: Sequence[str], against: str) -> Table:
    names = [">cell", *swept, "status", ">steps/s", ">speed-up", ">mean reward", ">win rate", ">updates per step",
             ">training time", ">start-up", "error"]  # fmt: skip
    rows: list[list[Cell | str]] = []
    for cell in cells:
        typed, summary, status = _typed(cell), as_mapping(cell.get("summary")), str(cell.get("status", ""))
        place = folder / Path(str(cell.get("folder") or "")).name
        rows.append([
            Cell(str(cell.get("cell", "")), link=link_to(place, folder)),
            *(typed.get(key, "") for key in swept),
            Cell(status, tone=TONES.get(status, "")),
            number(cell.get("steps_per_s")),
            times(cell.get("speed_up")),
            quality_of(summary, "mean_reward").cell(Metric("", number)),
            quality_of(summary, "win_rate").cell(Metric("", percent)),
            number(cell.get("update_ratio")),
            seconds(cell.get("wall_s")),
            seconds(cell.get("startup_s")),
            str(cell.get("error") or ""),
        ])  # fmt: skip
    note = f"Speed-up against {against}. In brackets: 95 % intervals of the final evaluation."
    return Table(names, rows, note=note, optional=("error",))
