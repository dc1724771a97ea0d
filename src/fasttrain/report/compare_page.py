"""The report of `fasttrain compare`: is a candidate faster, and does it learn as well as the first?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.report.charts import XY, Axis, Chart, Level, Line, Row, Rows, color_of
from fasttrain.report.curves import Curve, across_seeds, mean_interval, spread_curve
from fasttrain.report.metrics import Form, Found, cells_title, found, link_to, metric_of, quality_of
from fasttrain.report.page import Banner, Cell, Page, Section, Table, Tile, Tone
from fasttrain.report.run_charts import OVER, OVER_WORDS, endings
from fasttrain.report.words import (
    NOTHING,
    as_mapping,
    as_number,
    as_rows,
    clean,
    interval,
    label,
    number,
    percent,
    seconds,
    times,
)
from fasttrain.runs.logs import Episodes, read_episodes
from fasttrain.runs.progress import WIN_KEYS
from fasttrain.saving.files import read_json

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


FILE = "study.json"
TONES: dict[str, Tone] = {"pass": "good", "fail": "bad", "not enough seeds": "open"}
FIGURES = (
    "steps_per_s", "speed_up", "win_rate", "mean_reward", "tail", "score_diff", "draw_rate", "mean_turns", "difference",
    "time_to_threshold_s", "time_to_threshold_steps", "reward_per_hour", "sample_efficiency", "elo", "env_steps",
    "updates",
)  # fmt: skip


@dataclass(slots=True)
class Comparison:
    """study.json of a comparison: rows by candidate, the first is the baseline."""

    folder: Path
    stored: dict[str, Any]
    rows: list[dict[str, Any]] = field(init=False)
    cells: list[dict[str, Any]] = field(init=False)
    gate: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.cells = as_rows(self.stored.get("rows")), as_rows(self.stored.get("cells"))
        self.gate = as_mapping(self.stored.get("gate"))

    @property
    def metric(self) -> str:
        """The gate's; of a file that says none, the win rate where there is one."""
        named = self.gate.get("metric")
        if isinstance(named, str):
            return named
        told = any(found(row.get("win_rate")).value is not None for row in self.rows)
        return "win_rate" if told else "mean_reward"

    @property
    def is_rate(self) -> bool:
        by_wins = self.gate.get("curve_of") == "win rate"
        return self.metric == "win_rate" or (self.metric == "tail" and by_wins)

    @property
    def names(self) -> list[str]:
        """Candidates in the order in which they were given."""
        named = [str(row.get("name")) for row in (*as_rows(self.stored.get("candidates")), *self.rows)]
        return list(dict.fromkeys([*named, *(str(cell.get("label")) for cell in self.cells)]))

    def folders(self, name: str) -> list[Path]:
        """Of the candidate's finished cells."""
        done = [cell for cell in self.cells if str(cell.get("label")) == name and cell.get("status") == "done"]
        return [self.folder / str(cell["folder"]) for cell in done if cell.get("folder")]


def compare_page(folder: Path) -> Page:
    """What there is to say of the comparison in `folder`."""
    study = Comparison(folder, read_json(folder / FILE))
    quality = [
        difference_chart(study.rows, study.names, study.is_rate, as_number(study.gate.get("margin"))),
        seeds_chart({name: study.folders(name) for name in study.names}, study.metric, study.is_rate),
        endings(
            {str(row.get("name")): as_mapping(row.get("end_reason")) for row in study.rows if row.get("end_reason")}
        ),
    ]
    speed = [figure_chart(study.rows, study.names, key) for key in ("steps_per_s", "time_to_threshold_s", "elo")]
    by_wins = study.gate.get("curve_of") in ("win rate", None) and study.metric != "mean_reward"
    sections = [
        Section("Quality", _quality_text(study), [chart for chart in quality if chart is not None]),
        Section("Speed", charts=[chart for chart in speed if chart is not None]),
        Section("Learning", "Means over seeds with their 95 % intervals.",
                charts=curve_charts({name: study.folders(name) for name in study.names}, by_wins,
                                    as_number(study.gate.get("threshold")))),
        Section("All figures", tables=_figure_tables(study)),
        Section("Cells", tables=_cell_tables(study)),
    ]  # fmt: skip
    return Page(
        kind="Comparison",
        title=" against ".join([", ".join(map(label, study.names[1:])), label(study.names[0])])
        if len(study.names) > 1
        else "Comparison",
        facts=_facts(study),
        command=" ".join(["fasttrain", "compare", *map(str, study.stored.get("arguments") or [])]),
        banners=_banners(study),
        tiles=_tiles(study),
        sections=[section for section in sections if section and (section.charts or section.tables)],
    )


def _facts(study: Comparison) -> list[tuple[str, str]]:
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime((study.folder / FILE).stat().st_mtime))
    seeds = {str(cell.get("seed")) for cell in study.cells if cell.get("status") == "done"}
    return [
        ("baseline", clean(study.names[0]) if study.names else "–"),
        ("judged by", metric_of(study.metric).title),
        ("margin", margin_text(as_number(study.gate.get("margin")), study.is_rate)),
        ("seeds", number(len(seeds))),
        ("date", date),
        ("folder", study.folder.resolve().name),
    ]


