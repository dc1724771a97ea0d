"""The search space of `tune`: which values of which keys, and which combinations are worth a trial. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fasttrain.spec.config import Config
from fasttrain.spec.flags import NOT_APPLICABLE

Space = dict[str, list[Any]]
Point = dict[str, Any]


class Sampler(Protocol):
    """Chooses points to try; may learn from what they gave."""

    def ask(self) -> Point | None:
        """The next point, None where no new one is left."""

    def tell(self, point: Point, steps_per_s: float | None) -> None:
        """What it gave; None: it failed."""


def default_space(config: Config, plan: Mapping[str, Any], cores: int) -> Space:
    """Around what the profile resolved to: keys that mean something in this plan, each with its present value.

    Args:
        plan: plan.json of a run of the profile.
        cores: that this process may use.
    """
    effective = {row["flag"]: row["effective"] for row in plan["flags"]}
    num_envs = int(effective["num_envs"])
    space: Space = {"num_envs": _around(num_envs, (4, 2, 1, 1 / 2, 1 / 4), least=1)}
    if effective["vec_env"] == "shared":
        workers = int(effective["workers"])
        space["workers"] = sorted({workers, max(1, cores // 2), cores, 2 * cores})
    if config.algo.spec.off_policy:
        space["updates_per_step"] = _around(int(effective["updates_per_step"]), (2, 1, 1 / 2), least=1)
    if config.algo.spec.minibatches:
        space["batch_size"] = _around(int(effective["batch_size"]), (2, 1, 1 / 2), least=2)
    if effective["torch_threads"] not in ("default", NOT_APPLICABLE):
        space["torch_threads"] = sorted({1, cores, int(effective["torch_threads"])})
    if effective["fused_update"] != NOT_APPLICABLE and config.engine == "fast":
        space["fused_update"] = ["on", "off"]
    cuda = config.device.startswith("cuda")
    for switch in ("use_amp", "use_compile"):
        if cuda and effective[switch] in ("on", "off"):
            space[switch] = ["on", "off"]
    return {key: values for key, values in space.items() if len(values) > 1}


def _around(value: int, factors: Sequence[float], least: int) -> list[int]:
    return sorted({max(least, round(value * factor)) for factor in factors})


def update_ratio(config: Config, point: Point, defaults: Mapping[str, Any]) -> float:
    """Gradient updates per env step with these settings; `defaults`: the plan's effective values for all others."""
    value = {**defaults, **point}
    if config.algo.spec.off_policy:
        return float(value["updates_per_step"]) / float(value["num_envs"])
    rollout = config.algo.num_steps(value["num_envs"]) * value["num_envs"]
    epochs = int(value.get("algo.n_epochs", getattr(config.algo, "n_epochs", 1)))
    return float(epochs * math.ceil(rollout / (value.get("batch_size") or rollout)) / rollout)


def is_legal(config: Config, point: Point, defaults: Mapping[str, Any], least_ratio: float) -> bool:
    """Whether the point can run and updates often enough. Ratios are compared to within 2 %: rollouts are whole."""
    value = {**defaults, **point}
    if config.algo.spec.on_policy:
        steps = config.algo.n_steps
        rollout = steps * value["num_envs"] if steps else config.algo.rollout_size
        if max(value["num_envs"], value.get("batch_size") or 1) > rollout:
            return False
    if "workers" in point and point["workers"] > value["num_envs"]:
        return False
    if point.get("fused_update") == "on" and "on" in (point.get("use_amp"), point.get("use_compile")):
        return False
    return update_ratio(config, point, defaults) >= 0.98 * least_ratio


def legal_points(config: Config, space: Space, defaults: Mapping[str, Any], least_ratio: float) -> list[Point]:
    """All combinations that are worth a trial; the one that changes nothing is not among them."""
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [point for point in points if changes(point, defaults) and is_legal(config, point, defaults, least_ratio)]


def changes(point: Point, defaults: Mapping[str, Any]) -> Point:
    """Of the point, what differs from what runs without it."""
    return {key: value for key, value in point.items() if key not in defaults or defaults[key] != value}


class RandomSampler:
    """Every legal point once, in random order."""

    def __init__(self, points: Sequence[Point], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(points))
        self._points = [points[index] for index in order]

    def ask(self) -> Point | None:
        return self._points.pop() if self._points else None

    def tell(self, point: Point, steps_per_s: float | None) -> None:
        """Random search learns nothing."""


class OptunaSampler:
    """Optuna's tree-structured Parzen estimator over the same points, by ask and tell."""

    def __init__(self, space: Space, points: Sequence[Point], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self._space, self._points = space, list(points)
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            key: optuna.distributions.CategoricalDistribution([str(value) for value in values])
            for key, values in space.items()
        }
        self._failed = optuna.trial.TrialState.FAIL
        self._asked: list[tuple[Point, Any]] = []

    def ask(self) -> Point | None:
        """What Optuna proposes, or the nearest point that is legal and new."""
        if not self._points:
            return None
        trial = self._study.ask(self._distributions)
        wanted = {key: self._value(key, trial.params[key]) for key in self._space}
        point = min(self._points, key=lambda other: sum(other[key] != wanted[key] for key in wanted))
        self._points.remove(point)
        self._asked.append((point, trial if point == wanted else None))
        return point

    def tell(self, point: Point, steps_per_s: float | None) -> None:
        """A neighbour that was tried instead of the proposal is told as what it was."""
        import optuna

        trial = next(trial for asked, trial in self._asked if asked == point)
        params = {key: str(value) for key, value in point.items()}
        if trial is not None:
            self._study.tell(trial, steps_per_s, None if steps_per_s is not None else self._failed)
        elif steps_per_s is not None:
            done = optuna.trial.create_trial(params=params, distributions=self._distributions, value=steps_per_s)
            self._study.add_trial(done)

    def _value(self, key: str, text: str) -> Any:
        return next(value for value in self._space[key] if str(value) == text)
