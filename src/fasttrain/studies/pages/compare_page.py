"""The report of `fasttrain compare`: is a candidate faster, and does it learn as well as the first?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain.runs.files import read_json
from fasttrain.studies.pages.compare_charts import (
    NEVER,
    curve_charts,
    difference_chart,
    difference_text,
    figure_chart,
    interval_text,
    margin_text,
    seeds_chart,
)
from fasttrain.studies.pages.metrics import cells_title, found, link_to, metric_of, quality_of
from fasttrain.studies.pages.page import Banner, Cell, Page, Section, Table, Tile, Tone
from fasttrain.studies.pages.run_charts import endings
from fasttrain.studies.pages.words import as_mapping, as_number, as_rows, clean, label, number, percent, seconds, times

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
