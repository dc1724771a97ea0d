"""The reports of a sweep (combinations of settings), of `compare candidates=ablate`, of `tune` and of a population."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.saving.files import read_json
from fasttrain.spec.precedence import key_of
from fasttrain.terminal import one_line
from fasttrain_report.charts import GREY, XY, Chart, Heat, Rows, Series
from fasttrain_report.curves import pareto_front
from fasttrain_report.page import TONES, Banner, Cell, Page, Section, Table, Tile, cell_table, cells_tile, place_of
from fasttrain_report.values import Estimate, as_list, as_mapping, as_number, as_rows, over_seeds, quality_of
from fasttrain_report.words import METRICS, metric_of, number, seconds, times, value_text

SWEEP, STUDY = "sweep.json", "study.json"
INTERVALS = "lines: 95 % intervals"
MOST_BARS, MOST_ROWS = 40, 24
POPULATION = "population"  # `command` in the study.json of a population
DRAWN = (  # figures with a chart, the most important first
    "within", "added", "mean_reward", "win_rate", "reward_per_hour", "time_to_threshold_s", "steps_per_s",
    "update_ratio", "memory_bytes", "quality",
)  # fmt: skip
MOST_CHARTS = 4

# --- ablate, tune, population


def study_page(folder: Path) -> Page:
    """The page of the study in `folder`. Its rows are settings of `ablate`, trials of `tune`, or models."""
    stored = read_json(folder / STUDY)
    rows, cells, result = as_rows(stored.get("rows")), as_rows(stored.get("cells")), Estimate.of(stored.get("result"))
    command = one_line(stored.get("command") or "study")
    chosen = [(key, _plain(stored[key])) for key in ("kept", "best") if isinstance(stored.get(key), (list, dict))]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    body = [[_study_cell(key, row.get(key)) for key in keys] for row in rows]
    names = [f">{metric_of(key).title}" if key in METRICS else metric_of(key).title for key in keys]
    nothing = Banner("Nothing to show", "study.json has no rows that can be read", "open")
    return Page(
        kind="Study",
        title=command,
        facts=[*((key, text or "nothing") for key, text in chosen), *place_of(folder, STUDY)],
        command=" ".join(["fasttrain", command, *map(str, as_list(stored.get("arguments")))]),
        banners=[] if rows or cells else [nothing],
        tiles=[
            *([] if command == POPULATION else [_result_tile(stored, result)]),
            *([cells_tile(cells)] if cells else []),
        ],
        sections=[
            Section("Results", charts=_study_charts(rows), tables=[Table(names, body)]),
            Section("Exchanges", tables=[_exchange_table(as_rows(stored.get("exchanges")))]),
            Section("Cells", tables=[cell_table(folder, cells, "cell", "", folded=True)]),
        ],
    )


def _result_tile(stored: Mapping[str, Any], result: Estimate) -> Tile:
    if "difference" in as_mapping(stored.get("result")):
        return Tile("Result − profile", number(result.value), result.interval(number))
    return Tile("Result ÷ profile", times(result.value), result.interval(times))


def _exchange_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Which model of a population continued with the weights of which other model, and with which new settings."""
    body: list[list[Cell | str]] = [
        [number(as_number(row.get("env_steps"))), _plain(row.get("model")), number(as_number(row.get("value"))),
         _plain(row.get("source")), number(as_number(row.get("value_of_source"))), _plain(row.get("settings"))]
        for row in rows
    ]  # fmt: skip
    return Table([">env steps", "model", ">its result", "weights of", ">result there", "new settings"], body)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_plain(each) for each in value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_plain(each)}" for key, each in value.items()) or "the profile"
    return value_text(value)


def _study_cell(key: str, value: object) -> Cell:
    if key in METRICS:
        return Cell.of(Estimate.of(value), METRICS[key])
    text = ("keep" if value else "leave out") if key == "keep" and isinstance(value, bool) else _plain(value)
    return Cell(text, tone=TONES.get(text, ""))


