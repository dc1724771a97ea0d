"""Candidates compared: rows of speed and quality with intervals, verdicts beside the first, tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from fasttrain.runs.view import FittingTable, say
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.config import GateConfig
from fasttrain.studies.outcome import Outcome
from fasttrain.studies.statistics import (
    OPEN,
    PASS,
    Comparison,
    Interval,
    compare,
    margin_of,
    median_time,
    ratio_interval,
    stratified_interval,
)
from fasttrain.terminal import one_line

STYLES = {"pass": "green", "fail": "bold red", "not enough seeds": "yellow"}


def show_comparison(console: Console, rows: Sequence[Row], gate: Mapping[str, Any]) -> None:
    """Two tables and the verdicts. `gate`: metric, threshold, curve_of, margin, min_speed_up as in study.json."""
    console.print("\nSpeed (interquartile mean over seeds, 95 % intervals)", style="bold", highlight=False)
    console.print(_speed_table(rows, gate))
    console.print(
        "\nQuality (final greedy policy; what the env does not tell is left out)", style="bold", highlight=False
    )
    console.print(_quality_table(rows))
    for row in rows:
        ends = ", ".join(f"{name} {100 * share:.0f} %" for name, share in row.end_reason.items())
        say(console, f"  {row.name} ends: {ends}", style="dim")
    console.print()
    for row in rows[1:]:
        say(console, sentence(row, gate), style=STYLES.get(row.verdict or "", ""))


def sentence(row: Row, gate: Mapping[str, Any]) -> str:
    """`speed: PASS, 12.1× [11.8, 12.5] as fast; win rate +0.4 [-1.2, +2.0] points, margin 3 (5 seeds)`."""
    found = row.comparison
    if found is None or row.speed_up is None:
        return f"{row.name}: no seed finished that the baseline finished too"
    scale, unit = _unit(gate)
    low, high = (f"{scale * bound:+.3g}" if math.isfinite(bound) else "?" for bound in (found.low, found.high))
    difference = f"{TITLES.get(gate['metric'], gate['metric'])} {scale * found.difference:+.3g} [{low}, {high}]{unit}"
    facts = f"{difference}, margin {scale * found.margin:.3g} ({found.pairs} seeds)"
    speed = f"{ratio(row.speed_up)} as fast"
    if not row.faster:
        speed += f", less than the {gate['min_speed_up']:g}× that trade-offs are worth"
    return f"{row.name}: {found.verdict.upper()}, {speed}; {facts}{_more_seeds(found, gate)}"


def _more_seeds(found: Comparison, gate: Mapping[str, Any]) -> str:
    if found.verdict != OPEN:
        return ""
    if found.seeds_needed is None:
        return f"; take at least {gate['min_pairs']} seeds"
    return f"; about {found.seeds_needed} would tell, if the two learn alike"


def _unit(gate: Mapping[str, Any]) -> tuple[float, str]:
    rate = gate["metric"] == "win_rate" or (gate["metric"] == "tail" and gate["curve_of"] == "win rate")
    return (100.0, " points") if rate else (1.0, "")


def ratio(interval: Interval) -> str:
    """`2.31× [2.2, 2.5]`."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return f"{interval.value:.2f}×"
    return f"{interval.value:.2f}× [{interval.low:.2f}, {interval.high:.2f}]"


def cell_text(interval: Interval | None, scale: float = 1.0, form: str = "{:.3g}") -> str:
    """`61.3 [60.1, 62.4]`; a dash where there is nothing, `never` for what did not happen."""
    if interval is None:
        return "-"
    texts = [form.format(scale * value) if math.isfinite(value) else "never" for value in _bounds(interval)]
    if math.isinf(interval.low):
        return texts[0]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _speed_table(rows: Sequence[Row], gate: Mapping[str, Any]) -> FittingTable:
    seconds = "seconds" if gate["threshold"] is None else f"seconds to {gate['threshold']:.3g}"
    table = FittingTable(["candidate", "seeds", "steps/s", "speed-up", "env steps", "updates", seconds, "reward/h"])
    for row in rows:
        figures = row.figures
        table.add_row(
            row.name,
            str(len(row.outcomes)),
            cell_text(figures["steps_per_s"], form="{:,.0f}"),
            "1 (the measure)" if row is rows[0] else "-" if row.speed_up is None else ratio(row.speed_up),
            _value(figures["env_steps"]),
            _value(figures["updates"]),
            cell_text(row.time_s, form="{:,.0f}"),
            cell_text(figures["reward_per_hour"], form="{:,.3g}"),
        )
    return table


def _value(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:,.0f}"


