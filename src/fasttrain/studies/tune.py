"""`fasttrain tune +profile=speed`: finds the settings with the most steps/s on this machine, by successive halving
(Jamieson & Talwalkar 2016).

Many settings get a short trial, the best third a longer one. At last the best few and the profile itself run in turn.
Every trial is a process of its own. A trial with fewer updates per env step than the profile, or too much memory, is
refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError
from fasttrain.machine import free_memory, usable_cores
from fasttrain.runs.view import FittingTable, make_console
from fasttrain.saving.files import read_json
from fasttrain.spec.checks import BY_NAME, NOT_APPLICABLE, train_frequency
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import key_of
from fasttrain.spec.reading import all_keys
from fasttrain.spec.setting import convert, did_you_mean
from fasttrain.studies.judge import speed_ratio
from fasttrain.studies.statistics import Ratio
from fasttrain.studies.study import MINUTES, Cell, Compose, Study, Wanted, base_overrides, merged, settings
from fasttrain.terminal import command, rate_text, spelt

PROFILE = "profile"
TRIAL_S = (3.0, 8.0, 16.0)  # seconds of training by rung; trials of the last run in turn with the profile
SHARES = (0.45, 0.65)  # share of the time after which no trial of that rung begins
KEPT = 3  # one of so many trials reaches the next rung
FINALISTS, TURNS = 2, 3
FREE_SHARE = 0.8  # share of the free memory that a trial may use
ENDLESS = 10**12  # total_timesteps: the time ends a trial

Space = dict[str, list[Any]]
Point = dict[str, Any]


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Search; write study.json, profile/tuned.yaml and the report.

    Returns 4 if stopped by a signal, 1 if the profile itself could not be run, else 0. Raises ConfigError if tune.space
    names an unknown key or a wrong value.
    """
    known = all_keys()
    for key, values in (config.tune.space or {}).items():
        if key not in known:
            raise ConfigError(f"tune.space: unknown key '{key}'{did_you_mean(key, known)}")
        if not values:
            raise ConfigError(f"tune.space: {key} has no values to try")
        *groups, name = key.split(".")
        kind = get_type_hints(type(reduce(getattr, groups, config))).get(name, Any)
        for value in values:
            convert(value, kind, f"tune.space: {key}")
    study = Study("tune", folder, overrides, make_console(), config.on_existing == "overwrite")
    search = Search(study, config, base_overrides(overrides), compose)
    try:
        return search.run()
    except KeyboardInterrupt:
        search.conclude()
        return EXIT_STOPPED


