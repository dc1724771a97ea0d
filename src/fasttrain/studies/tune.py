"""`fasttrain tune +profile=speed`: the values with the most steps/s on this machine, by successive halving.

Short trials of many settings, longer ones of the best third, and at last the best few and the profile itself in turn.
Every trial is a process of its own, its first window is left out, and none may update less often per env step than the
profile does (`tune.min_update_ratio`) or take more memory. Jamieson & Talwalkar 2016.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError
from fasttrain.machine import free_memory, usable_cores
from fasttrain.runs.view import FittingTable, make_console
from fasttrain.saving.files import read_json
from fasttrain.spec.config import Config
from fasttrain.spec.flags import BY_NAME
from fasttrain.spec.overrides import key_of
from fasttrain.spec.reading import all_keys
from fasttrain.spec.typed import convert, did_you_mean
from fasttrain.studies.cells import Cell, merged
from fasttrain.studies.outcome import Ratio, ratio, steady_rate
from fasttrain.studies.space import (
    OptunaSampler,
    Point,
    RandomSampler,
    Sampler,
    Space,
    changes,
    default_space,
    legal_points,
    update_ratio,
)
from fasttrain.studies.study import Compose, Study, Wanted, base_overrides, settings, way_to_use, write_profile
from fasttrain.terminal import command, rate_text

PROFILE = "profile"
TRIAL_S = (3.0, 8.0, 16.0)  # of training, by rung; the last is run in turn with the profile
SHARES = (0.45, 0.65)  # of the time, after which a rung's last trial is begun
KEPT = 3  # one in three goes on
FINALISTS, TURNS = 2, 3
FREE_SHARE = 0.8  # of free memory that a run may take
ENDLESS = 10**12  # total_timesteps: time ends a trial


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Search, write study.json, profile/tuned.yaml and the report; the exit code.

    Returns 4 if stopped by a signal, 1 if the profile itself could not be run, else 0.

    Raises:
        ConfigError: the space names an unknown key or one that may not vary, or optuna is asked for and not there.
    """
    if config.tune.sampler == "optuna" and importlib.util.find_spec("optuna") is None:
        raise ConfigError("tune.sampler=optuna needs the package optuna: pip install fasttrain[tune], or take random")
    known = all_keys()
    for key, values in (config.tune.space or {}).items():
        if key not in known:
            raise ConfigError(f"tune.space: unknown key '{key}'{did_you_mean(key, known)}")
        if not values:
            raise ConfigError(f"tune.space: {key} has no values to try")
        for value in values:
            convert(value, _type_of(config, key), f"tune.space: {key}")
    study = Study("tune", folder, overrides, make_console())
    search = Search(study, config, base_overrides(overrides), compose)
    try:
        return search.run()
    except KeyboardInterrupt:
        search.conclude()
        return EXIT_STOPPED


def _type_of(config: Config, key: str) -> Any:
    *groups, name = key.split(".")
    node = reduce(getattr, groups, config)
    return get_type_hints(type(node)).get(name, Any)