# Title, name of the figure, scale, form.
QUALITY = (
    ("win rate %", "win_rate", 100.0, "{:.1f}"),
    ("draws %", "draw_rate", 100.0, "{:.1f}"),
    ("mean reward", "mean_reward", 1.0, "{:.3g}"),
    ("score diff.", "score_diff", 1.0, "{:.1f}"),
    ("turns", "mean_turns", 1.0, "{:.1f}"),
    ("training's last fifth", "tail", 1.0, "{:.3g}"),
    ("whole curve", "sample_efficiency", 1.0, "{:.3g}"),
    ("Elo", "elo", 1.0, "{:.0f}"),
)


def _quality_table(rows: Sequence[Row]) -> FittingTable:
    known = {name for _, name, _, _ in QUALITY} | FIGURES.keys()
    own = dict.fromkeys(name for row in rows for name in row.figures if name not in known)  # of env.score_keys
    columns = [*QUALITY, *((one_line(name), name, 1.0, "{:.3g}") for name in own)]
    shown = [column for column in columns if any(row.figures.get(column[1]) is not None for row in rows)]
    table = FittingTable(["candidate", *(title for title, _, _, _ in shown), "verdict"])
    for row in rows:
        texts = [cell_text(row.figures.get(name), scale, form) for _, name, scale, form in shown]
        verdict = row.verdict or ("baseline" if row is rows[0] else "-")
        table.add_row(row.name, *texts, verdict, style="bold" if verdict == PASS else "")
    return table


RISE = 0.9  # share of the baseline's rise that counts as learned, where no threshold was named
TITLES = {"win_rate": "win rate", "mean_reward": "mean reward", "tail": "training's last fifth"}  # else its own name


@dataclass(frozen=True)
class Row:
    """One candidate over all its seeds. `None` where the env does not tell, or there is nothing to compare with."""

    name: str
    outcomes: Mapping[int, Outcome]
    figures: dict[str, Interval | None]  # of the names in FIGURES
    end_reason: dict[str, float]
    time_s: Interval | None  # of training, to the threshold; infinite: half of the seeds never came there
    time_steps: Interval | None
    speed_up: Interval | None
    comparison: Comparison | None
    faster: bool | None

    @property
    def verdict(self) -> str | None:
        """Of quality: pass, fail, not enough seeds; None of the baseline."""
        return None if self.comparison is None else self.comparison.verdict

    def to_dict(self) -> dict[str, Any]:
        """For study.json."""
        intervals: dict[str, Interval | None] = {
            **self.figures,
            "time_to_threshold_s": self.time_s,
            "time_to_threshold_steps": self.time_steps,
            "speed_up": self.speed_up,
        }
        found = self.comparison
        difference = None if found is None else Interval(found.difference, found.low, found.high).to_dict()
        return {
            "name": self.name,
            "seeds": sorted(self.outcomes),
            **{key: None if value is None else value.to_dict() for key, value in intervals.items()},
            "end_reason": self.end_reason,
            "difference": difference,
            "bootstrap": None if found is None else list(found.bootstrap),
            "verdict": self.verdict,
            "seeds_needed": None if found is None else found.seeds_needed,
            "faster": self.faster,
        }


def _from_summary(key: str) -> Callable[[Outcome], float | None]:
    def read(outcome: Outcome) -> float | None:
        value = outcome.summary.get(key)
        return None if value is None else float(value)

    return read


def _from_quality(key: str) -> Callable[[Outcome], float | None]:
    return lambda outcome: outcome.quality(key)


def _elo(outcome: Outcome) -> float | None:
    value = (outcome.summary.get("self_play") or {}).get("elo")
    return None if value is None else float(value)


# Name → a run's value of it. Shown as the interquartile mean over seeds with a bootstrap interval.
FIGURES: dict[str, Callable[[Outcome], float | None]] = {
    "steps_per_s": _from_summary("steps_per_s"),
    "env_steps": _from_summary("env_steps"),
    "updates": _from_summary("updates"),
    "reward_per_hour": _from_summary("reward_per_hour"),
    "win_rate": _from_quality("win_rate"),
    "mean_reward": _from_quality("mean_reward"),
    "score_diff": _from_quality("score_diff"),
    "draw_rate": _from_quality("draw_rate"),
    "mean_turns": _from_quality("mean_turns"),
    "tail": lambda outcome: outcome.tail(),
    "elo": _elo,
}