def _banners(study: Comparison) -> list[Banner]:
    if not study.rows:
        return [
            Banner("No verdict yet", "no cell of this comparison is finished, or study.json cannot be read", "open")
        ]
    return [_verdict(study, row) for row in study.rows if row.get("verdict") or row.get("difference") is not None]


def _verdict(study: Comparison, row: Mapping[str, Any]) -> Banner:
    verdict, speed = str(row.get("verdict") or "no verdict"), found(row.get("speed_up"))
    facts = [f"{times(speed.value)} as fast {interval_text(speed, times)}".strip()] if speed.value is not None else []
    if row.get("faster") is False:
        facts.append(f"less than the {times(study.gate.get('min_speed_up'))} that a trade-off is worth")
    change = found(row.get("difference"))
    if change.value is not None:
        text = difference_text(change, study.is_rate)
        facts.append(f"{metric_of(study.metric).title} {text}, margin {margin_text(_margin(study), study.is_rate)}")
    if needed := as_number(row.get("seeds_needed")):
        facts.append(f"about {needed:.0f} seeds would tell, if the two are alike")
    tone: Tone = TONES.get(verdict, "")
    return Banner(
        f"{label(row.get('name'))}: {verdict}",
        "; ".join(facts),
        "open" if tone == "good" and row.get("faster") is False else tone,
    )


def _margin(study: Comparison) -> float | None:
    return as_number(study.gate.get("margin"))


def _quality_text(study: Comparison) -> str:
    margin = _margin(study)
    if margin is None:
        return ""
    return (
        f"A candidate passes when it is no worse than the baseline by more than {margin_text(margin, study.is_rate)}: "
        f"its whole interval lies to the right of that margin, from {number(study.gate.get('min_pairs'))} seeds on."
    )


def _tiles(study: Comparison) -> list[Tile]:
    tiles = []
    for row in study.rows[1:]:
        speed = found(row.get("speed_up"))
        if speed.value is not None:
            tiles.append(Tile(f"Speed-up, {label(row.get('name'))}", times(speed.value), interval_text(speed, times)))
    done = sum(cell.get("status") == "done" for cell in study.cells)
    took = sum(as_number(cell.get("seconds")) or 0.0 for cell in study.cells)
    tiles.append(Tile("Cells", number(len(study.cells)), f"{done} done, {seconds(took)} in all"))
    return tiles


def _figure_tables(study: Comparison) -> list[Table]:
    """Figures down, candidates across."""
    rows: list[list[Cell | str]] = []
    for name in FIGURES:
        values = [found(row.get(name)) for row in study.rows]
        if any(value.value is not None for value in values):
            metric = metric_of(name)
            if name == "tail" and study.is_rate:
                metric = metric._replace(form=percent)
            if name == "difference":
                texts = [
                    Cell(difference_text(value, study.is_rate) if value.value is not None else "–") for value in values
                ]
                rows.append([f"difference in {metric_of(study.metric).title}", *texts])
            else:
                told = [row.get(name) is not None and name.startswith(NEVER) for row in study.rows]
                cells = [each._replace(never=never).cell(metric) for each, never in zip(values, told, strict=True)]
                rows.append([metric.title, *cells])
    if rows:
        rows.append(["seeds", *(_seeds(row) for row in study.rows)])
        rows.append(["verdict", *(_verdict_cell(row) for row in study.rows)])
    note = "In brackets: 95 % intervals over seeds; of the time to the threshold, ∞ means that not all runs came there."
    names = ["", *(f">{label(row.get('name'))}" for row in study.rows)]
    return [Table(names, rows, note=note)] if rows else []


def _seeds(row: Mapping[str, Any]) -> str:
    seeds = row.get("seeds")
    return number(len(seeds) if isinstance(seeds, list) else seeds)


def _verdict_cell(row: Mapping[str, Any]) -> Cell:
    verdict = row.get("verdict")
    return Cell(str(verdict), tone=TONES.get(str(verdict), "")) if verdict else Cell("baseline", tone="dim")


def _cell_tables(study: Comparison) -> list[Table]:
    rows: list[list[Cell | str]] = []
    metric = "mean_reward" if study.metric == "tail" else study.metric
    for cell in study.cells:
        place = study.folder / str(cell.get("folder") or ".")
        summary = read_json(place / "summary.json")
        status = str(cell.get("status", ""))
        tone: Tone = "" if status == "done" else "bad" if status == "failed" else "open"
        rows.append([
            Cell(str(cell.get("label")), link=link_to(place, study.folder)),
            str(cell.get("seed", "")),
            Cell(status, tone=tone),
            number(summary.get("steps_per_s")),
            quality_of(summary, metric).cell(metric_of(metric)),
            seconds(cell.get("seconds")),
            str(cell.get("error") or ""),
        ])  # fmt: skip
    names = ["candidate", ">seed", "status", ">steps/s", f">{metric_of(metric).title}", ">seconds in all", "error"]
    title = cells_title(len(rows))
    return [Table(names, rows, title, folded=len(rows) > 12, optional=("error",))] if rows else []