class Search:
    """One search."""

    def __init__(self, study: Study, config: Config, base: Sequence[str], compose: Compose) -> None:
        self.study, self.config, self.base, self.compose = study, config, list(base), compose
        self.budget_s = 60 * config.minutes
        self.memory_bytes = FREE_SHARE * free_memory()
        self.trials: list[dict[str, Any]] = []
        self.result: Ratio | None = None
        self.best: Point | None = None

    def run(self) -> int:
        """Three rungs, then the verdict."""
        first = self._run_one({}, 0)
        if first is None:
            self.study.say("tune: the profile itself could not be run; see above")
            return EXIT_CRASHED
        plan = read_json(first.folder / "plan.json")
        self.defaults = {row["flag"]: row["effective"] for row in plan["flags"]}
        wanted = self.config.tune.min_update_ratio
        self.least_ratio = update_ratio(self.config, {}, self.defaults) if wanted is None else wanted
        space = self._space(plan)
        points = legal_points(self.config, space, self.defaults, self.least_ratio)
        sizes = ", ".join(f"{key} {'/'.join(map(str, values))}" for key, values in space.items())
        self.study.say(
            f"space: {sizes}; {len(points)} combinations update at least {self.least_ratio:.5f} times a step"
        )
        survivors = self._first_rung(space, points)
        survivors = self._rung(survivors, 1, SHARES[1])
        self._finals(survivors[:FINALISTS])
        self.conclude()
        return EXIT_DONE

    def _space(self, plan: Mapping[str, Any]) -> Space:
        given = self.config.tune.space
        if given is not None:
            return {key: list(values) for key, values in given.items()}
        typed = {key_of(text) for text in self.base}
        space = default_space(self.config, plan, usable_cores())
        return {key: values for key, values in space.items() if key not in typed}  # what is typed stays

    def _first_rung(self, space: Space, points: Sequence[Point]) -> list[Point]:
        sampler: Sampler
        if self.config.tune.sampler == "optuna":
            sampler = OptunaSampler(space, points, self.config.seed)
        else:
            sampler = RandomSampler(points, self.config.seed)
        found: dict[int, tuple[float, Point]] = {}
        while self.study.spent_s() < SHARES[0] * self.budget_s and (point := sampler.ask()) is not None:
            change = changes(point, self.defaults)
            cell = self._run_one(change, 0)
            rate = None if cell is None else steady_rate(cell)
            sampler.tell(point, rate)
            if rate is not None:
                found[len(found)] = (rate, change)
        best = sorted(found.values(), key=lambda each: -each[0])
        self.study.say(f"rung 1: {len(best)} trials of {len(points)} combinations")
        return [point for _, point in best[: max(FINALISTS, -(-len(best) // KEPT))]]

    def _rung(self, points: Sequence[Point], rung: int, share: float) -> list[Point]:
        found = []
        for number, point in enumerate(points):
            if self.study.spent_s() > share * self.budget_s and number >= FINALISTS:
                break
            if (cell := self._run_one(point, rung)) is not None:
                found.append((steady_rate(cell), number, point))
        return [point for _, _, point in sorted(found, key=lambda each: -each[0])]

    def _finals(self, points: Sequence[Point]) -> None:
        """The best and the profile in turn; the best is the one with the highest median ratio."""
        sides: dict[str, dict[int, Cell]] = {}
        for turn in range(TURNS):
            if turn and self.study.spent_s() > self.budget_s:
                break
            for point in ({}, *points):
                if (cell := self._run_one(point, len(TRIAL_S) - 1, turn)) is not None:
                    sides.setdefault(label_of(point), {})[turn] = cell
        for point in points:
            found = ratio(sides.get(label_of(point), {}), sides.get(PROFILE, {}))
            if found is not None and (self.result is None or found.interval.value > self.result.interval.value):
                self.result, self.best = found, point

    def _run_one(self, point: Point, rung: int, turn: int = 0) -> Cell | None:
        """A trial; None where it failed, took too much memory or updated too rarely."""
        minutes = TRIAL_S[rung] / 60
        typed = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in point.items()]
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
        why = "" if cell is None else self._why_not(cell)
        if cell is not None:
            memory = cell.summary["utilization"]["memory_bytes"]
            row = {
                "point": point,
                "rung": rung + 1,
                "turn": turn,
                "steps_per_s": steady_rate(cell),
                "memory_bytes": memory,
            }
            self.trials.append({**row, "update_ratio": cell.summary["update_ratio"], "refused": why})
        if why:
            self.study.say(f"{wanted.label}: not taken: {why}")
        return None if why else cell

    def _why_not(self, cell: Cell) -> str:
        memory = cell.summary["utilization"]["memory_bytes"]
        if memory > self.memory_bytes:
            return f"{memory / 2**30:.1f} GiB of memory, {self.memory_bytes / 2**30:.1f} are allowed"
        return "" if cell.summary["updates"] else "it did not get as far as an update"

    def conclude(self) -> None:
        """Say, write and draw what was found."""
        self.study.notes["rows"] = self.trials
        if self.result is not None and self.best is not None:
            self._write(self.best, self.result)
        else:
            self.study.say("nothing was run beside the profile: no profile is written")
        self.study.store()

    def _write(self, best: Point, result: Ratio) -> None:
        name = self.config.profile_name or "tuned"
        better = result.clear and result.interval.value > 1
        chosen = best if better else {}
        self.study.console.print()
        self.study.say("the best trials")
        self.study.console.print(_table(self.trials))
        notes = {key: self._evidence(key, value) for key, value in chosen.items()}
        values = {**settings(self.config), **chosen}
        head = (
            f"tuned for {self.config.env.name} with {self.config.algo.name}: {len(self.trials)} trials. "
            f"{result.text()} as fast as the profile, in {result.pairs} turns"
            + ("" if better else "; so the profile's own values stay")
        )
        path = write_profile(self.study.folder, name, values, head, notes)
        self.study.notes["best"] = chosen
        self.study.notes["result"] = result.interval.to_dict()
        self.study.say(
            f"best: {label_of(best)}: {result.text()} as fast as the profile" + ("" if better else ", which stays")
        )
        changed = [key for key in chosen if key not in BY_NAME or BY_NAME[key].class_of(chosen[key]) == "trade-off"]
        if changed:
            said = f"{', '.join(changed)} change{'s' if len(changed) == 1 else ''} what is learned"
            self.study.say(f"{said}: {command()} compare with it before you rely on it")
        self.study.say(f"written to {path}: {way_to_use(self.study.folder, name)}")

    def _evidence(self, key: str, value: Any) -> str:
        """Best steps/s of the first rung with this value, and with each other one."""
        best: dict[str, float] = {}
        for trial in self.trials:
            if trial["rung"] == 1 and key in trial["point"] and not trial["refused"]:
                said = str(trial["point"][key])
                best[said] = max(best.get(said, 0.0), trial["steps_per_s"])
        return "best steps/s by value: " + ", ".join(f"{said} {rate_text(rate)}" for said, rate in sorted(best.items()))


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
