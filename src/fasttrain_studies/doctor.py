"""`fasttrain doctor`: the speed of each part of a run, the limit that follows from them, and what to change.

It measures the run's parts on this machine (`rig`), computes the limit (`limits`), looks for changes that make
the run faster (`advice`), and tries the best change in real trainings, alternately with the present configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console

from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, EnvError, FastTrainError
from fasttrain.runs.engine import set_threads
from fasttrain.runs.envs import env_facts, survey_of, this_machine
from fasttrain.runs.evaluate import config_of, flags_of
from fasttrain.runs.view import activity, make_console, say
from fasttrain.saving.files import read_json, write_json
from fasttrain.spec.checks import BY_NAME
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.precedence import key_of
from fasttrain.spec.reading import with_fixed_opponent
from fasttrain_studies import advice as show
from fasttrain_studies.advice import Advice, Candidate, Situation, advise
from fasttrain_studies.limits import Flow, Rates, composed_limit
from fasttrain_studies.rig import WITH, Rig, Samples, measure, rates_of, ratios_of, typical, windows_of
from fasttrain_studies.settings import Config
from fasttrain_studies.study import last_line, merged, run_cell

DOCTOR_SCHEMA = 1
SHOWN, TRIED = 2, 1  # how many suggestions are shown, and how many are tried
SECONDS = 3.0  # seconds for measuring each part
AGAIN_ROUNDS = 7  # rounds; each measures a part of the training as it is, and with the change
OWN_KEYS = ("doctor", "run")
# Settings of the run that are not used in trainings that try a change.
NOT_TRIED = ("stop", "total_timesteps", "eval", "eval_every", "checkpoint_every")


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Examine this configuration, or the one of `run=FOLDER`; print the result and write doctor.json.

    Returns 4 if stopped by Ctrl-C. Raises ConfigError if the run lacks the part that `doctor.test` names, or if `run`
    is not the folder of a finished run.
    """
    doctor = Doctor(_case(config, sources, overrides), folder, make_console())
    stopped = False
    try:
        doctor.examine()
    except KeyboardInterrupt:
        stopped = True
    finally:
        doctor.close()
    doctor.report("stopped" if stopped else "done")
    return EXIT_STOPPED if stopped else EXIT_DONE


class Case(NamedTuple):
    """The configuration that the doctor examines, and the finished run with this configuration, if there is one."""

    config: Config  # the requested configuration
    sources: Mapping[str, str]
    overrides: list[str]  # overrides with which `fasttrain` trains this configuration
    run: str | None = None  # folder of the finished run
    finished_s: float | None = None  # the run's seconds per env step


def _case(config: Config, sources: Mapping[str, str], overrides: Sequence[str]) -> Case:
    if config.run is None:
        return Case(config, sources, [text for text in overrides if key_of(text).split(".")[0] not in OWN_KEYS])
    typed = [key for key, source in sources.items() if source == "command line"]
    if ignored := sorted(key for key in typed if key != "run" and not key.startswith("doctor.")):
        raise ConfigError(f"doctor run=… takes no other settings than doctor.…: {', '.join(ignored)} would do nothing")
    folder = Path(config.run)
    summary = read_json(folder / "summary.json")
    if not (folder / "plan.json").is_file() or not summary.get("steps_per_s"):
        raise ConfigError(f"run={folder}: no plan.json and summary.json there; name the folder of a finished run")
    stored = cast("Config", config_of(folder))
    flags = [row for row in flags_of(folder) if row["flag"] in BY_NAME]
    requested = {row["flag"]: row["requested"] for row in flags}
    trained = dataclasses.replace(stored, **requested, doctor=config.doctor)
    of_flags = {row["flag"]: row["source"] for row in flags if row["source"] != "default"}
    typed = [str(text) for text in summary["overrides"]]
    return Case(trained, of_flags, typed, str(folder), 1.0 / float(summary["steps_per_s"]))


