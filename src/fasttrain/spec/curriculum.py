"""The settings of a curriculum: which tasks there are, and how the task of each training episode is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import Named, did_you_mean, setting

WEIGHTS, LEARNABILITY = "weights", "learnability"
METRICS = ("win_rate", "reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumConfig:
    """Tasks of training episodes. A task is a set of options for `env.reset`. Evaluations play without a task."""

    tasks: dict[str, dict[str, Any]] = setting(
        {},
        "Tasks by name, each with the options for env.reset: {early: {rounds: [1, 3]}, late: {rounds: [8, 10]}}. "
        "An empty mapping of options is the whole game.",
    )
    weights: dict[str, float] = setting(
        {}, "How often each task is drawn: {late: 4}. A task that is not named has the weight 1."
    )
    schedule: tuple[Any, ...] = setting(
        (),
        "Stages, each with its beginning and its tasks: [[0, [early]], [1e6, [early, late]]]. A stage begins at a "
        "number of env steps, or when a mean over 100 episodes is reached: {win_rate: 0.6} or {reward: 3}. With "
        "back: 0.5 beside it, the training returns to the stage before when the mean falls below that.",
    )
    by: Named = setting(
        WEIGHTS,
        "weights draws by curriculum.weights. learnability also prefers tasks that are won in about half of their "
        "episodes. module:Class is a curriculum of yours.",
    )


class Stage(NamedTuple):
    """When a stage of the schedule begins, and which tasks are drawn in it."""

    begins: float  # env steps, or the value of `metric`
    metric: str | None  # win_rate or reward; None: env steps
    back: float  # if the mean falls below this, the training returns to the previous stage; -inf: never
    tasks: tuple[str, ...]


def stages_of(config: CurriculumConfig) -> tuple[Stage, ...]:
    """The stages of the schedule. Without a schedule there is one stage with all tasks.

    Raises ConfigError if an entry has a wrong form, names an unknown task, or begins before the previous stage.
    """
    if not config.schedule:
        return (Stage(0.0, None, -math.inf, tuple(config.tasks)),)
    stages = tuple(_stage(entry, config.tasks) for entry in config.schedule)
    if stages[0].metric is not None or stages[0].begins != 0:
        raise ConfigError(f"curriculum.schedule: the first stage must begin at 0, it is {config.schedule[0]}")
    steps = [stage.begins for stage in stages if stage.metric is None]
    if any(later <= before for before, later in pairwise(steps)):
        raise ConfigError(f"curriculum.schedule: each stage must begin later than the stage before it, not at {steps}")
    return stages


def _stage(entry: Any, tasks: Mapping[str, Any]) -> Stage:
    form = "[1e6, [late]] or [{win_rate: 0.6, back: 0.5}, [late]]"
    if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Sequence) and entry[1]):
        raise ConfigError(f"curriculum.schedule: expected a stage like {form}, got {entry}")
    begins, names = entry
    names = [names] if isinstance(names, str) else [*map(str, names)]  # because YAML reads a task called 1 as a number
    for name in names:
        _check_task("curriculum.schedule", name, tasks)
    if isinstance(begins, Mapping):
        metrics = [key for key in begins if key in METRICS]
        if len(metrics) != 1 or {*begins} - {*metrics, "back"}:
            raise ConfigError(f"curriculum.schedule: a stage begins at a value of {' or '.join(METRICS)}, got {begins}")
        value, back = _number(begins[metrics[0]]), _number(begins.get("back", -math.inf))
        if value is None or back is None or back >= value:
            raise ConfigError(f"curriculum.schedule: {begins} needs numbers, with `back` lower than {metrics[0]}")
        return Stage(value, metrics[0], back, tuple(names))
    if (steps := _number(begins)) is None or steps < 0:
        raise ConfigError(f"curriculum.schedule: expected a stage like {form}, got {entry}")
    return Stage(steps, None, -math.inf, tuple(names))


def _number(value: object) -> float | None:
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return None if isinstance(value, bool) or math.isnan(found) else found


def _check_task(key: str, name: object, tasks: Mapping[str, Any]) -> None:
    if name not in tasks:
        raise ConfigError(
            f"{key}: no task is called {name}{did_you_mean(str(name), tasks)}; curriculum.tasks has "
            f"{', '.join(map(str, tasks)) or 'none'}"
        )


def check_curriculum(config: CurriculumConfig) -> None:
    """Raises ConfigError if a task is unknown, a weight is negative, or all tasks of a stage have the weight 0."""
    used = {"weights": config.weights, "schedule": config.schedule, "by": config.by != WEIGHTS}
    if not config.tasks:
        for key in (key for key, value in used.items() if value):
            raise ConfigError(
                f"curriculum.{key} has no effect without tasks: name them by curriculum.tasks={{NAME: {{OPTION: …}}}}"
            )
        return
    if isinstance(config.by, str) and config.by not in (WEIGHTS, LEARNABILITY) and ":" not in config.by:
        raise ConfigError(
            f"curriculum.by={config.by}: expected {WEIGHTS}, {LEARNABILITY}, or module:Class of your own"
            f"{did_you_mean(config.by, (WEIGHTS, LEARNABILITY))}"
        )
    for name, weight in config.weights.items():
        _check_task("curriculum.weights", name, config.tasks)
        if not 0 <= weight < math.inf:
            raise ConfigError(f"curriculum.weights.{name}={weight}: must be 0 or more, and finite")
    for stage in stages_of(config):
        if not any(config.weights.get(name, 1.0) for name in stage.tasks):
            raise ConfigError(
                f"curriculum.weights: all tasks of a stage have the weight 0 ({', '.join(stage.tasks)}); give one of "
                "them a weight above 0"
            )
    own = config.by != WEIGHTS and config.by != LEARNABILITY
    for key in ("weights", "schedule"):
        if own and used[key]:
            raise ConfigError(f"curriculum.{key} has no effect with curriculum.by={config.by}: this class decides")
