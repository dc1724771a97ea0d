"""A comparison on the terminal: speed, quality, and one sentence per candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fasttrain.runs.console import say
from fasttrain.runs.env_text import one_line
from fasttrain.runs.tables import FittingTable
from fasttrain.studies.judge import FIGURES, TITLES, Row
from fasttrain.studies.statistics import OPEN, PASS, Comparison, Interval

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