class Doctor:
    """One examination. `report` can be called at any time. It shows the measurements so far."""

    def __init__(self, case: Case, folder: Path, console: Console) -> None:
        self.case, self.folder, self.console = case, folder, console
        self.config = config = case.config
        self.machine = this_machine()
        self.samples: Samples = {}
        self.advices: list[Advice] = []
        self.tried: list[dict[str, Any]] = []
        self.slowest_over_mean: float | None = None
        self.engines: tuple[str, list[str]] | None = None  # the limit of games with engines, and what to try
        self.advised = False  # True once all changes were considered
        self._torch_threads = torch.get_num_threads()
        self._rigs = 0
        self.rig: Rig | None = None
        played = with_fixed_opponent(config)
        with activity(console, "building the env"), survey_of(played, Console(quiet=True)) as survey:
            # With vec_env=shared the plan needs the CPU share of the envs, so `survey.costs` measures it.
            shared = config.vec_env == "shared"
            self.facts = env_facts(played, survey, survey.costs) if shared else env_facts(played)
        self.plan = resolve(config, case.sources, self.facts, self.machine)
        self.flow = Flow()
        test, planned = config.doctor.test, self.plan.config
        if test == "replay" and not planned.algo.spec.off_policy:
            raise ConfigError(
                f"doctor.test=replay has no effect with algo={planned.algo.name}: this algorithm has no replay buffer"
            )
        if test == "transport" and planned.vec_env != "shared":
            raise ConfigError(
                f"doctor.test=transport with vec_env={planned.vec_env}: this run has no workers of fasttrain"
            )

    def examine(self) -> None:
        """Measure the parts, look for changes that make the run faster, and try the best change."""
        settings = self.config.doctor
        with activity(self.console, "measuring the run") as doing:
            doing.now("building it")
            self.rig = rig = self._build(self.plan)
            doing.now("training for a moment")
            slow_s = rig.warm_up(SECONDS)
            if slow_s is not None and settings.test == "all":
                self.samples["train"] = [slow_s]
            self.flow = rig.flow(self.facts, self.machine)
            parts = ["env", "policy", "update", "replay", "logging", "train"]
            names = windows_of(rig, parts if settings.test == "all" else [settings.test])
            measure({"now": rig}, names, SECONDS, {"now": self.samples}, doing.now)
            if rig.shared is not None:
                times = rig.shared.times_ns()
                mean = times["envs"] / rig.shared.num_workers
                self.slowest_over_mean = times["slowest"] / mean if mean else None
            self.engines = rig.engines(SECONDS)
        if settings.test != "all":
            shown = (settings.test, WITH.get(settings.test))
            self.samples = {part: values for part, values in self.samples.items() if part in shown}
            return
        show.parts(self.console, self.situation)
        with activity(self.console, "looking for changes that make it faster") as doing:
            self.advices = advise(self.situation, self._measure_again, doing.now)
        self.advised = True
        rig.close()
        self.rig = None
        for index, advice in enumerate(self.advices[:TRIED]):
            self.advices[index] = self._try(advice, index)

    @property
    def situation(self) -> Situation:
        trained_s = typical(self.samples["train"]) if "train" in self.samples else None
        return Situation(
            self.config, self.case.sources, self.case.overrides, self.facts, self.machine, self.plan.config,
            rates_of(self.samples), self.flow, trained_s, self.slowest_over_mean, self.case.finished_s,
            self.engines,
        )  # fmt: skip

    def _build(self, plan: RunSpec) -> Rig:
        self._rigs += 1
        set_threads(self._torch_threads)  # for a configuration that does not set this number
        return Rig(plan, self.folder / "parts" / str(self._rigs))

    def _measure_again(self, plan: RunSpec, candidate: Candidate) -> tuple[Rates, Flow] | None:
        """Measure the parts that `candidate` changes, alternately with the present ones. None: the new run fails."""
        if self.rig is None:
            return None
        try:
            rig = self._build(plan)
        except FastTrainError:  # some conflicts are found only when the model is built
            return None
        try:
            rig.warm_up(SECONDS / 2)
            both: dict[str, Samples] = {"now": {}, "changed": {}}
            names = windows_of(rig, candidate.parts)
            measure({"now": self.rig, "changed": rig}, names, SECONDS / 2, both, rounds=AGAIN_ROUNDS)
            changed = self.situation.rates.scaled(ratios_of(both["changed"], both["now"]))
            return changed, rig.flow(self.facts, self.machine)
        except EnvError:
            return None
        finally:
            rig.close()

    def _try(self, advice: Advice, number: int) -> Advice:
        """Train twice with the present and twice with the changed configuration; the faster run of each is compared."""
        config = self.plan.config
        rollout = config.num_envs if config.algo.spec.off_policy else config.algo.rollout_size
        steps = max(int(2 * SECONDS / typical(self.samples["train"])), 6 * rollout)
        short = [f"total_timesteps={steps}", "eval.episodes=2", "live=off", "report=false"]
        if config.algo.spec.off_policy:
            short.append(f"warmup_steps={min(config.warmup_steps, steps // 10)}")
        typed = [text for text in self.case.overrides if key_of(text).split(".")[0] not in NOT_TRIED]
        base = merged(typed, short)
        sides = {"now": base, "changed": merged(base, advice.candidate.overrides)}
        rates: dict[str, list[float]] = {"now": [], "changed": []}
        for turn, side in enumerate(("now", "changed", "changed", "now")):
            folder = self.folder / "tries" / f"{number}_{turn}_{side}"
            title = f"trying {advice.candidate.text}: training {turn + 1} of 4"
            with activity(self.console, title, partial(last_line, folder)):
                cell, stopped = run_cell("train", sides[side], folder)
            if stopped:
                raise KeyboardInterrupt
            if not cell.done:
                return advice._replace(error=cell.error or "it wrote no summary.json")
            rates[side].append(cell.rate)
        self.tried.append({"change": advice.candidate.text, "env_steps": steps, "steps_per_s": rates})
        return advice._replace(real=max(rates["changed"]) / max(rates["now"]) - 1.0)

    def report(self, status: str) -> None:
        """Print the results that are not printed yet; write doctor.json."""
        if self.config.doctor.test != "all" or not self.advised:
            show.parts(self.console, self.situation)
        if self.advised:
            show.advices(self.console, self.advices[:SHOWN], self.situation)
        if status == "stopped":
            say(self.console, "stopped; these are the results so far")
        write_json(self.folder / "doctor.json", self.to_dict(status))
        say(self.console, f"written to {self.folder / 'doctor.json'}")

    def to_dict(self, status: str) -> dict[str, Any]:
        """doctor.json; rates in env steps per second."""
        rates, run_s = self.situation.rates, self.situation.run_s
        limit = composed_limit(rates, self.flow) if {"env", "policy", "update"} <= set(self.samples) else None
        steps_per_s = None if run_s is None else 1.0 / run_s
        return {
            "schema": DOCTOR_SCHEMA,
            "status": status,
            "machine": show.machine_dict(self.machine, self.plan.config),
            "overrides": self.case.overrides,
            "alone_steps_per_s": {part: 1.0 / value for part, value in rates._asdict().items() if value},
            "seconds_per_step": {part: value for part, value in rates._asdict().items() if value is not None},
            "windows_s": self.samples,
            "flow": self.flow._asdict(),
            "limit_steps_per_s": limit,
            "steps_per_s": steps_per_s,
            "of_run": self.case.run,
            "share_of_limit": steps_per_s / limit if limit and steps_per_s else None,
            **({} if self.engines is None else {"engines": self.engines[0]}),
            "advice": [advice.to_dict() for advice in self.advices],
            "tries": self.tried,
        }

    def close(self) -> None:
        if self.rig is not None:
            self.rig.close()
            self.rig = None
        set_threads(self._torch_threads)
