"""The report of `fasttrain compare`: whether candidates are faster than the first one, and learn as well as it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fasttrain.runs.logs import Episodes, read_episodes
from fasttrain.saving.files import read_json
from fasttrain.terminal import one_line
from fasttrain_report.charts import Chart, Row, Rows, color_of
from fasttrain_report.curves import RETURN, STEPS, TIME, WINS, Learned, Over, along, endings, seeds_chart
from fasttrain_report.page import TONES, Banner, Cell, Page, Section, Table, Tile, cell_table, cells_tile, place_of
from fasttrain_report.values import Estimate, as_list, as_mapping, as_number, as_rows, mean_interval, quality_of
from fasttrain_report.words import NOTHING, Metric, label, metric_of, number, percent, times

FILE = "study.json"
Runs = dict[str, list[tuple[dict[str, Any], Episodes]]]
# Of a large episodes.csv only 32 blocks (2 MB, 30,000 episodes) are read: 30 whole files would take half a gigabyte.
CELL_BYTES, CELL_BLOCKS = 2_000_000, 32
FIGURES = (
    "steps_per_s", "speed_up", "win_rate", "mean_reward", "tail", "score_diff", "draw_rate", "mean_turns", "difference",
    "time_to_threshold_s", "time_to_threshold_steps", "reward_per_hour", "elo", "env_steps", "updates",
)  # fmt: skip


def signed(value: float | None, is_rate: bool) -> str:
    """A difference as a text such as `+1.2`. Differences between win rates are in percentage points."""
    if value is None:
        return NOTHING
    value = round(100 * value if is_rate else value, 9)  # rounded, because equal means may differ by rounding errors
    text = percent(value / 100).removesuffix(" %") if is_rate else number(value)
    return f"+{text}" if value > 0 else text


def difference_text(change: Estimate, is_rate: bool) -> str:
    """`+1.2 [−0.8, +3.1] points`."""
    bounds = change.interval(partial(signed, is_rate=is_rate))
    return " ".join(part for part in (signed(change.value, is_rate), bounds, "points" if is_rate else "") if part)


def margin_text(margin: float | None, is_rate: bool) -> str:
    """`3 points`."""
    return f"{number(100 * margin)} points" if is_rate and margin is not None else number(margin)


class Comparison:
    """The study.json of a comparison. `rows` has one entry per candidate; the first is the baseline."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stored = folder, read_json(folder / FILE)
        self.rows, self.cells = as_rows(self.stored.get("rows")), as_rows(self.stored.get("cells"))
        self.gate = as_mapping(self.stored.get("gate"))
        self.margin, self.threshold = (as_number(self.gate.get(name)) for name in ("margin", "threshold"))
        named = [str(row.get("name")) for row in (*as_rows(self.stored.get("candidates")), *self.rows)]
        self.names = list(dict.fromkeys([*named, *(str(cell.get("label")) for cell in self.cells)]))
        # If the file has no gate, the metric is the win rate if one is known, else the mean reward.
        has_wins = any(Estimate.of(row.get("win_rate")).value is not None for row in self.rows)
        self.metric_name = str(self.gate.get("metric") or ("win_rate" if has_wins else "mean_reward"))
        self.title = metric_of(self.metric_name).title
        tail_of_wins = self.metric_name == "tail" and self.gate.get("curve_of") == "win rate"
        self.is_rate = self.metric_name == "win_rate" or tail_of_wins
        self.by_wins = self.gate.get("curve_of") in ("win rate", None) and self.metric_name != "mean_reward"
        self.done = [cell for cell in self.cells if cell.get("status") == "done"]

    def metric(self, name: str) -> Metric:
        """The `Metric` of the number `name`. `tail` (mean of the last fifth) is in percent if it is a win rate."""
        metric = metric_of(name)
        return metric._replace(form=percent) if name == "tail" and self.is_rate else metric

    def color(self, name: str) -> int:
        return color_of(self.names.index(name))

    def runs(self) -> Runs:
        """Summaries and episodes of the finished trainings, by candidate."""
        runs: Runs = {name: [] for name in self.names}
        for cell in self.done:
            folder = self.folder / str(cell.get("folder") or ".")
            episodes = read_episodes(folder / "episodes.csv", CELL_BYTES, CELL_BLOCKS)
            runs[str(cell.get("label"))].append((read_json(folder / "summary.json"), episodes))
        return runs