class Search:
    def __init__(self, study: Study, config: Config, base: Sequence[str], compose: Compose) -> None:
        self.study, self.config, self.base, self.compose = study, config, list(base), compose
        self.budget_s = 60 * (config.minutes or MINUTES)
        self.memory_bytes = FREE_SHARE * free_memory()
        self.trials: list[dict[str, Any]] = []
        self.result: Ratio | None = None
        self.best: Point | None = None

    def run(self) -> int:
        """Run the profile and three rungs of trials, then the verdict. Returns the exit code."""
        first = self._run_one({}, 0)
        if first is None:
            self.study.say("tune: the profile itself could not be run; see above")
            return EXIT_CRASHED
        plan = read_json(first.folder / "plan.json")
        self.defaults = {row["flag"]: row["effective"] for row in plan["flags"]}
        self.least_ratio = update_ratio(self.config, {}, self.defaults)
        space = self._space(plan)
        points = legal_points(self.config, space, self.defaults, self.least_ratio)
        sizes = ", ".join(f"{key} {'/'.join(map(str, values))}" for key, values in space.items())
        self.study.say(
            f"space: {sizes}; {len(points)} combinations update at least {self.least_ratio:.5f} times a step"
        )
        self._finals(self._rung(self._first_rung(points), 1)[:FINALISTS])
        self.conclude()
        return EXIT_DONE

    def _space(self, plan: Mapping[str, Any]) -> Space:
        if self.config.tune.space is not None:
            return {key: list(values) for key, values in self.config.tune.space.items()}
        typed = {key_of(text) for text in self.base}
        space = default_space(self.config, plan, usable_cores())
        return {key: values for key, values in space.items() if key not in typed}  # typed values do not vary

    def _first_rung(self, points: Sequence[Point]) -> list[Point]:
        drawn = np.random.default_rng(self.config.seed).permutation(len(points))[::-1]
        best = self._rung([changes(points[index], self.defaults) for index in drawn], 0)
        self.study.say(f"rung 1: {len(best)} trials of {len(points)} combinations")
        return best[: max(FINALISTS, -(-len(best) // KEPT))]

    def _rung(self, points: Sequence[Point], rung: int) -> list[Point]:
        """Run a rung; returns the points whose trial succeeded, the fastest first. Later rungs run all finalists."""
        found = []
        for number, point in enumerate(points):
            if self.study.spent_s() >= SHARES[rung] * self.budget_s and number >= FINALISTS * rung:
                break
            if (cell := self._run_one(point, rung)) is not None:
                found.append((cell.rate, point))
        return [point for _, point in sorted(found, key=lambda each: -each[0])]

    def _finals(self, points: Sequence[Point]) -> None:
        """Run the finalists and the profile in turn; the best has the highest median ratio."""
        sides: dict[str, dict[int, Cell]] = {}
        for turn in range(TURNS):
            if turn and self.study.spent_s() > self.budget_s:
                break
            for point in ({}, *points):
                if (cell := self._run_one(point, len(TRIAL_S) - 1, turn)) is not None:
                    sides.setdefault(label_of(point), {})[turn] = cell
        for point in points:
            found = speed_ratio(sides.get(label_of(point), {}), sides.get(PROFILE, {}))
            if found is not None and (self.result is None or found.value > self.result.value):
                self.result, self.best = found, point

    def _run_one(self, point: Point, rung: int, turn: int = 0) -> Cell | None:
        """Run a trial; None if it failed, used too much memory or made no update."""
        minutes = TRIAL_S[rung] / 60
        typed = [f"{key}={spelt(value)}" for key, value in point.items()]
        horizon = [] if self.config.algo.spec.stretches else [f"total_timesteps={ENDLESS}"]
        more = [*horizon, f"stop.max_minutes={minutes:.4f}", "eval.episodes=2", *typed]
        wanted = Wanted(
            f"{label_of(point)} ({TRIAL_S[rung]:.0f} s)", self.config.seed + turn, tuple(merged(self.base, more))
        )
        try:
            self.compose(wanted.overrides)
        except ConfigError as error:
            self.study.say(f"{wanted.label}: {error}")
            return None
        cell = self.study.run([wanted])[wanted.label].get(wanted.seed)
        if cell is None:
            return None
        memory = cell.summary["utilization"]["memory_bytes"]
        why = "" if cell.summary["updates"] else "it ended before its first update"
        if memory > self.memory_bytes:
            why = f"{memory / 2**30:.1f} GiB of memory, {self.memory_bytes / 2**30:.1f} are allowed"
        row = {"point": point, "rung": rung + 1, "turn": turn, "steps_per_s": cell.rate, "memory_bytes": memory}
        self.trials.append({**row, "update_ratio": cell.summary["update_ratio"], "refused": why})
        if why:
            self.study.say(f"{wanted.label}: refused: {why}")
        return None if why else cell

    def conclude(self) -> None:
        self.study.notes["rows"] = self.trials
        if self.result is not None and self.best is not None:
            self._write(self.best, self.result)
        else:
            self.study.say("nothing was run beside the profile: no profile is written")
        self.study.store()

    def _write(self, best: Point, result: Ratio) -> None:
        better = result.clear and result.value > 1
        chosen, stays = (best, "") if better else ({}, "; so the profile's own values stay")
        self.study.console.print()
        self.study.say("the best trials")
        self.study.console.print(_table(self.trials))
        notes = {key: self._evidence(key) for key in chosen}
        values = {**settings(self.config), **chosen}
        head = (
            f"tuned for {self.config.env.name} with {self.config.algo.name}: {len(self.trials)} trials. "
            f"{result.text()} as fast as the profile, in {result.pairs} turns{stays}"
        )
        path = self.study.write_profile("tuned", values, head, notes)
        self.study.notes["best"] = chosen
        self.study.notes["result"] = result.to_dict()
        stays = stays and ", which stays"
        self.study.say(f"best: {label_of(best)}: {result.text()} as fast as the profile{stays}")
        changed = [key for key in chosen if key not in BY_NAME or BY_NAME[key].class_of(chosen[key]) == "trade-off"]
        if changed:
            said = f"{', '.join(changed)} change{'s' if len(changed) == 1 else ''} what is learned"
            self.study.say(f"{said}: check the learning by {command()} compare before you rely on it")
        self.study.say_profile("tuned", path)

    def _evidence(self, key: str) -> str:
        """The best steps/s of the first rung for each value of the key."""
        best: dict[str, float] = {}
        for trial in self.trials:
            if trial["rung"] == 1 and key in trial["point"] and not trial["refused"]:
                said = str(trial["point"][key])
                best[said] = max(best.get(said, 0.0), trial["steps_per_s"])
        return "best steps/s by value: " + ", ".join(f"{said} {rate_text(rate)}" for said, rate in sorted(best.items()))


# --- the space of settings


def default_space(config: Config, plan: Mapping[str, Any], cores: int) -> Space:
    """Values around the profile's effective ones. `plan`: contents of its plan.json; `cores`: usable cores."""
    effective = {row["flag"]: row["effective"] for row in plan["flags"]}
    num_envs = int(effective["num_envs"])
    space: Space = {"num_envs": _around(num_envs, (4, 2, 1, 1 / 2, 1 / 4), least=1)}
    if effective["vec_env"] == "shared":
        workers = int(effective["workers"])
        space["workers"] = sorted({workers, max(1, cores // 2), cores, 2 * cores})
    if config.algo.spec.off_policy:
        updates = int(effective["updates_per_step"])
        space["updates_per_step"] = _around(updates, (2, 1, 1 / 2), least=1) if updates > 0 else [updates]
        if train_frequency(config.algo.train_freq)[1] == "episode":  # SB3 allows one env only
            space["num_envs"] = [num_envs]
    if config.algo.spec.minibatches:
        space["batch_size"] = _around(int(effective["batch_size"]), (2, 1, 1 / 2), least=2)
    if effective["torch_threads"] not in ("default", NOT_APPLICABLE):
        space["torch_threads"] = sorted({1, cores, int(effective["torch_threads"])})
    if effective["fused_update"] != NOT_APPLICABLE and config.engine == "fast":
        space["fused_update"] = ["on", "off"]
    cuda = config.device.startswith("cuda")
    for switch in ("use_amp", "use_compile"):
        if cuda and effective[switch] != NOT_APPLICABLE:
            space[switch] = ["on" if effective[switch] == "off" else effective[switch], "off"]
    return {key: values for key, values in space.items() if len(values) > 1}


def _around(value: int, factors: Sequence[float], least: int) -> list[int]:
    return sorted({max(least, round(value * factor)) for factor in factors})


def update_ratio(config: Config, point: Point, defaults: Mapping[str, Any]) -> float:
    """Gradient updates per env step at a point; `defaults`: the plan's effective values of the other settings."""
    value = {**defaults, **point}
    if config.algo.spec.off_policy:
        count, unit = train_frequency(config.algo.train_freq)
        if value["updates_per_step"] < 0:
            return 1.0
        return float(value["updates_per_step"]) / float(value["num_envs"]) / (count if unit == "step" else 1)
    rollout = config.algo.num_steps(value["num_envs"]) * value["num_envs"]
    epochs = int(value.get("algo.n_epochs", getattr(config.algo, "n_epochs", 1)))
    return float(epochs * math.ceil(rollout / (value.get("batch_size") or rollout)) / rollout)


def is_legal(config: Config, point: Point, defaults: Mapping[str, Any], least_ratio: float) -> bool:
    """Whether a point can run and updates often enough; 2 % fewer updates are allowed, because rollouts are rounded."""
    value = {**defaults, **point}
    if config.algo.spec.on_policy:
        steps = config.algo.n_steps
        rollout = steps * value["num_envs"] if steps else config.algo.rollout_size
        if max(value["num_envs"], value.get("batch_size") or 1) > rollout:
            return False
    if "workers" in point and point["workers"] > value["num_envs"]:
        return False
    if point.get("fused_update") == "on" and {point.get("use_amp"), point.get("use_compile")} - {None, "off"}:
        return False
    return update_ratio(config, point, defaults) >= 0.98 * least_ratio


def legal_points(config: Config, space: Space, defaults: Mapping[str, Any], least_ratio: float) -> list[Point]:
    """All legal combinations, without the one that changes nothing."""
    points = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return [point for point in points if changes(point, defaults) and is_legal(config, point, defaults, least_ratio)]


def changes(point: Point, defaults: Mapping[str, Any]) -> Point:
    """The settings of a point that differ from the defaults."""
    return {key: value for key, value in point.items() if key not in defaults or defaults[key] != value}


# --- output


def label_of(point: Point) -> str:
    """`num_envs=64 batch_size=512`; `profile` for no change."""
    return " ".join(f"{key}={value}" for key, value in point.items()) or PROFILE


def _table(trials: Sequence[Mapping[str, Any]], most: int = 12) -> FittingTable:
    table = FittingTable(["setting", "seconds", "steps/s", "updates/step", "memory"])
    for trial in sorted(trials, key=lambda each: (-each["rung"], -each["steps_per_s"]))[:most]:
        table.add_row(
            label_of(trial["point"]),
            f"{TRIAL_S[trial['rung'] - 1]:.0f}",
            rate_text(trial["steps_per_s"]),
            f"{trial['update_ratio']:.5f}",
            f"{trial['memory_bytes'] / 2**20:,.0f} MB{' (refused)' if trial['refused'] else ''}",
        )
    return table
