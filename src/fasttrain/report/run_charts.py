"""A run's files → its charts, as data. Each returns None, or nothing, where the files do not have the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fasttrain.report.charts import (
    GREY,
    XY,
    Area,
    Axis,
    Chart,
    Level,
    Line,
    Part,
    Points,
    Row,
    Rows,
    Split,
    color_of,
)
from fasttrain.report.curves import Curve, Windows, name_shares, phase_ms, rate_curve, spread_curve
from fasttrain.report.files import RunFiles
from fasttrain.report.words import as_mapping, as_number, as_rows, number, percent
from fasttrain.runs.logs import TERM, Episodes, Floats
from fasttrain.runs.progress import SCORE_KEYS, WIN_KEYS

STEPS, WALL = Axis("env steps", "steps"), Axis("training time", "seconds")
OVER = (("steps", STEPS, "env_steps"), ("time", WALL, "wall_s"))
OVER_WORDS = {"steps": "env steps", "time": "training time"}
MOST_REASONS, MOST_TERMS = 6, 6
PHASE_WORDS = {
    "action": "choose actions", "env_step": "step envs", "buffer": "store", "replay_sample": "draw batches",
    "train_fwd": "forward", "train_bwd": "backward", "train": "update", "optim": "optimizer", "log": "log",
    "eval": "evaluate", "checkpoint": "checkpoint", "other": "other", "rest": "rest",
}  # fmt: skip
PHASE_COLORS = {
    "action": 5, "env_step": 1, "buffer": 4, "replay_sample": 2, "train_fwd": 0, "train_bwd": 6, "train": 0,
    "optim": 3, "log": 8, "eval": 9, "checkpoint": 10, "other": GREY, "rest": GREY,
}  # fmt: skip


def learning_charts(run: RunFiles) -> list[Chart]:
    """Return and win rate over env steps and over time; score difference and reward terms over env steps."""
    episodes, charts = run.episodes, list[Chart | None]()
    for over in OVER:
        charts.append(_return_chart(run, *over))
    for over in OVER:
        charts.append(_win_chart(run, *over))
    charts += [_score_chart(run), _terms_chart(episodes, as_mapping(run.summary.get("reward_terms")))]
    return [chart for chart in charts if chart is not None]


def _evaluated(run: RunFiles, x: str, name: str) -> tuple[Points, ...]:
    """Greedy evaluations on the way and the final one."""
    rows: list[Mapping[str, Any]] = [row for row in run.evaluations if as_number(row.get(x)) is not None]
    final, at = run.quality, as_number(run.summary.get(x))
    ends = as_mapping(final.get("ci95")).get(name)
    if at is not None and as_number(final.get(name)) is not None:
        low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
        rows.append({x: at, name: final[name], f"{name}_low": low, f"{name}_high": high})
    rows = [row for row in rows if as_number(row.get(name)) is not None]
    if not rows:
        return ()
    bound = {side: [row.get(f"{name}_{side}") for row in rows] for side in ("low", "high")}
    known = all(as_number(value) is not None for values in bound.values() for value in values)
    return (
        Points(
            name="greedy evaluation, 95 % interval" if known else "greedy evaluation",
            x=np.array([float(row[x]) for row in rows]),
            y=np.array([float(row[name]) for row in rows]),
            low=np.array(bound["low"], dtype=np.float64) if known else None,
            high=np.array(bound["high"], dtype=np.float64) if known else None,
            color=1,
        ),
    )


def _along(episodes: Episodes, x: str, names: Sequence[str]) -> tuple[Floats, Floats] | None:
    """The column `x` and one of `names`, where both have numbers."""
    at, values = episodes.column((x,)), episodes.column(names)
    if at is None or values is None:
        return None
    known = np.isfinite(at) & np.isfinite(values)
    return (at[known], values[known]) if known.any() else None


def _line(curve: Curve, name: str, color: int = 0) -> Line:
    return Line(name=name, x=curve.x, y=curve.y, low=curve.low, high=curve.high, color=color)


def _return_chart(run: RunFiles, key: str, axis: Axis, x: str) -> Chart | None:
    found = _along(run.episodes, x, ("return",))
    lines = (_line(spread_curve(*found), "training episodes, mean"),) if found else ()
    points = _evaluated(run, x, "mean_reward")
    if not lines and not points:
        return None
    note = "band: the middle 80 % of the episodes" if lines else ""
    title = f"Return per episode over {OVER_WORDS[key]}"
    return XY(name=f"return_over_{key}", title=title, note=note, x=axis, y=Axis("return per episode"), lines=lines,
              points=points)  # fmt: skip


def _win_chart(run: RunFiles, key: str, axis: Axis, x: str) -> Chart | None:
    found = _along(run.episodes, x, WIN_KEYS)
    lines = (_line(rate_curve(found[0], np.clip(found[1], 0, 1)), "training episodes"),) if found else ()
    points = _evaluated(run, x, "win_rate")
    if not lines and not points:
        return None
    note = "band: 95 % interval of each stretch" if lines else ""
    return XY(name=f"win_rate_over_{key}", title=f"Win rate over {OVER_WORDS[key]}", note=note, x=axis,
              y=Axis("win rate", "share"), lines=lines, points=points)  # fmt: skip


def _score_chart(run: RunFiles) -> Chart | None:
    found = _along(run.episodes, "env_steps", SCORE_KEYS)
    if found is None:
        return None
    lines = (_line(spread_curve(*found), "training episodes, mean"),)
    return XY(name="score_difference", title="Score difference over env steps", lines=lines, x=STEPS,
              note="above 0: ahead of the opponents; band: the middle 80 % of the episodes",
              y=Axis("score difference"), points=_evaluated(run, "env_steps", "score_diff"))  # fmt: skip


def _terms_chart(episodes: Episodes, terms: Mapping[str, Any]) -> Chart | None:
    """Means of the reward's terms; the largest ones where there are many."""
    sizes = {name: abs(as_number(value) or 0.0) for name, value in terms.items()}
    lines = []
    for place, name in enumerate(sorted(sizes, key=lambda name: -sizes[name])[:MOST_TERMS]):
        if found := _along(episodes, "env_steps", (TERM + name,)):
            curve = spread_curve(*found)
            lines.append(Line(name=name, x=curve.x, y=curve.y, color=color_of(place)))
    if not lines:
        return None
    return XY(name="reward_terms", title="What the reward is made of", note="means of training episodes", x=STEPS,
              y=Axis("reward per episode"), lines=tuple(lines))  # fmt: skip