def compare_page(folder: Path) -> Page:
    study = Comparison(folder)
    runs = study.runs()
    pairs = [(what, over) for what in ((WINS, RETURN) if study.by_wins else (RETURN, WINS)) for over in (STEPS, TIME)]
    passes = (
        "A candidate passes if it is no worse than the baseline by more than "
        f"{margin_text(study.margin, study.is_rate)}: its whole interval lies to the right of that margin; at least "
        f"{number(study.gate.get('min_pairs'))} seeds are needed."
    )
    sections = [
        Section("Quality", passes if study.margin is not None else "", [
            _difference_chart(study),
            _seeds_chart(study, runs),
            endings({str(row.get("name")): as_mapping(row.get("end_reason")) for row in study.rows}),
        ]),
        Section("Speed", charts=[_figure_chart(study, key) for key in ("steps_per_s", "time_to_threshold_s", "elo")]),
        Section("Learning", "Means over seeds with their 95 % intervals.",
                charts=[_curve_chart(study, runs, what, over) for what, over in pairs]),
        Section("All figures", tables=[_figure_table(study)]),
        Section("Cells", tables=[cell_table(folder, study.cells, "candidate",
                "mean_reward" if study.metric_name == "tail" else study.metric_name, folded=len(study.cells) > 12)]),
    ]  # fmt: skip
    first, *others = [label(name) for name in study.names] or [""]
    speeds = [(f"Speed-up, {label(row.get('name'))}", Estimate.of(row.get("speed_up"))) for row in study.rows[1:]]
    return Page(
        kind="Comparison",
        title=f"{', '.join(others)} against {first}" if others else "Comparison",
        facts=[
            ("baseline", one_line(study.names[0]) if study.names else NOTHING),
            ("judged by", study.title),
            ("margin", margin_text(study.margin, study.is_rate)),
            ("seeds", number(len({str(cell.get("seed")) for cell in study.done}))),
            *place_of(folder, FILE),
        ],
        command=" ".join(["fasttrain", "compare", *map(str, as_list(study.stored.get("arguments")))]),
        banners=_banners(study),
        tiles=[
            *(Tile(title, times(speed.value), speed.interval(times)) for title, speed in speeds),
            cells_tile(study.cells),
        ],
        sections=[section for section in sections if section.charts or section.tables],
    )


def _banners(study: Comparison) -> list[Banner]:
    unread = "no cell of this comparison is finished, or study.json cannot be read"
    judged = [row for row in study.rows if row.get("verdict") or row.get("difference") is not None]
    return [_verdict(study, row) for row in judged] if study.rows else [Banner("No verdict yet", unread, "open")]


def _verdict(study: Comparison, row: Mapping[str, Any]) -> Banner:
    verdict = str(row.get("verdict") or "no verdict")
    speed, change = Estimate.of(row.get("speed_up")), Estimate.of(row.get("difference"))
    facts = [f"{times(speed.value)} as fast {speed.interval(times)}".strip()] if speed.value is not None else []
    if row.get("faster") is False:
        facts.append(f"less than the {times(study.gate.get('min_speed_up'))} that a trade-off must reach")
    if change.value is not None:
        margin = margin_text(study.margin, study.is_rate)
        facts.append(f"{study.title} {difference_text(change, study.is_rate)}, margin {margin}")
    if needed := as_number(row.get("seeds_needed")):
        facts.append(f"about {needed:.0f} seeds are enough for a verdict, if the two are equal")
    tone = TONES.get(verdict, "")
    slow = tone == "good" and row.get("faster") is False
    return Banner(f"{label(row.get('name'))}: {verdict}", "; ".join(facts), "open" if slow else tone)


