"""A study: many cells in one folder, run in turn, stored one by one, gone on with where they stopped.

What it recommends is written as a profile: flat values with the evidence beside them, to be used as `+profile=NAME`.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT
from fasttrain.runs.activity import activity
from fasttrain.runs.folders import clear
from fasttrain.runs.progress import clock_text
from fasttrain.runs.view import say
from fasttrain.saving.files import read_json, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.flags import FLAGS
from fasttrain.spec.overrides import key_of
from fasttrain.studies.cells import Cell, last_line, run_cell
from fasttrain.terminal import command, rate_text


def settings(config: Config) -> dict[str, Any]:
    """What a profile may choose, by dotted key: every flag, and what belongs to the tier of algorithm and game."""
    found = {flag.name: getattr(config, flag.name) for flag in FLAGS}
    natives = config.own.native_num_envs if config.algo.spec.on_policy else None
    if natives is not None and config.vec_env in ("auto", "native"):
        found["num_envs"] = natives
    found["batch_size"] = config.batch_size or config.own.batch_size
    below = {f"algo.{name}": getattr(config.algo, name, None) for name in ("learning_rate", "n_epochs", "rollout_size")}
    return {**found, **{key: value for key, value in below.items() if value is not None}}


def write_profile(study: Path, name: str, values: Mapping[str, Any], head: str, notes: Mapping[str, str]) -> Path:
    """`study`/conf/profile/NAME.yaml; `notes` become comments behind the keys they are about."""
    folder = study / "conf" / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in head.splitlines())]
    below = {key: value for key, value in values.items() if key.startswith("algo.")}
    for key, value in values.items():
        if key not in below:
            lines.append(_line(key, value, notes.get(key, "")))
    if below:
        lines.append("algo:")
        lines += ["  " + _line(key.removeprefix("algo."), value, notes.get(key, "")) for key, value in below.items()]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _line(key: str, value: Any, note: str) -> str:
    text = yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True).strip()
    return f"{text} # {note}" if note else text


def use_profile(study: Path, name: str) -> list[str]:
    """The arguments that run with such a profile, wherever else the user's configuration lies."""
    place = str(study / "conf").replace("\\", "/").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{place}']", f"+profile={name}"]


def way_to_use(study: Path, name: str) -> str:
    """What to type to train with it."""
    return f"{command()} --config-dir {shlex.quote(str(study / 'conf'))} +profile={name}"


STUDY_SCHEMA = 1
# Keys that speak to the study, not to its cells.
OWN_KEYS = (
    "candidates",
    "on_existing",
    "seeds",
    "horizon_minutes",
    "study",
    "seed",
    "gate",
    "ablate",
    "tune",
    "report",
    "live",
)
FIXED = ("schema", "command", "arguments", "cells")  # entries of study.json that are no notes
CELL_OVERRIDES = ("live=off", "report=false")
# What is no part of what a cell is: one that was not finished is begun anew, so a checkpoint would only take time.
BESIDES = ("on_existing=overwrite", "checkpoint_every_minutes=0")


Compose = Callable[[Sequence[str]], Config]  # command line arguments → the typed configuration


class Wanted(NamedTuple):
    """A cell that is to be run."""

    label: str
    seed: int
    overrides: tuple[str, ...]  # without seed and folder


def base_overrides(overrides: Sequence[str]) -> list[str]:
    """Of what was typed, what every cell shares."""
    return [text for text in overrides if key_of(text).split(".")[0] not in OWN_KEYS]