def ending_charts(run: RunFiles) -> list[Chart]:
    """How episodes ended: during training, and of the final policy."""
    charts: list[Chart] = []
    at = run.episodes.column(("env_steps",))
    names: list[str] = []
    if at is not None and run.episodes.reasons:
        steps, shares = name_shares(at, run.episodes.reasons, MOST_REASONS)
        names = list(shares)
        parts = tuple(Part(name=n, values=v, color=_reason_color(n, names)) for n, v in shares.items())
        charts.append(Area(name="endings_over_steps", title="How training episodes ended", x=STEPS,
                           y=Axis("share of episodes", "share"), at=steps, parts=parts))  # fmt: skip
    acting = {"greedy": run.quality, "sampled": as_mapping(run.quality.get("sampled"))}
    known = {name: as_mapping(result.get("end_reason")) for name, result in acting.items()}
    if final := endings({name: reasons for name, reasons in known.items() if reasons}, names):
        charts.append(final)
    return charts


def endings(by_name: Mapping[str, Mapping[str, Any]], order: Sequence[str] = ()) -> Split | None:
    """Shares of end reasons per name; those beyond `MOST_REASONS` together."""
    totals: dict[str, float] = {}
    for reasons in by_name.values():
        for reason, share in reasons.items():
            totals[reason] = totals.get(reason, 0.0) + (as_number(share) or 0.0)
    ranked = [name for name in order if name in totals] + sorted(totals.keys() - set(order), key=lambda n: -totals[n])
    kept = ranked if len(ranked) <= MOST_REASONS else ranked[: MOST_REASONS - 1]
    if not kept:
        return None
    colors = list(order) + [name for name in kept if name not in order]
    values = {n: np.array([as_number(reasons.get(n)) or 0.0 for reasons in by_name.values()]) for n in kept}
    parts = [Part(name=n, values=v, color=_reason_color(n, colors)) for n, v in values.items()]
    if len(kept) < len(ranked):
        rest = np.clip(1.0 - sum(values.values(), np.zeros(len(by_name))), 0.0, 1.0)
        parts.append(Part(name="others", values=rest, color=GREY))
    return Split(name="endings", title="How evaluated episodes ended", names=tuple(by_name), parts=tuple(parts))