def _difference_chart(study: Comparison) -> Chart:
    """The paired differences to the baseline, with lines at zero and at the margin."""
    scale = 100.0 if study.is_rate else 1.0
    rows = []
    for row in study.rows:
        change, name = Estimate.of(row.get("difference")), str(row.get("name"))
        if change.value is not None:
            bounds = change.bounds and (scale * change.bounds[0], scale * change.bounds[1])
            text = difference_text(change, study.is_rate).removesuffix(" points")
            rows.append(Row(name=name, value=scale * change.value, bounds=bounds, color=study.color(name), text=text))
    margins = {f"margin −{number(scale * study.margin)}": -scale * study.margin} if study.margin else {}
    unit = "percentage points" if study.is_rate else "in units of the reward"
    return Rows(name="differences", title="Difference to the baseline, by paired seeds", rows=rows, bars=False,
                value=Metric(f"candidate − baseline, {unit}"), levels={"equal": 0.0, **margins},
                note="lines: 95 % intervals; to the right of the margin is no worse")  # fmt: skip


def _seeds_chart(study: Comparison, runs: Runs) -> Chart:
    metric, rows = study.metric(study.metric_name), []
    for name, cells in runs.items():
        if study.metric_name == "tail":
            ends = [_tail(episodes, WINS if study.is_rate else RETURN) for _, episodes in cells]
        else:
            ends = [quality_of(summary, study.metric_name).value for summary, _ in cells]
        if values := [value for value in ends if value is not None]:
            mean = mean_interval(values).value
            rows.append(Row(name=name, value=mean, dots=tuple(values), color=study.color(name), text=metric.form(mean)))
    return Rows(name="seeds", title=f"{metric.heading}, a dot per seed", rows=rows, bars=False,
                value=metric, note="upright line: mean")  # fmt: skip


def _tail(episodes: Episodes, what: Learned) -> float | None:
    """Mean of the episodes in the last fifth of training; None without episodes."""
    if (known := along(episodes, STEPS, what.columns)) is None:
        return None
    steps, values = known
    return float(values[steps > 0.8 * steps.max()].mean())


def _figure_chart(study: Comparison, key: str) -> Chart:
    rows = [row for row in study.rows if row.get(key) is not None]
    values = [(str(row.get("name")), Estimate.of(row.get(key)), study.color(str(row.get("name")))) for row in rows]
    return Rows.of(key, metric_of(key), values, "lines: 95 % intervals over seeds", bars=key != "elo")


def _curve_chart(study: Comparison, runs: Runs, what: Learned, over: Over) -> Chart:
    text = f"threshold {what.axis.form(study.threshold)}"
    levels = {} if study.threshold is None or (what is WINS) != study.by_wins else {text: study.threshold}
    named = {name: [episodes for _, episodes in cells] for name, cells in runs.items()}
    return seeds_chart(named, {name: study.color(name) for name in named}, what, over, levels)


def _figure_table(study: Comparison) -> Table:
    """A row for each number of `FIGURES`, a column for each candidate."""
    rows: list[list[Cell | str]] = []
    for name in FIGURES:
        values = [Estimate.of(row.get(name)) for row in study.rows]
        if all(value.value is None for value in values):
            continue
        if name == "difference":
            texts = [difference_text(value, study.is_rate) if value.value is not None else NOTHING for value in values]
            rows.append([f"difference in {study.title}", *texts])
        else:
            rows.append([metric_of(name).title, *(Cell.of(value, study.metric(name)) for value in values)])
    if rows:
        seeds = [row.get("seeds") for row in study.rows]
        verdicts = [row.get("verdict") for row in study.rows]
        rows.append(["seeds", *(number(len(each) if isinstance(each, list) else each) for each in seeds)])
        rows.append(["verdict", *(
            Cell(str(each), tone=TONES.get(str(each), "")) if each else Cell("baseline", tone="dim")
            for each in verdicts
        )])  # fmt: skip
    note = "In brackets: 95 % intervals over seeds. ∞: not all runs reached the threshold."
    return Table(["", *(f">{label(row.get('name'))}" for row in study.rows)], rows, note=note)
