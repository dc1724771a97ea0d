"""`fasttrain population=8`: trains several models side by side, and says which is the best.

Each model is a training of its own, in a process with cores of its own. Without exchanges a model's results are those
of a single run on these cores. The processes are forked (`warm`), so that all models together import and compile once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError, naming
from fasttrain.machine import usable_cores
from fasttrain.runs.folders import in_quotes
from fasttrain.runs.view import FittingTable, activity, figure_text, make_console
from fasttrain.saving.files import read_json
from fasttrain.spec.precedence import TYPED
from fasttrain.terminal import near, spelt, with_interval
from fasttrain_studies import exchanges
from fasttrain_studies.beside import run_beside
from fasttrain_studies.settings import Config
from fasttrain_studies.space import Point, check_key, converted, label_of
from fasttrain_studies.statistics import t_interval
from fasttrain_studies.study import Cell, Compose, Study, Wanted, base_overrides, merged, run_cell

FRESH = 7919  # added to eval.seed, for the games on which the best model is measured again
PLAIN = "model"  # name of the models, if they differ only in their seed


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Train the models that are not finished; print a table, write study.json and the report.

    Returns 4 if stopped by a signal, 1 if a model failed, else 0. Raises ConfigError if a setting is wrong.
    """
    if files := [key for key, source in sources.items() if key.startswith("population.") and source != TYPED]:
        raise ConfigError(f"{files[0]} stands in a file, which each model would read too: type population=… instead")
    wanted = members_of(config, overrides)
    for member in {each.label: each for each in wanted}.values():
        with naming(f"population.settings: {member.label}"):
            compose(member.overrides)
    study = Study("population", folder, overrides, make_console(), config.on_existing == "overwrite")
    auto = min(usable_cores(), len(wanted))
    parallel = auto if config.sweep.max_parallel == "auto" else config.sweep.max_parallel
    try:
        if config.population.exchange_every:
            exchanges.train(study, config, wanted, parallel)
        else:
            run_beside(study, wanted, parallel)
    except KeyboardInterrupt:
        store(study, config, wanted)
        return EXIT_STOPPED
    conclude(study, config, wanted)
    return EXIT_CRASHED if study.failed(wanted) else EXIT_DONE


def members_of(config: Config, overrides: Sequence[str]) -> list[Wanted]:
    """The models. Raises ConfigError for settings that no training has."""
    own, base = config.population, base_overrides(overrides)
    if own.size < 2:
        raise ConfigError("population=1: a population needs at least two models; without it: fasttrain train")
    if own.explore and not own.exchange_every:
        raise ConfigError("population.explore has no effect without population.exchange_every")
    points: list[Point] = [dict(each) for each in own.settings] or [{}]
    for point in points:
        for key, value in point.items():
            check_key("population.settings", key)
            converted(config, f"population.settings: {key}", key, [value])
    exchanges.check(config)
    members = []
    for number in range(own.size):
        turn, index = divmod(number, len(points))
        typed = [f"{key}={typed_value(value)}" for key, value in points[index].items()]
        label = label_of(points[index]) if points[index] else PLAIN
        members.append(Wanted(label, config.seed + turn, tuple(merged(base, typed))))
    return exchanges.spread(config, members)


