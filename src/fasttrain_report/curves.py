"""Makes curves and charts from training episodes, and from the windows of perf.json. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fasttrain.intervals import student, wilson
from fasttrain.perf.clock import PHASES
from fasttrain.runs.logs import TERM, Episodes
from fasttrain.spec.infos import SCORE_KEYS, WIN_KEYS
from fasttrain_report.charts import GREY, XY, Chart, Floats, Row, Rows, Series, Split, color_of
from fasttrain_report.values import Estimate, as_mapping, as_number, as_rows, quality_of
from fasttrain_report.words import Metric, number, percent, seconds

MOST_BINS = 100  # maximum of points in a curve: a chart 420 pt wide can show no more
EPISODES_PER_BIN = 20
POINTS = 80  # points of a mean curve over seeds
SEED_BINS = 40  # points of a seed's curve; more would only show noise, which the band over seeds shows already
QUANTILES = (0.1, 0.9)
MOST_REASONS, MOST_TERMS = 6, 6
MOST_WINDOWS = 120  # perf.json may have twice as many, but a chart can show no more
TINY_SHARE = 0.01  # smaller phases are shown together as "rest"
PHASE_LOOK = {  # phase → (name, colour)
    "action": ("choose actions", 5), "env_step": ("step envs", 1), "buffer": ("store", 4),
    "replay_sample": ("draw batches", 2), "train_fwd": ("forward", 0), "train_bwd": ("backward", 6),
    "train": ("update", 0), "optim": ("optimizer", 3), "log": ("log", 8), "eval": ("evaluate", 9),
    "checkpoint": ("checkpoint", 10), "other": ("other", GREY), "rest": ("rest", GREY),
}  # fmt: skip

# --- curves


def groups(count: int, most: int = MOST_BINS) -> list[slice]:
    """Cut `count` observations into at most `most` slices, each of about `EPISODES_PER_BIN` observations or more."""
    if count == 0:
        return []
    bins = max(min(count, 8), min(most, count // EPISODES_PER_BIN))
    edges = np.linspace(0, count, bins + 1).astype(int).tolist()
    return [slice(low, high) for low, high in pairwise(edges)]


def _means(values: Floats, parts: Sequence[slice]) -> Floats:
    return np.array([values[part].mean() for part in parts])


def spread_curve(x: Floats, y: Floats, most: int = MOST_BINS) -> Series:
    """Mean and the middle 80 % of `y` along `x`."""
    parts = groups(len(x), most)
    bounds = np.array([np.quantile(y[part], QUANTILES) for part in parts]).reshape(-1, 2)
    return Series(x=_means(x, parts), y=_means(y, parts), low=bounds[:, 0], high=bounds[:, 1])


def rate_curve(x: Floats, hits: Floats) -> Series:
    """Share of `hits` (0 or 1) along `x`, with Wilson's 95 % interval of each point."""
    parts, hits = groups(len(x)), np.clip(hits, 0.0, 1.0)
    counts = np.array([part.stop - part.start for part in parts], dtype=np.float64)
    rates = _means(hits, parts)
    low, high = wilson(rates * counts, counts)
    return Series(x=_means(x, parts), y=rates, low=low, high=high)


def name_shares(x: Floats, names: Sequence[str], most: int) -> tuple[Floats, dict[str, Floats]]:
    """Shares of the `most` commonest names along `x`, with all others together as `others`."""
    totals, parts = Counter(names), groups(len(x))
    common = [name for name, _ in totals.most_common(most if len(totals) <= most else most - 1)]
    counts = [Counter(names[part]) for part in parts]
    shares = {name: np.array([count[name] / count.total() for count in counts]) for name in common}
    if len(common) < len(totals):
        shares["others"] = 1.0 - sum(shares.values(), np.zeros(len(parts)))
    return _means(x, parts), shares


def across_seeds(curves: Sequence[Series], bounds: tuple[float, float] = (-np.inf, np.inf)) -> Series | None:
    """The mean of several runs' curves over their common range of x, with Student's 95 % interval.

    The interval is clipped to `bounds`, the range of possible values. For a single run the band is the line itself.
    None if the runs have no range in common.
    """
    low, high = (pick([c.x[at] for c in curves], default=np.nan) for pick, at in ((max, 0), (min, -1)))
    if not low <= high:
        return None
    at = np.linspace(low, high, POINTS)
    mean, half = student(np.array([np.interp(at, curve.x, curve.y) for curve in curves]))
    half = half if len(curves) > 1 else 0.0
    return Series(x=at, y=mean, low=np.clip(mean - half, *bounds), high=np.clip(mean + half, *bounds))


