"""`fasttrain compare candidates=ablate +profile=speed`: which settings of the profile make training faster here.

A lever is a setting that differs between baseline and profile. Each is measured twice: once added on the way from the
baseline to the profile, once left out of the profile. It is dropped if the profile is clearly no slower without it, or
learns better without it. The kept levers form profile/measured.yaml, which is then compared with the whole profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fasttrain.errors import EXIT_CRASHED, EXIT_DONE, EXIT_STOPPED, ConfigError
from fasttrain.runs.view import FittingTable, make_console
from fasttrain.saving.files import read_json
from fasttrain.spec.checks import BY_NAME, NOT_APPLICABLE
from fasttrain.spec.precedence import key_of
from fasttrain.spec.setting import did_you_mean
from fasttrain.terminal import command, spelt, with_interval
from fasttrain_studies.judge import choose_metric, compared, read_outcome, speed_ratio
from fasttrain_studies.settings import Config
from fasttrain_studies.statistics import FAIL, Comparison, Ratio
from fasttrain_studies.study import MINUTES, Cell, Compose, Study, Wanted, base_overrides, merged, settings

BASELINE, WHOLE, MEASURED = "baseline", "profile", "measured"
FIRST_S = 6.0  # length in seconds of the first two trainings, one of the baseline and one of the profile
SHARE_OF_CELLS = 0.8  # share of the time limit for measuring levers; the remaining time is for the last comparison
ROUNDS = 2
CHECKS = 3  # runs of the measured profile, and of the whole profile, in the last comparison
LONGEST_S, SHORTEST_S = 60.0, 2.0  # longest and shortest training, in seconds
MOST_OVERTIME = 1.5  # a slow training ends after this factor times the seconds that the profile needs
# Name of a lever → its settings. Every setting that is not listed here is a lever by itself.
TOGETHER = {
    "learning_rate": ("algo.learning_rate",),
    "n_epochs": ("algo.n_epochs",),
    "rollout_size": ("algo.rollout_size",),
    "logging": ("log_every", "train_log_enabled", "train_log_to_console", "train_log_to_file"),
}


@dataclass(frozen=True)
class Lever:
    """A change from the baseline's settings to the profile's."""

    name: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def flag_class(self) -> str:
        """exact, rounding or trade-off. A hyperparameter is a trade-off."""
        if self.name in BY_NAME:
            return BY_NAME[self.name].class_of(self.after[self.name])
        return "exact" if self.name == "logging" else "trade-off"

    def text(self) -> str:
        """`stock → fast`, for each setting that differs."""
        pairs = [(self.before[key], self.after[key]) for key in self.before if self.before[key] != self.after[key]]
        return ", ".join(f"{spelt(old, '-')} → {spelt(new, '-')}" for old, new in pairs)


@dataclass(frozen=True)
class Finding:
    """The measured effect of a lever."""

    lever: Lever
    added: Ratio | None  # speed with ÷ without the lever, when levers are added one by one to the baseline
    within: Ratio | None  # speed of the profile ÷ speed of the profile without the lever
    quality: Comparison | None  # profile - profile without the lever; None: it changes no results, or too few episodes
    failed: bool = False  # the profile does not run without the lever

    @property
    def keep(self) -> bool:
        """Whether the lever is kept. It is dropped if it costs quality, or if it clearly gains no speed."""
        if self.costs_quality or self.brings_quality:
            return not self.costs_quality
        if self.within is None:
            return True
        return not self.within.alike and not (self.within.clear and self.within.value < 1)

    @property
    def costs_quality(self) -> bool:
        return self.quality is not None and self.quality.verdict == FAIL

    @property
    def brings_quality(self) -> bool:
        return self.quality is not None and self.quality.pairs > 1 and self.quality.low > 0

    def why(self) -> str:
        if self.costs_quality:
            return "drop: the profile learns better without it"
        if self.within is None:
            return "keep: the profile does not run without it" if self.failed else "keep: there was no time left"
        if self.brings_quality:
            return "keep: the profile learns worse without it"
        gain = f"{self.within.text()} the speed with it"
        if self.within.clear:
            return f"keep: {gain}" if self.within.value > 1 else f"drop: slower with it, {gain}"
        return f"drop: no gain, {gain}" if self.within.alike else f"keep: the noise is larger than the effect, {gain}"


def is_ablation(config: Config) -> bool:
    """Whether the candidates are `ablate` or `{ablate: [num_envs]}`."""
    return re.match(r"\s*\{?\s*ablate\b", config.candidates or "") is not None


def asked_of(config: Config) -> list[str]:
    """The levers that the user named; empty: all levers."""
    return re.findall(r"[\w.]+", str(config.candidates))[1:]


def ablate(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], compose: Compose) -> int:
    """Run the trainings, write study.json, profile/measured.yaml and the report.

    Returns 4 if stopped by a signal, 1 if baseline or profile could not be run, else 0. Raises ConfigError if no
    profile is named, or nothing in it differs from the baseline.
    """
    profiles = [key for key in overrides if key_of(key) == "profile"]
    if not profiles or profiles[-1].partition("=")[2] == BASELINE:
        example = f"{command()} compare candidates=ablate +profile=speed"
        raise ConfigError(f"candidates=ablate needs the profile whose settings are measured: {example}")
    if wrong := next((key for key in sources if key == "seeds" or key.startswith("stop.")), ""):
        raise ConfigError(f"{wrong} has no effect with candidates=ablate, which ends after minutes=…; remove it")
    base = [text for text in base_overrides(overrides) if key_of(text) != "profile"]
    before = settings(compose(merged(base, ["profile=baseline"])))
    levers = find_levers(before, settings(config))
    if not levers:
        raise ConfigError(f"{profiles[-1]}: nothing in it differs from the baseline")
    chosen_levers(levers, asked_of(config))  # raises an error for a wrong name before anything runs
    asked = [text for text in overrides if text.replace("'", "") != "candidates=ablate"]
    study = Study("ablate", folder, asked, make_console(), config.on_existing == "overwrite")
    ablation = Ablation(study, config, base, levers)
    try:
        return ablation.run()
    except KeyboardInterrupt:
        ablation.conclude(written=False)
        return EXIT_STOPPED


class Ablation:
    def __init__(self, study: Study, config: Config, base: Sequence[str], levers: Sequence[Lever]) -> None:
        self.study, self.config, self.base = study, config, list(base)
        self.after, self.all_levers = settings(config), list(levers)
        self._names = tuple(lever.name for lever in levers)
        self.levers: list[Lever] = []
        self.wanted: list[Wanted] = []
        self.budget_s = 60 * (config.minutes or MINUTES)

    def run(self) -> int:
        """Run baseline and profile, then the runs for every lever, then the last comparison. Returns the exit code."""
        if not self._run_ends():
            return EXIT_CRASHED
        self.wanted = self._plan_cells()
        self.study.run(self.wanted, SHARE_OF_CELLS * self.budget_s)
        self.conclude(written=True)
        return EXIT_DONE

    def _run_ends(self) -> bool:
        """Measure the speed of baseline and profile, and find the levers that have an effect on this machine."""
        seed, horizon = self.config.seed, (10**9, FIRST_S)
        found = self.study.run(
            [self._wanted(BASELINE, (), seed, horizon), self._wanted(WHOLE, self._names, seed, horizon)]
        )
        cells = [by_seed[seed] for by_seed in found.values() if by_seed]
        if len(cells) < 2:
            self.study.say("candidates=ablate: baseline or profile could not be run; see above")
            return False
        plans = [read_json(cell.folder / "plan.json") for cell in cells]
        self.levers = chosen_levers(effective_levers(self.all_levers, *plans), asked_of(self.config))
        self.study.say(f"levers: {', '.join(lever.name for lever in self.levers)}")
        if skipped := [lever.name for lever in self.all_levers if lever not in self.levers]:
            self.study.say(f"not measured, because these have no effect here or were not named: {', '.join(skipped)}")
        self.speed = cells[1].rate
        self.overhead_s = sum(cell.seconds - cell.summary["wall_s"] for cell in cells) / 2
        return True

    def _plan_cells(self) -> list[Wanted]:
        """The trainings, in two rounds over all levers. Their length is chosen so that all fit into the time limit."""
        names = [lever.name for lever in self.levers]
        fixed = [name for name in self._names if name not in names]  # levers that are applied in every training
        ways: list[tuple[str, tuple[str, ...]]] = [(WHOLE, self._names)]  # the runs that decide what is kept come first
        ways += [(f"-{name}", (*fixed, *(other for other in names if other != name))) for name in names]
        ways += [(BASELINE, tuple(fixed))]
        ways += [(f"+{name}", (*fixed, *names[: place + 1])) for place, name in enumerate(names[:-1])]
        left = SHARE_OF_CELLS * self.budget_s - self.study.spent_s()
        seconds = min(LONGEST_S, max(SHORTEST_S, left / (ROUNDS * len(ways)) - self.overhead_s))
        self.seconds = self.study.notes.setdefault("cell_s", round(seconds, 1))  # a continued study keeps the old value
        self.horizon = max(1, round(self.speed * self.seconds)), MOST_OVERTIME * self.seconds
        return [
            self._wanted(label, applied, self.config.seed + number, self.horizon)
            for number in range(ROUNDS)
            for label, applied in ways
        ]

    def _wanted(self, label: str, applied: Sequence[str], seed: int, horizon: tuple[int, float]) -> Wanted:
        name = "cell-" + "".join(letter if letter.isalnum() else "_" for letter in label.replace("-", "without_"))
        values = values_with(self.after, self.all_levers, applied)
        self.study.write_profile(name, values, f"a cell of the study: {label}", {})
        return self._cell(label, self.study.use_profile(name), seed, horizon)

    def _cell(self, label: str, profile: Sequence[str], seed: int, horizon: tuple[int, float]) -> Wanted:
        steps, limit_s = horizon
        typed = {key_of(text) for text in self.base}
        more = [f"stop.max_minutes={limit_s / 60:.4f}"]
        more += [] if "total_timesteps" in typed else [f"total_timesteps={steps}"]
        more += [] if "eval.episodes" in typed else [f"eval.episodes={self.episodes}"]
        return Wanted(label, seed, tuple(merged(self.base, [*more, *profile])))

    @property
    def episodes(self) -> int:
        """Episodes of an evaluation. They are few, because the study takes only minutes."""
        return min(self.config.eval.episodes, 300 if self.config.env.spec.native else 20)

    def conclude(self, written: bool) -> None:
        """Print and store the findings. `written`: also write the profile."""
        findings = self.findings()
        if findings:  # else study.json keeps the findings from before the study was stopped
            self.study.notes["rows"] = [_row(finding) for finding in findings]
            self.study.console.print()
            self.study.console.print(_table(findings))
        if written and findings:
            self._write(findings)
        self.study.conclude(self.study.failed())

    def findings(self) -> list[Finding]:
        cells = self.study.finished(self.wanted)
        whole = cells.get(WHOLE, {})
        if not whole:
            return []
        found, before = [], cells.get(BASELINE, {})
        for lever in self.levers:
            after = cells.get(f"+{lever.name}", whole if lever is self.levers[-1] else {})
            without = cells.get(f"-{lever.name}", {})
            failed = any(cell.label == f"-{lever.name}" for cell in self.study.failed())
            quality = self._quality(lever, whole, without)
            found.append(Finding(lever, speed_ratio(after, before), speed_ratio(whole, without), quality, failed))
            before = after
        return found

    def _quality(self, lever: Lever, whole: Mapping[int, Cell], without: Mapping[int, Cell]) -> Comparison | None:
        """Quality of the profile minus its quality without the lever, from the runs that reached the planned steps."""
        if lever.flag_class == "exact":
            return None
        ours, theirs = (
            {seed: read_outcome(cell) for seed, cell in cells.items() if cell.summary["env_steps"] >= self.horizon[0]}
            for cells in (whole, without)
        )
        metric = choose_metric([*ours.values(), *theirs.values()], self.config.gate, [self.config.algo.name])
        return compared(ours, theirs, self.config.gate, metric)

    def _write(self, findings: Sequence[Finding]) -> None:
        """Write the profile of the kept levers, and compare its speed with the whole profile."""
        kept = [finding.lever.name for finding in findings if finding.keep]
        others = [lever.name for lever in self.all_levers if lever not in self.levers]
        path = self._write_profile(findings, [*kept, *others], "")
        checks = []
        for seed in range(self.config.seed + ROUNDS, self.config.seed + ROUNDS + CHECKS):
            checks.append(self._wanted(WHOLE, self._names, seed, self.horizon))
            checks.append(self._cell(MEASURED, self.study.use_profile(MEASURED), seed, self.horizon))
        cells = self.study.run(checks, self.budget_s)
        result = speed_ratio(cells[MEASURED], cells[WHOLE])
        said = "not compared with the profile, because the time was over"
        if result is not None:
            said = f"{result.text()} as fast as the profile"
            if result.clear and result.value < 1:
                said += "; the levers help only together, so that all are kept"
                kept = [finding.lever.name for finding in findings]
        self._write_profile(findings, [*kept, *others], said)
        self.study.notes["kept"] = kept
        self.study.notes["result"] = result and result.to_dict()
        self.study.say(f"kept: {', '.join(kept) or 'nothing'}; the result is {said}")
        self.study.say_profile(MEASURED, path, self.base)

    def _write_profile(self, findings: Sequence[Finding], applied: Sequence[str], said: str) -> Path:
        values = values_with(self.after, self.all_levers, applied)
        notes = {key: finding.why() for finding in findings for key in finding.lever.before}
        head = (
            f"The settings of the profile that pay on {self.config.env.name} with {self.config.algo.name}, measured in "
            f"{ROUNDS} rounds of {self.seconds:.0f} s a cell. {said}"
        )
        return self.study.write_profile(MEASURED, values, head, notes)


def find_levers(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Lever]:
    """The levers that change the settings `before` into `after` (from `study.settings`), in the order of `before`."""
    owner = {key: name for name, keys in TOGETHER.items() for key in keys}
    names = dict.fromkeys(owner.get(key, key) for key in before if before[key] != after[key])
    keys = {name: TOGETHER.get(name, (name,)) for name in names}
    return [Lever(name, {k: before[k] for k in keys[name]}, {k: after[k] for k in keys[name]}) for name in names]


def effective_levers(levers: Sequence[Lever], baseline: Mapping[str, Any], profile: Mapping[str, Any]) -> list[Lever]:
    """The levers with different effective values in the plans of baseline and profile (contents of plan.json)."""
    ends = [{row["flag"]: row["effective"] for row in plan["flags"]} for plan in (baseline, profile)]

    def differs(lever: Lever) -> bool:
        flags = [key for key in lever.before if key in BY_NAME]
        if not flags:
            return True
        values = [(ends[0].get(flag), ends[1].get(flag)) for flag in flags]
        return any(old != new and new != NOT_APPLICABLE for old, new in values)

    return [lever for lever in levers if differs(lever)]


def chosen_levers(levers: Sequence[Lever], names: Sequence[str]) -> list[Lever]:
    """The levers with these names; all levers if `names` is empty. Raises ConfigError if a name is no lever here."""
    known = [lever.name for lever in levers]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"candidates={{ablate: […]}}: {name} has no effect here{hint}; choose among {', '.join(known)}"
            )
    return [lever for lever in levers if not names or lever.name in names]


def values_with(after: Mapping[str, Any], levers: Sequence[Lever], applied: Sequence[str]) -> dict[str, Any]:
    """The profile's settings, with the baseline's values for all `levers` that `applied` does not name."""
    values = dict(after)
    for lever in levers:
        values.update(lever.after if lever.name in applied else lever.before)
    return values


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.lever.name,
        "class": finding.lever.flag_class,
        "change": finding.lever.text(),
        "added": finding.added and finding.added.to_dict(),
        "within": finding.within and finding.within.to_dict(),
        "quality": finding.quality and asdict(finding.quality),
        "keep": finding.keep,
        "why": finding.why(),
    }


def _table(findings: Sequence[Finding]) -> FittingTable:
    names = ["flag", "change", "class", "added on the way", "profile ÷ without", "quality with it", "verdict"]
    table = FittingTable(names)
    for finding in findings:
        quality = finding.quality
        shown = "same numbers" if finding.lever.flag_class == "exact" else "-"
        if quality is not None:
            shown = with_interval(quality.difference, (quality.low, quality.high), "{:+.3g}")
        ratios = ["-" if each is None else each.text() for each in (finding.added, finding.within)]
        told = [finding.lever.name, finding.lever.text(), finding.lever.flag_class, *ratios, shown, finding.why()]
        table.add_row(*told, style="" if finding.keep else "dim")
    return table