def _study_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Bar charts of the first few figures that differ between rows."""
    charts: list[Chart] = []
    for key in DRAWN:
        shown = _shown(rows, key)
        if len({value.value for _, value in shown}) > 1 and len(charts) < MOST_CHARTS:
            levels = {"equal": 1.0} if METRICS[key].form is times else {}
            values = [(name, value, len(charts)) for name, value in shown]
            charts.append(Rows.of(f"figure_{len(charts) + 1}", METRICS[key], values, INTERVALS, levels=levels))
    return charts


def _shown(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, Estimate]]:
    """(name, figure `key`) of the first `MOST_ROWS` rows that have the figure."""
    named = [(_plain(row.get("name", row.get("point"))), Estimate.of(row.get(key))) for row in rows]
    return [each for each in named if each[1].value is not None][:MOST_ROWS]


# --- sweeps


@dataclass(slots=True)
class Setting:
    """The trainings (`cells`) of a sweep that differ only in the seed."""

    values: tuple[str, ...]
    name: str
    cells: list[dict[str, Any]] = field(default_factory=list)

    def figure(self, name: str) -> Estimate:
        """Speed or final quality with the interval over seeds, or over the episodes if there is only one seed."""
        if name == "steps_per_s":
            return over_seeds(Estimate(as_number(cell.get(name))) for cell in self.cells)
        return over_seeds(quality_of(as_mapping(cell.get("summary")), name) for cell in self.cells)


def sweep_page(folder: Path) -> Page:
    """The page of the sweep in `folder`: speed and quality of every combination of settings."""
    stored = read_json(folder / SWEEP)
    cells = as_rows(stored.get("cells"))
    swept = [one_line(key) for key in as_list(stored.get("swept")) if isinstance(key, str)]
    keys = [key for key in swept if key != "seed"] or swept
    settings, metric = settings_of(cells, keys), "mean_reward"
    summaries = [as_mapping(cell.get("summary")) for cell in cells]
    done = [summary for summary in summaries if as_number(summary.get("steps_per_s"))]
    if done and all(quality_of(summary, "win_rate").value is not None for summary in done):
        metric = "win_rate"
    shared = [text for text in as_list(cells[0].get("overrides")) if key_of(str(text)) not in swept] if cells else []
    return Page(
        kind="Sweep",
        title=" × ".join(keys) if keys else "One cell",
        facts=[("all cells", " ".join(map(str, shared))), *place_of(folder, SWEEP)],
        banners=_banners(cells),
        tiles=_tiles(cells, settings, metric),
        sections=[
            Section("Speed and quality", charts=_sweep_charts(settings, keys, metric)),
            Section("Cells", tables=[_sweep_table(folder, cells, swept, str(stored.get("speed_up_against") or "-"))]),
        ],
    )


def settings_of(cells: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Setting]:
    """The cells grouped by their values of `keys`, in the order in which they ran."""
    settings: dict[tuple[str, ...], Setting] = {}
    for cell in cells:
        typed = _typed(cell)
        values = tuple(typed.get(key, "-") for key in keys)
        name = " ".join(f"{key.split('.')[-1]}={value}" for key, value in zip(keys, values, strict=True))
        settings.setdefault(values, Setting(values, name or f"cell {cell.get('cell')}")).cells.append(dict(cell))
    return list(settings.values())


def _typed(cell: Mapping[str, Any]) -> dict[str, str]:
    texts = [str(text) for text in as_list(cell.get("overrides"))]
    return {key_of(text): text.partition("=")[2] for text in texts}


def _banners(cells: Sequence[Mapping[str, Any]]) -> list[Banner]:
    if not cells:
        return [Banner("Nothing to show", "sweep.json has no cells that can be read", "bad")]
    counts = Counter(str(cell.get("status")) for cell in cells)
    return [
        Banner(f"{counts[status]} of {len(cells)} cells {status}", "the reasons are in the table", TONES[status])
        for status in ("failed", "illegal", "stopped")
        if counts[status]
    ]


def _tiles(cells: Sequence[Mapping[str, Any]], settings: Sequence[Setting], metric: str) -> list[Tile]:
    done = sum(cell.get("status") == "done" for cell in cells)
    tiles = [Tile("Cells", number(len(cells)), f"{done} done")]
    for title, name in (("Most env steps/s", "steps_per_s"), (f"Best {METRICS[metric].title}", metric)):
        if known := [(value, each.name) for each in settings if (value := each.figure(name).value) is not None]:
            best, setting = max(known, key=lambda each: each[0])
            tiles.append(Tile(title, METRICS[name].form(best), setting))
    return tiles


def _sweep_charts(settings: Sequence[Setting], keys: Sequence[str], metric: str) -> list[Chart]:
    charts: list[Chart] = []
    for name, color in (("steps_per_s", 0), (metric, 2)):
        if len(keys) == 2:
            charts.append(_heat(settings, keys, name, color))
        elif len(settings) <= MOST_BARS:
            values = [(s.name, value, color) for s in settings if (value := s.figure(name)).value is not None]
            charts.append(Rows.of(f"rows_{name}", METRICS[name], values, INTERVALS, bars=name == "steps_per_s"))
    return [*charts, *_pareto_charts(settings, keys, metric)]


def _heat(settings: Sequence[Setting], keys: Sequence[str], name: str, color: int) -> Chart:
    metric = METRICS[name]
    down, across = (_ordered([each.values[place] for each in settings]) for place in (0, 1))
    values = np.full((len(down), len(across)), np.nan)
    for each in settings:
        values[down.index(each.values[0]), across.index(each.values[1])] = each.figure(name).value
    return Heat(name=f"heat_{name}", title=f"{metric.heading} by {keys[0]} and {keys[1]}", note="the best one in bold",
                x_label=keys[1], y_label=keys[0], x_values=across, y_values=down, values=values, metric=metric,
                color=color)  # fmt: skip


def _ordered(values: Sequence[str]) -> list[str]:
    """The distinct values: sorted if all are numbers, else in the order in which they come."""
    once = list(dict.fromkeys(values))
    numbers = {value: as_number(value) for value in once}
    return once if None in numbers.values() else sorted(once, key=lambda value: numbers[value] or 0.0)


def _pareto_charts(settings: Sequence[Setting], keys: Sequence[str], metric: str) -> list[Chart]:
    """Speed against quality, with the Pareto front."""
    speed = np.array([each.figure("steps_per_s").value for each in settings], dtype=np.float64)  # NaN if it is unknown
    quality = np.array([each.figure(metric)[:3] for each in settings], dtype=np.float64).reshape(-1, 3)
    both = np.flatnonzero(np.isfinite(speed) & np.isfinite(quality[:, 0]))
    if len(both) < 2:
        return []
    known = bool(np.isfinite(quality[both]).all())
    front = both[pareto_front(speed[both].tolist(), quality[both, 0].tolist())]
    names = np.array([" · ".join(each.values) or each.name for each in settings], dtype=object)
    points = [
        Series(name=name, x=speed[at], y=quality[at, 0], low=quality[at, 1] if known else None,
               high=quality[at, 2] if known else None, labels=tuple(names[at]), color=color)
        for name, at, color in (
            ("no other is better in both", front, 0), ("worse in both", np.setdiff1d(both, front), GREY)) if len(at)
    ]  # fmt: skip
    line = Series(x=points[0].x, y=points[0].y, dashed=True)
    note = f"labels: {' · '.join(keys)}" + ("; upright lines: 95 % intervals" if known else "")
    return [XY(name="pareto", title=f"Speed against {METRICS[metric].title}", x=METRICS["steps_per_s"],
               y=METRICS[metric], lines=[line], points=points, note=note)]  # fmt: skip


def _sweep_table(folder: Path, cells: Sequence[Mapping[str, Any]], swept: Sequence[str], against: str) -> Table:
    names = [">cell", *swept, "status", ">steps/s", ">speed-up", ">mean reward", ">win rate", ">updates per step",
             ">training time", ">start-up", "error"]  # fmt: skip
    rows: list[list[Cell | str]] = []
    for cell in cells:
        typed, summary, status = _typed(cell), as_mapping(cell.get("summary")), str(cell.get("status", ""))
        rows.append([
            Cell.run(str(cell.get("cell", "")), folder / Path(str(cell.get("folder") or "")).name, folder),
            *(typed.get(key, "") for key in swept),
            Cell(status, tone=TONES.get(status, "")),
            number(cell.get("steps_per_s")),
            times(cell.get("speed_up")),
            *(Cell.of(quality_of(summary, name), METRICS[name]) for name in ("mean_reward", "win_rate")),
            number(cell.get("update_ratio")),
            seconds(cell.get("wall_s")),
            seconds(cell.get("startup_s")),
            str(cell.get("error") or ""),
        ])  # fmt: skip
    note = f"Speed-up against {against}. In brackets: 95 % intervals of the final evaluation."
    return Table(names, rows, note=note)
