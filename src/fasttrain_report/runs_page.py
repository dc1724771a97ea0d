"""The report over several runs. Runs that differ only in the seed form a group, with intervals over its seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fasttrain.runs.folders import NOT_COMPARED
from fasttrain.runs.logs import Episodes, read_episodes
from fasttrain.saving.files import read_json
from fasttrain.spec.removed import flat
from fasttrain.terminal import one_line
from fasttrain_report.charts import Chart, Rows, color_of
from fasttrain_report.curves import RETURN, STEPS, TIME, WINS, seeds_chart
from fasttrain_report.page import FILE, Cell, Page, Section, Table, Tile
from fasttrain_report.values import Estimate, as_mapping, as_number, as_rows, over_seeds, quality_of
from fasttrain_report.words import METRICS, label, number, seconds, value_text

RUN_BYTES, RUN_BLOCKS = 2_000_000, 32  # limits for reading each episodes.csv, because there may be a hundred runs
# Settings that influence neither learning nor speed; runs of one group may differ in them.
IGNORED = (*NOT_COMPARED, "seed", "live", "report", "loggers", "callbacks", "checkup", "video", "checkpoint")
MOST_IN_NAME = 3  # maximum of settings in a group's name; if more differ, only the table shows them
FIGURES = ("win_rate", "mean_reward", "steps_per_s")


class Run(NamedTuple):
    """A run. `settings`: dotted key → requested value."""

    folder: Path
    name: str
    summary: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, above: Path) -> Run:
        """Read a run's files, each of which may be missing."""
        plan = read_json(folder / "plan.json")
        config = as_mapping(plan.get("config"))
        settings = flat(config) if config else {}
        for row in as_rows(plan.get("flags")):  # requested values, because effective ones differ between machines
            if row.get("flag") in settings:
                settings[row["flag"]] = row.get("requested")
        name = os.path.relpath(folder, above).replace(os.sep, "/")
        return cls(folder, one_line(name), read_json(folder / "summary.json"), settings)

    @property
    def seed(self) -> str:
        return str(self.settings.get("seed", self.summary.get("seed", "")))

    def figure(self, name: str) -> Estimate:
        """The speed, or a figure of the final quality with its interval over episodes."""
        if name == "steps_per_s":
            return Estimate(as_number(self.summary.get(name)))
        return quality_of(self.summary, name)

    def episodes(self) -> Episodes:
        return read_episodes(self.folder / "episodes.csv", RUN_BYTES, RUN_BLOCKS)


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings in which the runs differ. A setting that an older run does not have is ignored in that run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.split(".")[0] not in IGNORED)
    return [key for key in keys if len({_text(run.settings[key]) for run in runs if key in run.settings}) > 1]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group name → runs with the same settings except the seed, in the order of the runs."""
    keys = differing(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        same = [_text(run.settings.get(key)) for key in keys] if run.settings else [run.name]
        groups.setdefault(tuple(same), []).append(run)
    names = [_name(group[0], keys) for group in groups.values()]
    if len({label(name) for name in names}) < len(names):
        names = [f"{place}: {name}" for place, name in enumerate(names, 1)]
    return dict(zip(names, groups.values(), strict=True))


def _name(run: Run, keys: Sequence[str]) -> str:
    settings = run.settings
    if settings and 0 < len(keys) <= MOST_IN_NAME:
        return ", ".join(f"{key.rpartition('.')[2]}={value_text(settings.get(key))}" for key in keys)
    env = settings.get("env.id") or settings.get("env.entry_point")
    algo = settings.get("algo.name")
    return one_line(f"{algo} on {env}") if env and algo else run.name


def runs_page(folders: Sequence[Path], above: Path) -> Page:
    """The page of the runs in `folders`; it will be written into `above`."""
    runs = [Run.of(folder, above) for folder in folders]
    groups, keys = grouped(runs), differing(runs)
    colors = {name: color_of(place) for place, name in enumerate(groups)}
    episodes = {name: [run.episodes() for run in group] for name, group in groups.items()}
    curves = [seeds_chart(episodes, colors, what, over) for what in (RETURN, WINS) for over in (STEPS, TIME)]
    settings = [[key, *(value_text(group[0].settings.get(key)) for group in groups.values())] for key in keys]
    done = sum(run.summary.get("status") == "done" for run in runs)
    seeds = " to ".join(map(str, sorted({min(map(len, groups.values())), max(map(len, groups.values()))})))
    return Page(
        kind="Runs",
        title=" · ".join(map(label, groups)) if len(groups) < 4 else f"{len(runs)} runs side by side",
        facts=[("runs", number(len(runs))), ("folder", above.resolve().name)],
        tiles=[
            Tile("Runs", number(len(runs)), f"{done} done"),
            Tile("Settings", number(len(groups)), f"{seeds} runs of each"),
        ],
        sections=[
            Section("Learning", "Runs that differ only in the seed are one curve: their mean with its 95 % interval.",
                    curves),
            Section("Quality and speed", charts=[_figure_chart(groups, colors, name) for name in FIGURES],
                    tables=[_group_table(groups)]),
            Section("Settings that differ", tables=[Table(["setting", *map(label, groups)], settings)]),
            Section("Runs", tables=[_run_table(groups, above)]),
        ],
    )  # fmt: skip


def _figure_chart(groups: Mapping[str, Sequence[Run]], colors: Mapping[str, int], name: str) -> Chart:
    found = {group: over_seeds(run.figure(name) for run in runs) for group, runs in groups.items()}
    rows = [(group, value, colors[group]) for group, value in found.items() if value.value is not None]
    note = "lines: 95 % intervals over seeds; for a single run over its episodes"
    return Rows.of(name, METRICS[name], rows, note, bars=name == "steps_per_s")


def _group_table(groups: Mapping[str, Sequence[Run]]) -> Table:
    rows: list[list[Cell | str]] = [
        [label(name), number(len(runs)), *(_cell(over_seeds(run.figure(of) for run in runs), of) for of in FIGURES)]
        for name, runs in groups.items()
    ]
    titles = [f">{METRICS[name].title}" for name in FIGURES]
    return Table(["settings", ">runs", *titles], rows, note="In brackets: 95 % intervals.")


def _cell(found: Estimate, name: str) -> Cell | str:
    return "" if found.value is None else Cell.of(found, METRICS[name])


def _run_table(groups: Mapping[str, Sequence[Run]], above: Path) -> Table:
    rows: list[list[Cell | str]] = [
        [
            Cell(run.name, link=_link(run.folder, above)),
            label(name) if len(groups) > 1 else "",
            run.seed,
            str(run.summary.get("status") or "unfinished"),
            number(run.summary.get("env_steps")),
            seconds(run.summary.get("wall_s")),
            *(_cell(run.figure(figure), figure) for figure in FIGURES),
        ]
        for name, runs in groups.items()
        for run in runs
    ]
    titles = [f">{METRICS[name].title}" for name in FIGURES]
    return Table(["run", "settings", ">seed", "status", ">env steps", ">training time", *titles], rows)


def _link(run: Path, above: Path) -> str:
    """A link to the run's page, or to its folder."""
    try:
        target = os.path.relpath((run / FILE) if (run / FILE).is_file() else run, above)
    except ValueError:  # the run is on another drive
        return ""
    return "./" + quote(target.replace(os.sep, "/"))
