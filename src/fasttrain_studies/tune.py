"""`fasttrain tune +profile=speed`: finds settings with more steps/s, or with more reward, by Optuna's TPE.

A trial trains each of its seeds in a process of its own. A trial ends early if its evaluations are worse than the
median of the other trials. At last the best settings and the profile run alternately, with seeds that no trial had. If
the best settings are better in these runs, profile/tuned.yaml is written.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError
from fasttrain.machine import free_memory, usable_cores
from fasttrain.runs.logs import EvaluationLog
from fasttrain.runs.view import make_console
from fasttrain.saving.files import holder, read_json
from fasttrain.spec.checks import BY_NAME
from fasttrain.spec.precedence import key_of
from fasttrain.terminal import command, rate_text, spelt, with_interval
from fasttrain_studies import space
from fasttrain_studies.judge import read_outcome
from fasttrain_studies.settings import Config
from fasttrain_studies.space import PROFILE, Point, label_of
from fasttrain_studies.statistics import MIN_PAIRS, ratio_interval, t_interval
from fasttrain_studies.study import MINUTES, Cell, Compose, Study, Wanted, base_overrides, merged, settings
from fasttrain_studies.trials import Trials, check_installed, lock_of

if TYPE_CHECKING:
    from optuna.trial import Trial

TRIAL_S, FINAL_S, TURNS = 8.0, 16.0, 3  # for steps_per_s: seconds of a trial and of a confirming run; pairs of runs
EVALUATIONS, EPISODES = 10, 20  # evaluations during a trial, and episodes of each evaluation
SEEDS, FRESH = 2, 1000  # seeds of a trial; added to the first seed for the confirmation
MOST_REPEATS = 30  # the search ends after this number of trials in a row that were tried or refused before
FREE_SHARE = 0.8  # share of the free memory that a trial may use
ENDLESS = 10**12  # total_timesteps, if only the time ends a trial
WARM_UP = 3  # the first evaluation that can end a trial
LATE = "ended early, worse than half of the trials"
FIGURES = {"reward": "mean_reward", "win_rate": "win_rate"}  # objectives from evaluations → name of the result
OBJECTIVES = (*FIGURES, "steps_per_s", "reward_per_hour")


class Objective(NamedTuple):
    """What is maximized. The value of time_to is 1 ÷ seconds, or 0 if the threshold was never reached."""

    name: str
    threshold: float | None = None

    @classmethod
    def of(cls, text: str) -> Objective:
        """The objective that `text` names. Raises ConfigError if there is none."""
        name, _, number = text.partition(":")
        with suppress(ValueError):
            if text in OBJECTIVES or (name == "time_to" and math.isfinite(float(number))):
                return cls(text, float(number) if number else None)
        names = ", ".join(OBJECTIVES)
        raise ConfigError(f"tune.objective={text}: not one of {names}, or time_to:NUMBER as in time_to:0.5")

    @property
    def evaluated(self) -> bool:
        return self.name in FIGURES

    @property
    def speed(self) -> bool:
        return self.name == "steps_per_s"

    @property
    def figure(self) -> str:
        """The objective's name in the report."""
        return "time_to_threshold_s" if self.threshold is not None else FIGURES.get(self.name, self.name)

    def value(self, cell: Cell) -> float | None:
        """The value of a finished run; None if the run does not report it."""
        if self.speed:
            return cell.rate
        if self.threshold is not None:
            reached = read_outcome(cell).time_to(self.threshold)
            return 0.0 if reached is None else 1.0 / max(reached[1], 1e-3)
        found = (cell.summary["quality"] if self.evaluated else cell.summary).get(self.figure)
        return None if found is None or not math.isfinite(found) else float(found)

    def told(self, value: float | None) -> float | None:
        """The value in the user's unit. For time_to: seconds, infinite if the threshold was never reached."""
        return value if self.threshold is None or value is None else 1 / value if value > 0 else math.inf

    def text(self, value: float) -> str:
        return rate_text(value) if self.threshold is None else with_interval(self.told(value), None, "{:.3g} s")


