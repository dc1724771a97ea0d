"""`fasttrain compare candidates=[baseline,speed]`: is it faster, and does it learn as well?

Every candidate trains with the same seeds; each training is a process. Candidates take turns (A B C, A B C …), so that
a machine that slows down slows all candidates. Each is compared with the first candidate, by the rules in `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_GATE_FAILED, EXIT_STOPPED, ConfigError
from fasttrain.runs.view import FittingTable, make_console, say
from fasttrain.terminal import one_line, with_interval
from fasttrain_studies.ablate import ablate, is_ablation
from fasttrain_studies.beside import run_beside
from fasttrain_studies.judge import FIGURES, Row, choose_metric, choose_threshold, is_rate, judge, read_outcome
from fasttrain_studies.settings import Config
from fasttrain_studies.statistics import FAIL, MIN_PAIRS, MIN_SPEED_UP, OPEN, PASS, Interval
from fasttrain_studies.study import Compose, Study, Wanted, base_overrides, merged

ENDLESS = 10**12  # total_timesteps if minutes=… ends the trainings
STYLES = {"pass": "green", "fail": "bold red", "not enough seeds": "yellow"}
TITLES = {"win_rate": "win rate", "mean_reward": "mean reward", "tail": "training's last fifth"}  # titles of metrics


class Candidate(NamedTuple):
    """A candidate's name and overrides."""

    name: str
    overrides: tuple[str, ...]


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Run the trainings that are missing, judge, write study.json and the report.

    Returns 3 if a candidate failed the gate, 4 if stopped by a signal, 1 if a run crashed, else 0. Raises ConfigError
    if a candidate is no valid run.
    """
    if is_ablation(config):
        return ablate(config, sources, folder, overrides, compose)
    candidates = parse_candidates(config.candidates)
    base = [*base_overrides(overrides), *_horizon(config, sources)]
    cells = {each.name: tuple(merged(base, each.overrides)) for each in candidates}
    algorithms = [_checked(name, cells[name], compose).algo.name for name in cells]
    study = Study("compare", folder, overrides, make_console(), config.on_existing == "overwrite")
    seeds = range(config.seed, config.seed + config.seeds)
    study.say(f"compare: {', '.join(cells)}; {config.seeds} seeds, {len(cells) * config.seeds} trainings")
    wanted = [Wanted(name, seed, cells[name]) for seed in seeds for name in cells]
    stopped = False
    try:
        if config.sweep.max_parallel in ("auto", 1):
            study.run(wanted)
        else:
            run_beside(study, wanted, int(config.sweep.max_parallel))
    except KeyboardInterrupt:
        stopped = True
    rows = conclude(study, config, candidates, wanted, algorithms)
    if stopped:
        return EXIT_STOPPED
    if any(row.verdict == FAIL for row in rows):
        return EXIT_GATE_FAILED
    return EXIT_CRASHED if study.failed(wanted) else EXIT_DONE


def conclude(
    study: Study, config: Config, candidates: Sequence[Candidate], wanted: Sequence[Wanted], algorithms: Sequence[str]
) -> list[Row]:
    """Judge the finished trainings; print the result and store it in study.json."""
    outcomes = {
        label: {seed: read_outcome(cell) for seed, cell in cells.items()}
        for label, cells in study.finished(wanted).items()
    }
    every = [outcome for by_seed in outcomes.values() for outcome in by_seed.values()]
    study.notes["candidates"] = [{"name": name, "overrides": list(more)} for name, more in candidates]
    rows: list[Row] = []
    if every:
        metric = choose_metric(every, config.gate, algorithms)
        threshold = choose_threshold(list(outcomes[candidates[0].name].values()), config.gate)
        rows = judge(outcomes, config.gate, metric, threshold)
        study.notes["rows"] = [row.to_dict() for row in rows]
        study.notes["gate"] = {
            "metric": metric, "threshold": threshold, "curve_of": every[0].curve_of,
            "margin": next((row.comparison.margin for row in rows if row.comparison is not None), None),
            "min_speed_up": MIN_SPEED_UP, "min_pairs": MIN_PAIRS,
        }  # fmt: skip
        show_comparison(study.console, rows, study.notes["gate"])
    study.conclude(study.failed(wanted))
    return rows


def parse_candidates(text: str | None) -> list[Candidate]:
    """`[baseline, speed, num_envs=8, {name: mine, overrides: [profile=speed, num_envs=8]}]` → candidates.

    A bare word names a profile; `key=value` is a candidate with that override. Raises ConfigError if the text is no
    list of these, has fewer than two entries, or has two entries with the same name.
    """
    example = "candidates='[baseline, speed, {name: mine, overrides: [profile=speed, num_envs=8]}]'"
    if text is None:
        raise ConfigError(f"compare needs {example}")
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"candidates={text}: cannot be read as a list; write {example}, and put overrides with brackets in quotes"
        ) from error
    if not isinstance(entries, list):
        raise ConfigError(f"candidates={text}: expected a list; write {example}")
    candidates = [_candidate(entry, example) for entry in entries]
    names = [candidate.name for candidate in candidates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"candidates={text}: two candidates are called {twice}; rename one of them")
    if len(candidates) < 2:
        raise ConfigError(f"candidates={text}: a comparison needs at least two; the first is the baseline")
    return candidates


def _candidate(entry: object, example: str) -> Candidate:
    if isinstance(entry, str) and entry:
        return Candidate(entry, (entry if "=" in entry else f"profile={entry}",))
    if isinstance(entry, dict) and set(entry) == {"name", "overrides"} and isinstance(entry["overrides"], list):
        name, overrides = entry["name"], [str(override) for override in entry["overrides"]]
        if wrong := next((text for text in overrides if text.startswith("-") or "=" not in text[1:]), None):
            raise ConfigError(f"candidates: {wrong!r} of {name} is no key=value; write {example}")
        if isinstance(name, str) and name:
            return Candidate(name, tuple(overrides))
    raise ConfigError(f"candidates: cannot read {entry!r}; write {example}")


def _horizon(config: Config, sources: Mapping[str, str]) -> list[str]:
    """Overrides that end a training after `config.minutes`. Raises ConfigError if a schedule needs total_timesteps."""
    if config.minutes is None:
        return []
    ends = [f"stop.max_minutes={config.minutes:g}"]
    if "total_timesteps" in sources:
        return ends
    schedules = (str(getattr(config.algo, key, "")) for key in ("learning_rate", "clip_range"))
    if config.algo.spec.stretches or any(schedule.startswith("linear") for schedule in schedules):
        raise ConfigError(
            f"minutes={config.minutes:g}: exploration and schedules depend on total_timesteps; set "
            "total_timesteps too: about as many steps as the fastest candidate will make"
        )
    return [*ends, f"total_timesteps={ENDLESS}"]


def _checked(name: str, overrides: Sequence[str], compose: Compose) -> Config:
    try:
        return compose(overrides)
    except ConfigError as error:
        raise ConfigError(f"candidate {name}: {error}") from error


# --- tables and verdicts


def show_comparison(console: Console, rows: Sequence[Row], gate: Mapping[str, Any]) -> None:
    """Print two tables and the verdicts. `gate` as in study.json."""
    console.print("\nSpeed (interquartile mean over seeds, 95 % intervals)", style="bold", highlight=False)
    console.print(_speed_table(rows, gate))
    console.print("\nQuality (final greedy policy, what the env reports)", style="bold", highlight=False)
    console.print(_quality_table(rows))
    for row in rows:
        ends = ", ".join(f"{name} {100 * share:.0f} %" for name, share in row.end_reason.items())
        say(console, f"  {row.name}: how episodes ended: {ends or 'no evaluation'}", style="dim")
    console.print()
    for row in rows[1:]:
        say(console, sentence(row, gate), style=STYLES.get(row.verdict or "", ""))


def sentence(row: Row, gate: Mapping[str, Any]) -> str:
    """`speed: PASS, 12.1× [11.8, 12.5] as fast; win rate +0.4 [-1.2, +2.0] points, margin 3 (5 seeds)`."""
    found, metric = row.comparison, TITLES.get(gate["metric"], gate["metric"])
    if row.speed_up is None:
        return f"{row.name}: no seed finished in both this candidate and the baseline"
    if found is None:
        return f"{row.name}: no verdict, {row.speed_up.text()} as fast; no {metric} of a seed is known on both sides"
    scale, unit = (100.0, " points") if is_rate(gate["metric"], gate["curve_of"]) else (1.0, "")
    low, high = (f"{scale * bound:+.3g}" if math.isfinite(bound) else "?" for bound in (found.low, found.high))
    difference = f"{metric} {scale * found.difference:+.3g} [{low}, {high}]{unit}"
    facts = f"{difference}, margin {scale * found.margin:.3g} ({found.pairs} seeds)"
    speed = f"{row.speed_up.text()} as fast"
    if not row.faster:
        speed += f", less than the {gate['min_speed_up']:g}× that trade-offs are worth"
    if found.verdict == OPEN and found.seeds_needed is None:
        facts += f"; use at least {gate['min_pairs']} seeds"
    elif found.verdict == OPEN:
        facts += f"; about {found.seeds_needed} are enough for a verdict, if the two learn equally well"
    return f"{row.name}: {found.verdict.upper()}, {speed}; {facts}"


def cell_text(interval: Interval | None, scale: float = 1.0, form: str = "{:.3g}") -> str:
    """`61.3 [60.1, 62.4]`; a dash without a value, `never` for an infinite time."""
    return "-" if interval is None else with_interval(interval.value, (interval.low, interval.high), form, scale)


def _speed_table(rows: Sequence[Row], gate: Mapping[str, Any]) -> FittingTable:
    seconds = "seconds" if gate["threshold"] is None else f"seconds to {gate['threshold']:.3g}"
    table = FittingTable(["candidate", "seeds", "steps/s", "speed-up", "env steps", "updates", seconds, "reward/h"])
    for row in rows:
        figures = row.figures
        table.add_row(
            row.name,
            str(len(row.outcomes)),
            cell_text(figures["steps_per_s"], form="{:,.0f}"),
            "1 (the measure)" if row is rows[0] else "-" if row.speed_up is None else row.speed_up.text(),
            "-" if (found := figures["env_steps"]) is None else f"{found.value:,.0f}",
            "-" if (found := figures["updates"]) is None else f"{found.value:,.0f}",
            cell_text(row.time_s, form="{:,.0f}"),
            cell_text(figures["reward_per_hour"], form="{:,.3g}"),
        )
    return table


# Title of the column, name of the figure, scale, format.
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
    known = {name for _, name, _, _ in QUALITY} | set(FIGURES)
    own = dict.fromkeys(name for row in rows for name in row.figures if name not in known)  # from env.result.scores
    columns = [*QUALITY, *((one_line(name), name, 1.0, "{:.3g}") for name in own)]
    shown = [column for column in columns if any(row.figures.get(column[1]) is not None for row in rows)]
    table = FittingTable(["candidate", *(title for title, _, _, _ in shown), "verdict"])
    for row in rows:
        texts = [cell_text(row.figures.get(name), scale, form) for _, name, scale, form in shown]
        verdict = row.verdict or ("baseline" if row is rows[0] else "-")
        table.add_row(row.name, *texts, verdict, style="bold" if verdict == PASS else "")
    return table