def pareto_front(speed: Sequence[float], quality: Sequence[float]) -> list[int]:
    """Indices of the points that no other point beats in both speed and quality, by rising speed."""
    front: list[int] = []
    for index in sorted(range(len(speed)), key=lambda i: (-speed[i], -quality[i])):
        if not front or quality[index] > quality[front[-1]]:
            front.append(index)
    return front[::-1]


# --- learning


class Over(NamedTuple):
    """The x axis of a learning curve: its name in file names, and its column in episodes.csv."""

    name: str
    column: str
    axis: Metric


class Learned(NamedTuple):
    """The y axis of a learning curve: names of its charts, columns in episodes.csv, and its key in evaluations."""

    name: str
    axis: Metric
    columns: Sequence[str]
    figure: str
    curve: Callable[[Floats, Floats], Series] = spread_curve
    line: str = "training episodes, mean"
    band: str = "band: the middle 80 % of the episodes"

    def title(self, over: Over) -> str:
        """`Win rate over env steps`."""
        return f"{self.axis.heading} over {over.axis.title}"


STEPS = Over("steps", "env_steps", Metric("env steps"))
TIME = Over("time", "wall_s", Metric("training time", seconds))
RETURN = Learned("return", Metric("return per episode"), ("return",), "mean_reward")
WINS = Learned("win_rate", Metric("win rate", percent), WIN_KEYS, "win_rate", rate_curve, "training episodes",
               "band: 95 % interval of each stretch")  # fmt: skip
SCORE = Learned("score_difference", Metric("score difference"), SCORE_KEYS, "score_diff",
                band="above 0: ahead of the opponents; band: the middle 80 % of the episodes")  # fmt: skip


def along(episodes: Episodes, over: Over, columns: Sequence[str]) -> tuple[Floats, Floats] | None:
    """x and y, where y is the first of `columns` that has numbers. Episodes in which x or y is missing are left out."""
    at, values = episodes.column((over.column,)), episodes.column(columns)
    if at is None or values is None:
        return None
    known = np.isfinite(at) & np.isfinite(values)
    return (at[known], values[known]) if known.any() else None


def learning_charts(
    episodes: Episodes, evaluations: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> list[Chart]:
    """Charts of return and win rate over env steps and time, of score difference and reward terms over env steps."""
    pairs = [(RETURN, STEPS), (RETURN, TIME), (WINS, STEPS), (WINS, TIME), (SCORE, STEPS)]
    charts: list[Chart] = []
    for what, over in pairs:
        found, points = along(episodes, over, what.columns), _evaluated(evaluations, summary, over.column, what.figure)
        lines = [replace(what.curve(*found), name=what.line)] if found else []
        charts.append(XY(name=f"{what.name}_over_{over.name}", title=what.title(over), note=what.band if lines else "",
                         x=over.axis, y=what.axis, lines=lines, points=points))  # fmt: skip
    return [*charts, _terms_chart(episodes, as_mapping(summary.get("reward_terms")))]


def _evaluated(evaluations: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], x: str, name: str) -> list[Series]:
    """The greedy evaluations during training and the final one, as points."""
    rows = [
        (row.get(x), Estimate(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))) for row in evaluations
    ]
    rows.append((as_number(summary.get(x)), quality_of(summary, name)))
    rows = [row for row in rows if row[0] is not None and row[1].value is not None]
    if not rows:
        return []
    known = all(found.bounds for _, found in rows)
    values, low, high = np.array([found[:3] for _, found in rows], dtype=np.float64).T
    drawn = Series(name="greedy evaluation", x=np.array([at for at, _ in rows]), y=values, color=1)
    return [replace(drawn, name=f"{drawn.name}, 95 % interval", low=low, high=high) if known else drawn]


def _terms_chart(episodes: Episodes, terms: Mapping[str, Any]) -> Chart:
    lines = []
    for place, name in enumerate(sorted(terms, key=lambda name: -abs(as_number(terms[name]) or 0.0))[:MOST_TERMS]):
        if found := along(episodes, STEPS, (TERM + name,)):
            lines.append(replace(spread_curve(*found), name=name, low=None, high=None, color=color_of(place)))
    return XY(name="reward_terms", title="What the reward is made of", note="means of training episodes", x=STEPS.axis,
              y=Metric("reward per episode"), lines=lines)  # fmt: skip