def choose_metric(outcomes: Sequence[Outcome], gate: GateConfig, algorithms: Sequence[str]) -> str:
    """What is judged. A greedy policy of DQN's kind is another after every update (CartPole: 9 or 500): its tail."""
    if gate.metric != "auto":
        return gate.metric
    if any(ALGORITHMS[name].greedy for name in algorithms):
        return "tail"
    told = all(outcome.quality("win_rate") is not None for outcome in outcomes)
    return "win_rate" if told else "mean_reward"


def choose_threshold(baseline: Sequence[Outcome], gate: GateConfig) -> float | None:
    """The gate's, else 90 % of what the baseline's training curve rose by (median of its seeds); None: it did not."""
    if gate.threshold is not None:
        return gate.threshold
    found = []
    for outcome in baseline:
        first, last = outcome.begins_with(), outcome.tail()
        if first is not None and last is not None and last > first:
            found.append(first + RISE * (last - first))
    return float(np.median(found)) if 2 * len(found) > len(baseline) else None


def judge(
    candidates: Mapping[str, Mapping[int, Outcome]], gate: GateConfig, metric: str, threshold: float | None
) -> list[Row]:
    """A row for every candidate that has an outcome; the first candidate is the baseline of all others.

    Args:
        candidates: name → seed → outcome.
        metric: win_rate, mean_reward or tail.
    """
    names = list(candidates)
    baseline = candidates[names[0]]
    every = [outcome for of_seed in candidates.values() for outcome in of_seed.values()]
    common = min((outcome.total for outcome in every), default=0.0)
    rows = []
    for name, outcomes in candidates.items():
        if outcomes:
            other = baseline if name != names[0] and baseline.keys() & outcomes.keys() else None
            rows.append(_row(name, outcomes, other, (gate, metric, threshold, common)))
    return rows


def _row(
    name: str,
    outcomes: Mapping[int, Outcome],
    baseline: Mapping[int, Outcome] | None,
    how: tuple[GateConfig, str, float | None, float],
) -> Row:
    gate, metric, threshold, common = how
    runs = list(outcomes.values())
    figures = {key: _interval([read(outcome) for outcome in runs]) for key, read in FIGURES.items()}
    for key in dict.fromkeys(key for outcome in runs for key in outcome.summary["quality"].get("scores", ())):
        figures[key] = _interval([outcome.quality(key) for outcome in runs])
    figures["sample_efficiency"] = _interval([outcome.efficiency(common) for outcome in runs])
    reached = [None if threshold is None else outcome.time_to(threshold) for outcome in runs]
    speed_up = comparison = None
    if baseline is not None:
        speed_up = ratio_interval(_speeds(outcomes), _speeds(baseline))
        comparison = _compared(outcomes, baseline, gate, metric)
    return Row(
        name=name,
        outcomes=outcomes,
        figures=figures,
        end_reason=_shares(runs),
        time_s=None if threshold is None else median_time([at and at[1] for at in reached]),
        time_steps=None if threshold is None else median_time([at and at[0] for at in reached]),
        speed_up=speed_up,
        comparison=comparison,
        faster=None if speed_up is None else speed_up.value >= gate.min_speed_up,
    )


def _interval(values: Sequence[float | None]) -> Interval | None:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return stratified_interval([known]) if len(known) == len(values) and len(known) else None


def _speeds(outcomes: Mapping[int, Outcome]) -> dict[int, float]:
    return {seed: outcome.steps_per_s for seed, outcome in outcomes.items()}


def values_of(outcomes: Mapping[int, Outcome], metric: str) -> dict[int, float]:
    """The metric by seed; seeds that do not tell it are left out."""
    read = FIGURES.get(metric) or _from_quality(metric)
    found = {seed: read(outcome) for seed, outcome in outcomes.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _compared(
    outcomes: Mapping[int, Outcome], baseline: Mapping[int, Outcome], gate: GateConfig, metric: str
) -> Comparison | None:
    ours, theirs = values_of(outcomes, metric), values_of(baseline, metric)
    if not ours.keys() & theirs.keys():
        return None
    margin = gate.margin
    if margin is None:
        margin = margin_of(theirs, is_rate(metric, next(iter(baseline.values()))))
    return compare(theirs, ours, margin, gate.min_pairs)


def is_rate(metric: str, outcome: Outcome) -> bool:
    """Whether the metric is a win rate, in 0..1."""
    return metric == "win_rate" or (metric == "tail" and outcome.curve_of == "win rate")


def _shares(runs: Sequence[Outcome]) -> dict[str, float]:
    """How episodes of the final evaluation ended, over all seeds."""
    total: Counter[str] = Counter()
    for outcome in runs:
        for reason, share in outcome.summary["quality"].get("end_reason", {}).items():
            total[reason] += share / len(runs)
    return dict(total.most_common())