LIMITS = ("run", "on_existing", "minutes", "tune.trials")  # in these settings the processes of one search may differ


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Search, compare the best settings with the profile; write study.json, profile/tuned.yaml and the report.

    Returns 4 if stopped by a signal, 1 if the profile itself could not be run, else 0. Raises ConfigError if a setting
    of the search is wrong, or Optuna is not installed.
    """
    objective = Objective.of(config.tune.objective)
    space.check_ranges(config, "tune.space", config.tune.space or {})
    check_installed()
    if objective.evaluated and not config.eval.episodes:
        raise ConfigError(f"eval.episodes=0: tune.objective={objective.name} needs evaluations; remove eval.episodes")
    number = config.seeds if "seeds" in sources else 1 if objective.speed else SEEDS
    stored = read_json(folder / "study.json").get("arguments", overrides)
    searched, theirs = ({text for text in texts if key_of(text) not in LIMITS} for texts in (overrides, stored))
    if searched != theirs and holder(folder) not in ("", str(os.getpid())):
        raise ConfigError(
            f"run={folder}: another process searches there with other settings ({' '.join(stored)}): give the same "
            "ones, wait until it ends, or use another folder"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's warnings name options that users of fasttrain cannot set
        study = Study("tune", folder, overrides, make_console(), config.on_existing == "overwrite", lock_of(folder))
        search = Search(study, config, base_overrides(overrides), compose, objective, number)
        try:
            return search.run()
        except KeyboardInterrupt:
            search.store()
            return EXIT_STOPPED
        finally:
            if search.trials is not None:
                search.trials.leave()


class Search:
    """The search of one process. `number`: how many seeds a trial has."""

    def __init__(
        self, study: Study, config: Config, base: Sequence[str], compose: Compose, objective: Objective, number: int
    ) -> None:
        self.study, self.config, self.base, self.compose = study, config, list(base), compose
        self.objective, self.seeds = objective, range(config.seed, config.seed + number)
        self.pairs = max(TURNS if objective.speed else MIN_PAIRS, number)  # of runs, to confirm the best settings
        timed = config.minutes is not None or config.tune.trials is None
        self.budget_s = 60 * (config.minutes or MINUTES) if timed else math.inf
        self.memory_bytes = FREE_SHARE * free_memory()
        self.start: Point = {}
        self.trials: Trials | None = None
        self.refused = ""  # why the last settings were refused without a run

    def run(self) -> int:
        """Run the profile and the trials, and confirm the best settings. Returns the exit code."""
        wanted = [self._wanted({}, seed) for seed in self.seeds]
        while not (leads := self._leads()) and len(self.study.finished(wanted)[PROFILE]) < len(wanted):
            time.sleep(0.5)  # until the first process has run the profile
            self.study.read_others()
        cells = [*self.study.run(wanted)[PROFILE].values()]
        why = next(filter(None, map(self._refusal, cells)), "")
        if len(cells) < len(wanted) or why:
            self.study.say(f"tune: the profile itself could not be run{f': {why}' if why else '; see above'}")
            return EXIT_CRASHED
        values = [value for cell in cells if (value := self.objective.value(cell)) is not None]
        if len(values) < len(cells):
            raise ConfigError(
                f"tune.objective={self.objective.name}: a run with the profile's own settings does not report it; "
                "choose another objective, or train longer (total_timesteps=…)"
            )
        self.start, self.start_value = space.start_of(self.config, cells[0].folder), fmean(values)
        self.least_ratio = space.update_ratio(self.config, {}, self.start) if self.objective.speed else 0.0
        kinds = (not self.objective.evaluated, not self.objective.speed)
        searched = space.space_of(self.config, self.start, usable_cores(), {*map(key_of, self.base)}, *kinds)
        self.study.say("space: " + ", ".join(f"{key} {space.text_of(own)}" for key, own in searched.items()))
        seed = self.config.seed if leads else None
        runs = [each.overrides for each in wanted]  # only trials with equal overrides can be compared
        self.trials = Trials(self.study.folder, self.study.lock, f"{self.objective.name} {runs}", searched, seed)
        if leads:
            self.trials.add_start(self.start)
        repeats = 0
        while repeats < MOST_REPEATS and not self._over(self.trials):
            repeats = 0 if self._trial(self.trials) else repeats + 1
            self.store()
        if self.refused and not self.trials.known():
            raise ConfigError(f"tune: no trial could be run; the last one: {self.refused}")
        return self._finish(self.trials)

    def _leads(self) -> bool:
        """Whether this process leads the study: no other process holds the folder's lock."""
        return holder(self.study.folder) in ("", str(os.getpid()))

    def _over(self, trials: Trials) -> bool:
        ran, most = len(trials.known()) - len(trials.running(alive=False)), self.config.tune.trials
        longer = FINAL_S / TRIAL_S if self.objective.speed else 1.0
        confirmation_s = 2 * self.pairs * longer * fmean(cell.seconds for cell in self.study.cells)
        late = self.study.spent_s() + confirmation_s > self.budget_s
        return ran > 0 and (late or (most is not None and ran >= most))

    def _wanted(self, point: Point, seed: int, final: bool = False) -> Wanted:
        usual = [] if final else ["checkup=off", f"eval.episodes={EPISODES if self.objective.evaluated else 2}"]
        if self.objective.speed:
            endless = [] if self.config.algo.spec.stretches else [f"total_timesteps={ENDLESS}"]
            minutes = (FINAL_S if final else TRIAL_S) / 60
            usual = ["checkup=off", "eval.episodes=2", *endless, f"stop.max_minutes={minutes:.4f}"]
        elif self.objective.evaluated and not final:
            usual.append(f"eval_every={self._eval_every()}")
        typed = [f"{key}={spelt(value)}" for key, value in point.items()]
        return Wanted(label_of(point), seed, tuple(merged(merged(usual, self.base), typed)))

    def _eval_every(self) -> int:
        """Env steps between two evaluations of a trial. Without eval_every a training has ten evaluations."""
        typed = self.config.eval_every if "eval_every" in map(key_of, self.base) else None
        return typed or max(1, self.config.total_timesteps // EVALUATIONS)

    def _trial(self, trials: Trials) -> bool:
        """Run a trial. False: nothing was run, because the settings are known or refused, or the search is over."""
        with self.study.lock:  # otherwise another process could begin the last trial too
            if self._over(trials):
                return False
            trial = trials.ask()
            point = space.changes(trials.point(trial.params), self.start)
            wanted = [self._wanted(point, seed) for seed in self.seeds]
            if trials.repeat(trial):
                return False
            self.refused = why = self._not_worth(point, wanted[0]) if point else ""
            if why or not point:
                trials.end(trial, None if why else self.start_value, why)
                return False
            trials.begin(trial)
        value, why = self._value(trial, wanted)
        trials.end(trial, value, why)
        found = why if value is None else f"{self.objective.name} {self.objective.text(value)}"
        self.study.say(f"trial {len(trials.ranked())}: {label_of(point)}: {found}")
        return True

    def _not_worth(self, point: Point, wanted: Wanted) -> str:
        try:
            return space.not_worth(self.compose(wanted.overrides), point, self.start, self.least_ratio)
        except ConfigError as error:
            return str(error)

    def _value(self, trial: Trial, wanted: Sequence[Wanted]) -> tuple[float | None, str]:
        """Run the trial's seeds. Returns (mean value, ""), or (None, why there is no value)."""
        values = list[float]()
        for number, each in enumerate(wanted, 1):
            self.study.ended = self._judge(trial) if self.objective.evaluated and number == 1 else None
            cell = self.study.run([each])[each.label].get(each.seed)
            if cell is None:
                failed = self.study.failed([each])
                return None, f"failed: {failed[0].error}" if failed else LATE
            value, why = self.objective.value(cell), self._refusal(cell)
            if value is None or why:
                return None, f"refused: {why or 'it reports no value'}"
            values.append(value)
            if self.objective.evaluated and number < len(wanted):
                trial.report(fmean(values), ENDLESS + number)  # a later step than that of any evaluation
                if trial.should_prune():
                    return None, LATE
        return fmean(values), ""

    def _judge(self, trial: Trial) -> Callable[[Path], str]:
        """A function that reports a running cell's evaluations to Optuna. It returns why the cell ends early, or ""."""
        every, seen = self._eval_every(), set[int]()

        def ended(folder: Path) -> str:
            for row in EvaluationLog(folder / "evaluations.csv").known(sys.maxsize):
                step, value = row["env_steps"] // every, row[self.objective.figure]
                if step not in seen and step >= WARM_UP and value is not None:
                    seen.add(step)
                    trial.report(value, step)
                    if trial.should_prune():
                        return LATE
            return ""

        return ended

    def _refusal(self, cell: Cell) -> str:
        """Why a finished run is refused; empty if it is valid."""
        memory = cell.summary["utilization"]["memory_bytes"]
        if memory > self.memory_bytes:
            return f"{memory / 2**30:.1f} GiB of memory, {self.memory_bytes / 2**30:.1f} are allowed"
        return "" if cell.summary["updates"] else "it ended before its first update"

    def store(self) -> None:
        """Write the trials into study.json, the best first."""
        if self.trials is not None:
            figure, told = self.objective.figure, self.objective.told
            self.study.notes["rows"] = [
                {"point": space.changes(point, self.start), figure: told(value), "note": why}
                for point, value, why in self.trials.ranked()
            ]
        self.study.store()

    def _finish(self, trials: Trials) -> int:
        """Confirm the best settings, if this process leads the study. Otherwise the leading process does it later."""
        if not self._leads():
            self.study.say(f"process {holder(self.study.folder)} continues the search, then confirms the best settings")
            return EXIT_DONE
        if others := trials.running():
            self.study.say(f"waiting for {len(others)} trials of other processes")
        while trials.running() & others:
            time.sleep(0.5)
        self.study.read_others()
        (self.study.folder / "conf" / "profile" / "tuned.yaml").unlink(missing_ok=True)
        self.study.notes |= {"best": {}, "result": {}}
        best, value, _ = next(iter(trials.ranked()), ({}, None, ""))
        better, found = False, "no trial was better than the profile"
        if value is not None and value > self.start_value:
            best = space.changes(best, self.start)
            now, before = map(self.objective.text, (value, self.start_value))
            self.study.say(f"confirming {label_of(best)}: {now} in its trial, {before} with the profile")
            better, found = self._confirmed(best)
        found += "" if better else ": the profile's own settings stay, and no profile is written"
        minutes = sum(cell.seconds for cell in self.study.cells) / 60
        count = len(trials.known())
        found = f"{count} trial{'' if count == 1 else 's'}, {minutes:.1f} minutes of trainings; {found}"
        self.study.say(found)
        if better:
            self._write(best, found)
        self.store()
        return EXIT_DONE

    def _confirmed(self, point: Point) -> tuple[bool, str]:
        """Compare settings with the profile on new seeds. Returns whether they are better, and the result as text."""
        self.study.ended = None
        seeds, label = range(self.config.seed + FRESH, self.config.seed + FRESH + self.pairs), label_of(point)
        cells = self.study.run([self._wanted(each, seed, final=True) for seed in seeds for each in ({}, point)])
        ours, theirs = (
            {seed: value for seed, cell in cells[name].items() if (value := self.objective.value(cell)) is not None}
            for name in (label, PROFILE)
        )
        both = sorted(ours.keys() & theirs.keys())
        if len(both) < self.pairs:
            return False, f"only {len(both)} of {self.pairs} pairs of runs could be compared"
        if self.objective.speed and (ratio := ratio_interval(ours, theirs)) is not None:
            self.study.notes["result"] = ratio.to_dict()
            return ratio.clear and ratio.value > 1, f"{ratio.text()} as fast as the profile, in {ratio.pairs} turns"
        low, high = t_interval(np.array([ours[seed] - theirs[seed] for seed in both]))
        means = [fmean(side[seed] for seed in both) for side in (ours, theirs)]
        self.study.notes["result"] = {"difference": means[0] - means[1], "low": low, "high": high}
        difference = with_interval(means[0] - means[1], (low, high), "{:+.3g}")
        unit = " per second" * (self.objective.threshold is not None)
        now, before = map(self.objective.text, means)
        found = f"{self.objective.name} {now}, with the profile {before}; difference {difference}{unit}"
        return low > 0, f"{found}, {self.pairs} new seeds"

    def _write(self, point: Point, found: str) -> None:
        self.study.notes["best"] = point
        head = f"tuned for {self.config.env.name} with {self.config.algo.name}: {found}"
        path = self.study.write_profile("tuned", {**settings(self.config), **point}, head, {})
        changed = [key for key in point if key not in BY_NAME or BY_NAME[key].class_of(point[key]) == "trade-off"]
        if changed and self.objective.speed:
            said = f"{', '.join(changed)} change{'s' if len(changed) == 1 else ''} what is learned"
            self.study.say(f"{said}; before you use the profile, compare the learning: {command()} compare")
        typed = [text for text in self.base if key_of(text) not in point]
        self.study.say_profile("tuned", path, typed)
