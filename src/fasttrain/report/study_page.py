"""The report of any other study (`ablate`, `tune`): its rows as a table, its figures as bars."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.report.charts import Axis, Chart, Level, Rows
from fasttrain.report.curves import mean_interval
from fasttrain.report.metrics import Found, cells_title, found, link_to, metric_of
from fasttrain.report.page import Banner, Cell, Page, Section, Table, Tile, Tone
from fasttrain.report.words import as_number, as_rows, clean, interval, number, seconds, times, value_text
from fasttrain.saving.files import read_json

FILE = "study.json"
NAMES = ("name", "flag", "label", "point", "step", "change", "trial", "setting", "overrides")
# What to draw, most telling first; a study names the ones it has.
FIRST = (
    "within",
    "added",
    "speed_up",
    "gain",
    "steps_per_s",
    "difference",
    "win_rate",
    "mean_reward",
    "update_ratio",
    "memory_bytes",
)
NOT_DRAWN = ("seed", "seeds", "number", "exit_code", "rank", "rung", "turn", "trial", "cell")
MOST_CHARTS, MOST_ROWS = 4, 24
TONES: dict[str, Tone] = {
    "pass": "good", "keep": "good", "done": "", "fail": "bad", "failed": "bad", "crashed": "bad", "drop": "bad",
    "illegal": "open", "stopped": "open", "not enough seeds": "open", "unclear": "open",
}  # fmt: skip


def study_page(folder: Path) -> Page:
    """What there is to say of the study in `folder`."""
    stored = read_json(folder / FILE)
    rows, cells = as_rows(stored.get("rows")) or as_rows(stored.get("results")), as_rows(stored.get("cells"))
    command = clean(stored.get("command") or "study")
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / FILE).stat().st_mtime))
    charts = _charts(rows)
    tables = [_table(rows)] if rows else []
    sections = [
        Section("Results", charts=charts, tables=tables),
        Section("Cells", tables=[_cells(folder, cells)] if cells else []),
    ]
    took = sum(as_number(cell.get("seconds")) or 0.0 for cell in cells)
    return Page(
        kind="Study",
        title=command,
        facts=[*_facts(stored), ("date", date), ("folder", folder.resolve().name)],
        command=" ".join(["fasttrain", command, *map(str, stored.get("arguments") or [])]),
        banners=[] if rows or cells else [Banner("Nothing to show", "study.json has no rows that can be read", "open")],
        tiles=[*_result(stored), *([Tile("Cells", number(len(cells)), f"{seconds(took)} in all")] if cells else [])],
        sections=[section for section in sections if section],
    )


def _facts(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the study says of itself in single values."""
    known = ("schema", "command", "arguments")
    plain = {key: value for key, value in stored.items() if isinstance(value, (str, int, float)) and key not in known}
    facts = [(key.replace("_", " "), value_text(value)) for key, value in plain.items()]
    chosen = [(key, _plain(stored[key])) for key in ("kept", "best") if isinstance(stored.get(key), (list, dict))]
    return [*facts, *((key, text or "nothing") for key, text in chosen)]


def _result(stored: Mapping[str, Any]) -> list[Tile]:
    """How fast what the study arrived at is beside the profile it began with."""
    result = found(stored.get("result"))
    if result.value is None:
        return []
    return [Tile("Result ÷ profile", times(result.value), interval(result.low, result.high, times))]


def _name_key(rows: Sequence[Mapping[str, Any]]) -> str:
    """The column that says what a row is about."""
    present = [key for key in NAMES if any(key in row for row in rows)]
    texts = [key for row in rows for key, value in row.items() if isinstance(value, str)]
    return (present or texts or [""])[0]


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_plain(each) for each in value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_plain(each)}" for key, each in value.items()) or "the profile"
    return value_text(value)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    name = _name_key(rows)
    return [name, *(key for key in keys if key != name)] if name else keys


def _is_figure(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = [row.get(key) for row in rows if row.get(key) is not None]
    return bool(values) and all(
        not isinstance(value, (str, bool)) and found(value).value is not None for value in values
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    keys = _columns(rows)
    figures = {key for key in keys if _is_figure(rows, key)}
    body: list[list[Cell | str]] = []
    for row in rows:
        cells: list[Cell | str] = []
        for key in keys:
            value = row.get(key)
            text = _plain(value)
            if key in ("keep", "kept") and isinstance(value, bool):
                text = "keep" if value else "leave out"
            cells.append(found(value).cell(metric_of(key)) if key in figures else Cell(text, tone=TONES.get(text, "")))
        body.append(cells)
    names = [f">{_title(key)}" if key in figures else _title(key) for key in keys]
    return Table(names, body, optional=("refused", "error"))


def _title(key: str) -> str:
    return metric_of(key).title


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Bars of the first few figures that differ between rows."""
    name = _name_key(rows) if rows else ""
    keys = [key for key in _columns(rows) if _is_figure(rows, key) and key not in (*NOT_DRAWN, name)]
    ranked = [key for key in FIRST if key in keys] + [key for key in keys if key not in FIRST]
    charts: list[Chart] = []
    for key in ranked:
        shown = _shown(rows, name, key)
        if len({value.value for _, value in shown}) > 1 and len(charts) < MOST_CHARTS:
            metric = metric_of(key)
            bars = tuple(value.row(text, metric, len(charts)) for text, value in shown)
            note = "lines: 95 % intervals" if any(row.low is not None for row in bars) else ""
            title = metric.title[:1].upper() + metric.title[1:]
            levels = (Level(1.0, "equal"),) if metric.form is times else ()
            charts.append(Rows(name=f"figure_{len(charts) + 1}", title=title, note=note, rows=bars, levels=levels,
                               value=Axis(metric.title, metric.kind)))  # fmt: skip
    return charts


def _shown(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> list[tuple[str, Found]]:
    """What to draw of a figure: as stored; of trials in rungs each setting's longest, means over turns, best first."""
    if not any("rung" in row for row in rows):
        named = [(_plain(row.get(name)) if name else str(place), found(row.get(key))) for place, row in enumerate(rows)]
        return [(text, value) for text, value in named if value.value is not None][:MOST_ROWS]
    longest: dict[str, float] = {}
    values: dict[str, list[float]] = {}
    for row in rows:
        text, rung, value = _plain(row.get(name)), as_number(row.get("rung")) or 0.0, found(row.get(key)).value
        if value is not None and rung >= longest.get(text, 0.0):
            values[text] = [*(values[text] if rung == longest.get(text) else []), value]
            longest[text] = rung
    means = [(text, Found(*mean_interval(each)[:1])) for text, each in values.items()]
    return sorted(means, key=lambda item: -(item[1].value or 0.0))[:MOST_ROWS]


def _cells(folder: Path, cells: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell | str]] = []
    for cell in cells:
        status = str(cell.get("status", ""))
        place = folder / str(cell.get("folder") or ".")
        overrides = cell.get("overrides")
        rows.append([
            Cell(str(cell.get("label", "")), link=link_to(place, folder)),
            str(cell.get("seed", "")),
            Cell(status, tone=TONES.get(status, "")),
            number(read_json(place / "summary.json").get("steps_per_s")),
            seconds(cell.get("seconds")),
            " ".join(map(str, overrides)) if isinstance(overrides, list) else "",
            str(cell.get("error") or ""),
        ])  # fmt: skip
    names = ["cell", ">seed", "status", ">steps/s", ">seconds in all", "overrides", "error"]
    return Table(names, rows, cells_title(len(rows)), folded=True, optional=("error", ">seed"))