def tasks_chart(episodes: Episodes, tasks: Sequence[str]) -> Chart:
    """For each task of a curriculum: the win rate of its episodes, or their return if the env reports no wins."""
    what, lines = WINS if episodes.column(WINS.columns) is not None else RETURN, list[Series]()
    for place, name in enumerate(tasks[:MOST_TERMS]):
        own = np.array([task == name for task in episodes.tasks], np.bool_)
        numbers = {key: values[own] for key, values in episodes.numbers.items() if len(values) == len(own)}
        if found := along(Episodes(numbers), STEPS, what.columns):
            lines.append(replace(what.curve(*found), name=name, low=None, high=None, color=color_of(place)))
    return XY(name="tasks", title=f"{what.axis.heading} by task", note="training episodes", x=STEPS.axis, y=what.axis,
              lines=lines)  # fmt: skip


def elo_chart(self_play: Mapping[str, Any]) -> Chart:
    """Elo ratings of the pool's snapshots over their env steps, and the learner's as a horizontal line."""
    rows = [(as_number(row.get("env_steps")), as_number(row.get("elo"))) for row in as_rows(self_play.get("pool"))]
    rated = np.array(sorted((x, y) for x, y in rows if x is not None and y is not None)).reshape(-1, 2)
    drawn = [Series(name="", x=rated[:, 0], y=rated[:, 1])] if len(rated) else []
    learner = as_number(self_play.get("elo"))
    levels = {} if learner is None else {f"learner now: {learner:,.0f}": learner}
    return XY(name="elo", title="Elo of the snapshots in the pool", x=Metric("taken at env step"), y=Metric("Elo"),
              lines=drawn, points=drawn, levels=levels,
              note="from the learner's games; the untrained policy has 1,000")  # fmt: skip


def seeds_chart(
    runs: Mapping[str, Sequence[Episodes]], colors: Mapping[str, int], what: Learned, over: Over,
    levels: Mapping[str, float] | None = None,
) -> Chart:  # fmt: skip
    """Mean curves of groups of runs over training episodes, with intervals over seeds."""
    lines = []
    for name, found in runs.items():
        pairs = [along(episodes, over, what.columns) for episodes in found]
        curves = [spread_curve(*pair, SEED_BINS) for pair in pairs if pair is not None]
        if (mean := across_seeds(curves, (0.0, 1.0) if what is WINS else (-np.inf, np.inf))) is not None:
            lines.append(replace(mean, name=name, color=colors[name]))
    return XY(name=f"{what.name}_over_{over.name}", title=what.title(over), x=over.axis, y=what.axis, lines=lines,
              levels=levels or {}, note="training episodes; band: 95 % interval over seeds")  # fmt: skip


# --- how episodes ended


def ending_charts(episodes: Episodes, quality: Mapping[str, Any]) -> list[Chart]:
    """Charts of the end reasons: of training episodes, and of the final policy's episodes."""
    at, names, lines = episodes.column(("env_steps",)), list[str](), list[Series]()
    if at is not None and episodes.reasons:
        steps, shares = name_shares(at, episodes.reasons, MOST_REASONS)
        names = list(shares)
        lines = [Series(name=n, x=steps, y=y, color=_reason_color(n, names)) for n, y in shares.items()]
    acting = {"greedy": quality, "sampled": as_mapping(quality.get("sampled"))}
    return [
        XY(name="endings_over_steps", title="How training episodes ended", x=STEPS.axis,
           y=Metric("share of episodes", percent), lines=lines, stacked=True),
        endings({name: as_mapping(result.get("end_reason")) for name, result in acting.items()}, names),
    ]  # fmt: skip


def endings(by_name: Mapping[str, Mapping[str, Any]], order: Sequence[str] = ()) -> Chart:
    """Shares of at most `MOST_REASONS` end reasons for each key of `by_name`; the last may be "others"."""
    known = {n: {r: as_number(share) or 0.0 for r, share in found.items()} for n, found in by_name.items() if found}
    totals = Counter[str]()
    for found in known.values():
        totals.update(found)
    ranked = [*(name for name in order if name in totals), *(n for n, _ in totals.most_common() if n not in order)]
    common = ranked if len(ranked) <= MOST_REASONS else ranked[: MOST_REASONS - 1]
    colors = [*order, *(name for name in common if name not in order)]
    values = {reason: np.array([found.get(reason, 0.0) for found in known.values()]) for reason in common}
    if len(common) < len(ranked):
        values["others"] = np.clip(1.0 - sum(values.values(), np.zeros(len(known))), 0.0, 1.0)
    parts = {reason: (_reason_color(reason, colors), shares) for reason, shares in values.items()}
    return Split(name="endings", title="How evaluated episodes ended", value=Metric("share of episodes", percent),
                 names=list(known), parts=parts)  # fmt: skip