class Study:
    """The cells of one folder. `study.json` is rewritten after each; `notes` are its further entries.

    Args:
        folder: of the study; finished cells that it holds already are not run again.
        overrides: what was typed, stored so that `study=FOLDER` alone goes on.
    """

    def __init__(self, command: str, folder: Path, overrides: Sequence[str], console: Console) -> None:
        self.command, self.folder, self.console = command, folder.absolute(), console
        self.arguments = [text for text in overrides if key_of(text) not in ("study", "on_existing")]
        if "on_existing=overwrite" in overrides:
            clear(self.folder, "study")
        stored = read_json(self.folder / "study.json")
        self.notes: dict[str, Any] = {key: value for key, value in stored.items() if key not in FIXED}
        self.cells = [Cell.from_dict(cell, self.folder) for cell in stored.get("cells", [])]
        self.begun = time.perf_counter()
        self.store()  # from now on the folder is known for a study's

    def find(self, wanted: Wanted) -> Cell | None:
        """The finished cell for just this. Of two candidates that ask for the same each has its own."""
        return next((cell for cell in self.cells if cell.done and self._is(cell, wanted)), None)

    def _is(self, cell: Cell, wanted: Wanted) -> bool:
        return cell.label == wanted.label and cell.overrides == self._overrides(wanted)

    def run(self, cells: Iterable[Wanted], until_s: float = math.inf) -> dict[str, dict[int, Cell]]:
        """Run what is not finished, in this order; returns the finished ones by label and seed.

        A cell that fails is said and stored and stops nothing; a label whose cell was illegal is not tried again with
        other seeds. None is begun when `until_s` seconds of the study are over.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came; what is finished is stored.
        """
        todo = list(cells)
        illegal: set[str] = set()
        for number, wanted in enumerate(todo):
            cell = self.find(wanted)
            if cell is None and wanted.label not in illegal and self.spent_s() < until_s:
                cell = self._run(wanted, f"[{number + 1}/{len(todo)}]", todo[number + 1 :], until_s)
                if cell.exit_code == EXIT_WRONG_INPUT:
                    illegal.add(wanted.label)
        return self.finished(todo)

    def finished(self, cells: Iterable[Wanted]) -> dict[str, dict[int, Cell]]:
        """Those of `cells` that are finished, by label and seed; labels without any are there too."""
        found: dict[str, dict[int, Cell]] = {}
        for wanted in cells:
            by_seed = found.setdefault(wanted.label, {})
            if (cell := self.find(wanted)) is not None:
                by_seed[wanted.seed] = cell
        return found

    def failed(self, cells: Iterable[Wanted]) -> list[Cell]:
        """Those of `cells` that ended with an error."""
        asked = list(cells)
        return [cell for cell in self.failures if any(self._is(cell, wanted) for wanted in asked)]

    def _run(self, wanted: Wanted, place: str, later: Sequence[Wanted], until_s: float) -> Cell:
        title, folder = f"{place} {wanted.label} seed {wanted.seed}", self._folder_of(wanted)
        with activity(self.console, title + self._eta([wanted, *later], until_s), lambda: last_line(folder)):
            overrides = self._overrides(wanted)
            cell, stopped = run_cell("train", [*overrides, *BESIDES], folder, wanted.label, wanted.seed)
            cell.overrides = overrides
        self.cells = [*(other for other in self.cells if not self._is(other, wanted)), cell]
        self.store()
        self.say(f"{title}: {described(cell)} · {cell.seconds:.0f} s{self._eta(later, until_s)}")
        if stopped or cell.exit_code == EXIT_STOPPED:
            raise KeyboardInterrupt
        return cell

    def _overrides(self, wanted: Wanted) -> list[str]:
        return [*wanted.overrides, *CELL_OVERRIDES, f"seed={wanted.seed}"]

    def _folder_of(self, wanted: Wanted) -> Path:
        """Told apart by what was asked for: a candidate may keep its name and change."""
        mark = hashlib.sha256("\n".join(self._overrides(wanted)).encode()).hexdigest()[:6]
        name = "".join(letter if letter.isalnum() or letter in "-+.=_" else "-" for letter in wanted.label)[:60]
        return self.folder / "cells" / f"{name}_seed{wanted.seed}_{mark}"

    def _eta(self, later: Sequence[Wanted], until_s: float) -> str:
        """From what cells of the same label took, else from all; no later than when no more are begun."""
        done = [cell for cell in self.cells if cell.done]
        todo = [wanted for wanted in later if self.find(wanted) is None]
        if not done or not todo:
            return ""
        overall = sum(cell.seconds for cell in done) / len(done)
        total = 0.0
        for wanted in todo:
            same = [cell.seconds for cell in done if cell.label == wanted.label]
            total += sum(same) / len(same) if same else overall
        return f" · ETA {clock_text(min(total, max(0.0, until_s - self.spent_s())))}"

    def store(self) -> None:
        """Write study.json."""
        content = {"schema": STUDY_SCHEMA, "command": self.command, "arguments": self.arguments, **self.notes}
        write_json(self.folder / "study.json", {**content, "cells": [cell.to_dict(self.folder) for cell in self.cells]})

    def say(self, line: str) -> None:
        """One line, whole and as it is."""
        say(self.console, line)

    def spent_s(self) -> float:
        """Seconds since the study was begun or gone on with."""
        return time.perf_counter() - self.begun

    @property
    def failures(self) -> list[Cell]:
        """All cells that ended with an error, those of candidates that are asked for no more included."""
        return [cell for cell in self.cells if cell.exit_code not in (EXIT_DONE, EXIT_STOPPED)]


def described(cell: Cell) -> str:
    """`done · 61,234 steps/s · reward 2.9 · win 61.3 %`, or what went wrong."""
    quality, speed = cell.summary.get("quality") or {}, cell.summary.get("steps_per_s")
    facts = [cell.status]
    if speed is not None:
        facts.append(f"{rate_text(speed)} steps/s")
    if quality.get("mean_reward") is not None:
        facts.append(f"reward {quality['mean_reward']:.3g}")
    if quality.get("win_rate") is not None:
        facts.append(f"win {100 * quality['win_rate']:.1f} %")
    if cell.error:
        facts.append(cell.error)
    return " · ".join(facts)