def _reason_color(name: str, order: Sequence[str]) -> int:
    return GREY if name == "others" else color_of(order.index(name))


def time_charts(run: RunFiles, windows: Windows | None) -> list[Chart]:
    """Phases as bars and along the run; throughput, load and memory."""
    charts: list[Chart] = []
    phases = phase_ms(run.total)
    wall = sum(phases.values())
    if wall:
        ranked = sorted(phases.items(), key=lambda item: -item[1])
        rows = tuple(
            Row(
                name=PHASE_WORDS[p], value=v / wall, color=PHASE_COLORS[p], text=f"{percent(v / wall)} · {number(v)} ms"
            )
            for p, v in ranked
        )
        charts.append(Rows(name="phases", title="Where the main thread's time went", rows=rows,
                           value=Axis("share of the time", "share"),
                           note="ms: milliseconds per 1,000 env steps"))  # fmt: skip
    return charts + (_window_charts(windows) if windows is not None else [])


def _window_charts(windows: Windows) -> list[Chart]:
    axis = WALL if windows.in_seconds else Axis("[PERF] line")
    parts = tuple(
        Part(name=PHASE_WORDS[phase], values=share, color=PHASE_COLORS[phase])
        for phase, share in windows.shares().items()
    )
    speed = Line(name="", x=_begin(windows.ends), y=_hold(windows.steps_per_s), stepped=True)
    charts: list[Chart] = [
        Area(name="phases_over_time", title="Phases along the run", x=axis, y=Axis("share of the time", "share"),
             at=windows.ends, parts=parts, stepped=True),
        XY(name="throughput", title="Throughput along the run", x=axis, y=Axis("env steps/s"), lines=(speed,),
           from_zero=True),
    ]  # fmt: skip
    loads = [("CPU, of all cores", windows.cpu, 1), ("GPU", windows.gpu, 2)]
    lines = tuple(
        Line(name=name, x=_begin(windows.ends), y=_hold(values), color=color, stepped=True)
        for name, values, color in loads
        if np.isfinite(values).mean() > 0.5  # else a line of holes
    )
    if lines:
        named = " and ".join(line.name.split(",")[0] for line in lines)
        charts.append(XY(name="load", title=f"{named} load along the run", x=axis,
                         y=Axis("busy", "share"), lines=lines, from_zero=True,
                         note="CPU: this process and its children, of all cores"))  # fmt: skip
    if np.isfinite(windows.memory_bytes).any():
        memory = Line(name="", x=_begin(windows.ends), y=_hold(windows.memory_bytes / 1e6), color=6, stepped=True)
        charts.append(XY(name="memory", title="Memory along the run", x=axis, y=Axis("resident memory (MB)"),
                         lines=(memory,), from_zero=True, note="this process and its children"))  # fmt: skip
    return charts


def _begin(ends: Floats) -> Floats:
    return np.concatenate([[0.0], ends])


def _hold(values: Floats) -> Floats:
    return np.concatenate([values[:1], values])


def elo_chart(self_play: Mapping[str, Any]) -> Chart | None:
    """Ratings of the pool's snapshots over when they were taken; the learner's own as a level."""
    rows = [row for row in as_rows(self_play.get("pool")) if as_number(row.get("env_steps")) is not None]
    rows = sorted(
        (row for row in rows if as_number(row.get("elo")) is not None), key=lambda row: float(row["env_steps"])
    )
    if not rows:
        return None
    x, y = (np.array([float(row[name]) for row in rows]) for name in ("env_steps", "elo"))
    learner = as_number(self_play.get("elo"))
    levels = () if learner is None else (Level(learner, f"learner now: {learner:,.0f}"),)
    return XY(name="elo", title="Elo of the snapshots in the pool", x=Axis("taken at env step", "steps"),
              y=Axis("Elo"), lines=(Line(name="", x=x, y=y),), points=(Points(name="", x=x, y=y),), levels=levels,
              note="from the learner's games; an untrained policy began with 1,000")  # fmt: skip