def _reason_color(name: str, order: Sequence[str]) -> int:
    return GREY if name == "others" else color_of(order.index(name))


# --- where the time went


def phase_ms(total: Mapping[str, Any]) -> dict[str, float]:
    """Phase → milliseconds per 1,000 env steps, for the phases that took any time."""
    found = {phase: as_number(total.get(f"{phase}_ms")) for phase in PHASES}
    return {phase: value for phase, value in found.items() if value}


def time_charts(total: Mapping[str, Any], windows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Charts of the phases of [PERF], as bars and over time, and of throughput, load and memory."""
    phases = phase_ms(total)
    wall = sum(phases.values())
    rows = [
        Row(name=name, value=ms / wall, color=color, text=f"{percent(ms / wall)} · {number(ms)} ms")
        for ms, (name, color) in sorted(((ms, PHASE_LOOK[phase]) for phase, ms in phases.items()), reverse=True)
    ]
    bars = Rows(name="phases", title="What the main thread spent its time on", rows=rows,
                value=Metric("share of the time", percent), note="ms: milliseconds per 1,000 env steps")  # fmt: skip
    return [bars, *window_charts(windows)]


def window_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Charts over time from the windows in perf.json; none with fewer than two windows."""
    rows = [row for row in rows if None not in (as_number(row.get("wall_s")), as_number(row.get("env_steps")))]

    def column(name: str) -> Floats:
        return np.array([as_number(row.get(name)) for row in rows], dtype=np.float64)

    lasted, steps = (np.diff(column(name), prepend=0.0) for name in ("wall_s", "env_steps"))
    good = np.flatnonzero((lasted > 0) & (steps > 0))
    if len(good) < 2:
        return []
    merged = np.array_split(good, min(MOST_WINDOWS, len(good)))
    ends = column("wall_s")[[part[-1] for part in merged]]

    def summed(values: Floats) -> Floats:
        return np.array([values[part].sum() for part in merged])

    def mean(name: str) -> Floats:
        values = column(name)
        known = lasted * np.isfinite(values)
        with np.errstate(invalid="ignore"):  # 0 / 0 if the value is unknown
            return summed(known * np.nan_to_num(values)) / summed(known)

    def curve(values: Floats, name: str = "", color: int = 0) -> list[Series]:
        known = np.isfinite(values).mean() > 0.5  # otherwise the line would consist mostly of gaps
        return [Series(name=name, x=ends, y=values, color=color, stepped=True)] if known else []

    used = {phase: summed(np.nan_to_num(column(f"{phase}_ms")) * steps) for phase in PHASES}
    phases = [curve(share, *PHASE_LOOK[phase])[0] for phase, share in shares_of(used).items()]
    loads = [*curve(mean("cpu"), "CPU, of all cores", 1), *curve(mean("gpu"), "GPU", 2)]
    named = " and ".join(line.name.split(",")[0] for line in loads)
    return [
        XY(name="phases_over_time", title="Phases along the run", x=TIME.axis, y=Metric("share of the time", percent),
           lines=phases, stacked=True),
        XY(name="throughput", title="Throughput along the run", x=TIME.axis, y=Metric("env steps/s"),
           lines=curve(summed(steps) / summed(lasted)), from_zero=True),
        XY(name="load", title=f"{named} load along the run", x=TIME.axis, y=Metric("busy", percent), lines=loads,
           from_zero=True, note="CPU: this process and its children, of all cores"),
        XY(name="memory", title="Memory along the run", x=TIME.axis, y=Metric("resident memory (MB)"), from_zero=True,
           lines=curve(mean("memory_bytes") / 1e6, color=6), note="this process and its children"),
    ]  # fmt: skip


def shares_of(used: Mapping[str, Floats]) -> dict[str, Floats]:
    """Phase → its share of the main thread's time in each window. `rest`: small phases and "other", if above 0.2 %."""
    total = np.maximum(np.sum(list(used.values()), axis=0), 1e-12)
    whole = float(total.sum())
    parts = {name: each / total for name, each in used.items() if name != "other" and each.sum() >= TINY_SHARE * whole}
    rest = np.maximum(1.0 - sum(parts.values(), np.zeros(len(total))), 0.0)
    return {**parts, "rest": rest} if float((rest * total).sum()) > 0.002 * whole else parts