def typed_value(value: object) -> str:
    """A value as an override of Hydra."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {typed_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(typed_value, value))}]"
    return in_quotes(value) if isinstance(value, str) else spelt(value)


def name_of(member: Wanted) -> str:
    return f"{member.label} seed {member.seed}"


def store(study: Study, config: Config, members: Sequence[Wanted]) -> list[tuple[Wanted, Cell]]:
    """Write the finished models into study.json, the best first. Returns them in this order."""
    found = [(member, cell) for member in members if (cell := study.find(member)) is not None]
    metric = exchanges.metric_of([cell.summary["quality"] for _, cell in found])
    found.sort(key=lambda each: -_value(each[1], metric))
    changing = exchanges.changing(config)
    study.notes["rows"] = [
        {"name": name_of(member), **figures_of(cell), **({"settings": settings_of(cell, changing)} if changing else {})}
        for member, cell in found
    ]
    study.store()
    return found


def _value(cell: Cell, metric: str) -> float:
    value = cell.summary["quality"].get(metric)
    return -math.inf if value is None else float(value)


def settings_of(cell: Cell, keys: Sequence[str]) -> dict[str, Any]:
    """The last values of these settings, which exchanges may have changed."""
    algo = read_json(cell.folder / "plan.json")["config"]["algo"]
    return {key: algo.get(key.removeprefix("algo.")) for key in keys}


def figures_of(cell: Cell) -> dict[str, Any]:
    """Speed and quality of a model, as the report reads them."""
    quality = cell.summary["quality"]
    found: dict[str, Any] = {"steps_per_s": cell.rate}
    for name in ("mean_reward", "win_rate"):
        if (value := quality.get(name)) is not None:
            low, high = (quality.get("ci95") or {}).get(name) or (value, value)
            found[name] = {"value": value, "low": low, "high": high}
    return found


def conclude(study: Study, config: Config, members: Sequence[Wanted]) -> None:
    """Print the table and the best model, and measure it again on games that were not used to choose it."""
    models = store(study, config, members)
    changing = exchanges.changing(config)
    names = ["model", "steps/s", "mean reward [95 %]", "win rate [95 %]", "trained"]
    table = FittingTable([*names, *["settings at the end"] * bool(changing), "folder"])
    for member, cell in models:
        quality = cell.summary["quality"]
        table.add_row(
            name_of(member),
            f"{cell.rate:,.0f}",
            figure_text(quality, "mean_reward", "{:.3g}"),
            figure_text(quality, "win_rate", "{:.1f}", 100),
            f"{cell.summary['env_steps']:,}",
            *([label_of(settings_of(cell, changing))] if changing else []),
            str(cell.folder.relative_to(study.folder)),
        )
    study.console.print(table)
    metric = exchanges.metric_of([cell.summary["quality"] for _, cell in models])
    apart = not config.population.exchange_every  # models that were copied are no independent seeds
    for label in dict.fromkeys(member.label for member, _ in models if apart):
        _tell_mean(study, label, metric, [cell for member, cell in models if member.label == label])
    frozen = study.failed(members)
    for cell in frozen:
        study.say(f"ended by an error: {cell.label} seed {cell.seed} after {_steps(cell):,} steps: {cell.error}")
    if models and config.eval.episodes:
        _tell_best(study, config, *models[0], metric)
    study.conclude(frozen)


def _steps(cell: Cell) -> int:
    return int(read_json(cell.folder / "summary.json").get("env_steps") or 0)


def _tell_mean(study: Study, label: str, metric: str, cells: Sequence[Cell]) -> None:
    values = [value for cell in cells if (value := cell.summary["quality"].get(metric)) is not None]
    if len(values) > 1:
        mean = with_interval(fmean(values), t_interval(np.array(values)), "{:.3g}")
        study.say(f"{label}: {metric.replace('_', ' ')} {mean} over {len(values)} seeds")


def _tell_best(study: Study, config: Config, member: Wanted, cell: Cell, metric: str) -> None:
    """Print the best model's result, also on games with other seeds: the best of several is partly the luckiest."""
    folder = study.folder / "best"
    with activity(study.console, "evaluating the best model on other games"):
        typed = [f"run={cell.folder}", f"eval.seed={config.eval.seed + FRESH}"]
        again, _ = run_cell("eval", typed, folder)
    found = read_json(folder / "eval.json").get("quality", {}).get("greedy", {})
    before = cell.summary["quality"].get(metric)
    text = f"best: {name_of(member)}: {metric.replace('_', ' ')} {with_interval(before, None, '{:.3g}')}"
    if again.exit_code == EXIT_DONE and found.get(metric) is not None:
        text += f", on other games {figure_text(found, metric, '{:.3g}')}"
        study.notes["best"] = {"model": name_of(member), "folder": str(cell.folder.relative_to(study.folder)),
                               metric: found[metric]}  # fmt: skip
    study.say(f"{text}; {near(cell.folder)}")
