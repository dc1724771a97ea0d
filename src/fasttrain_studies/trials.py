"""The trials of a search. Optuna draws their settings and judges the results. Processes can share the journal file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fasttrain.errors import ConfigError
from fasttrain.saving.files import holder, lock_folder
from fasttrain.terminal import spelt
from fasttrain_studies.space import Point, Range, Space

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from optuna.trial import FrozenTrial, Trial

JOURNAL, LOCK = "trials.jsonl", ".trials.lock"
RANDOM = 5  # trials with random settings before TPE begins
JUDGED = 4  # trials that must be complete before any trial can end early
WORKED_BY, WHY = "worked_by", "why"  # user attributes of a trial
WORKERS = ".workers"  # a folder for each process of the search; the process holds its lock until it ends


def check_installed() -> None:
    """Raises ConfigError if Optuna is missing."""
    if missing := [name for name in ("optuna", "filelock") if find_spec(name) is None]:
        raise ConfigError(f"tune needs {' and '.join(missing)}: pip install 'fasttrain[tune]'")


def lock_of(folder: Path) -> BaseFileLock:
    """The lock of the journal and of study.json. It is free after a process was killed; Optuna's locks are not."""
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / LOCK)


class Trials:
    """The trials of one objective and one space.

    Args:
        objective: a text of the objective and the trainings' settings. Only trials with the same text can be compared.
        lock: as `lock_of` returns it.
        seed: of Optuna's sampler. None for processes that join a search, so that they draw other settings.
    """

    def __init__(self, folder: Path, lock: Any, objective: str, space: Space, seed: int | None) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        kinds, self._states = optuna.distributions, optuna.trial.TrialState
        self._space, self._folder = space, folder / WORKERS
        self._worker, self._held = uuid4().hex, ExitStack()
        (self._folder / self._worker).mkdir(parents=True, exist_ok=True)
        self._held.enter_context(lock_folder(self._folder / self._worker))
        self._texts = {key: {spelt(each): each for each in own} for key, own in space.items() if isinstance(own, list)}
        self._distributions: dict[str, Any] = {
            key: kinds.CategoricalDistribution([*self._texts[key]]) if isinstance(own, list)
            else kinds.IntDistribution(int(own.low), int(own.high), own.log) if own.whole
            else kinds.FloatDistribution(own.low, own.high, own.log)
            for key, own in space.items()
        }  # fmt: skip
        mark = hashlib.sha256(repr((objective, sorted(space.items()))).encode()).hexdigest()[:8]
        try:
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL), lock_obj=lock)),
                study_name=mark,  # only trials of one objective and space can be compared
                load_if_exists=True,
                direction="maximize",
                sampler=optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=JUDGED, n_min_trials=JUDGED),
            )
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder / JOURNAL} cannot be read ({type(error).__name__}: {error}): remove it, and the search "
                "begins again"
            ) from error

    def leave(self) -> None:
        """Let other processes repeat the unfinished trials of this process."""
        self._held.close()

    def add_start(self, start: Point) -> None:
        """Let the first trial have the settings of `start`, without values outside of the space."""
        known = {key: value if isinstance(self._space[key], Range) else spelt(value) for key, value in start.items()
                 if key in self._space and _holds(self._space[key], value)}  # fmt: skip
        self._study.enqueue_trial(known, skip_if_exists=True)

    def ask(self) -> Trial:
        """A new trial, or again the trial of a killed process."""
        for number in self.running(alive=False):
            with suppress(ValueError, RuntimeError):  # another process has already taken this trial
                self._study.enqueue_trial(self._study.tell(number, state=self._states.FAIL).params)
        return self._study.ask(self._distributions)

    def point(self, params: Mapping[str, Any]) -> Point:
        """The settings of a trial's parameters."""
        return {
            key: self._texts[key][params[key]] if isinstance(own, list)
            else params[key] if own.whole else min(max(float(f"{params[key]:.5g}"), own.low), own.high)
            for key, own in self._space.items()
        }  # fmt: skip

    def begin(self, trial: Trial) -> None:
        """Note that this process runs the trial."""
        trial.set_user_attr(WORKED_BY, self._worker)

    def end(self, trial: Trial, value: float | None, why: str = "") -> None:
        """Tell Optuna the value. None: the trial was refused or ended early; `why` is stored."""
        trial.set_user_attr(WHY, why)
        self._study.tell(trial, value, state=self._states.PRUNED if value is None else self._states.COMPLETE)

    def repeat(self, trial: Trial) -> bool:
        """Whether the same settings were tried or refused before. If so, `trial` ends with the earlier value."""
        ended = self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE, self._states.PRUNED))
        same = [each for each in ended if each.params == trial.params]
        if same:
            self.end(trial, same[0].value if same[0].state == self._states.COMPLETE else None)
        return bool(same)

    def known(self) -> list[FrozenTrial]:
        """All trials that were begun, except trials of killed processes that `ask` has begun again."""
        every = self._study.get_trials(deepcopy=False)
        return [each for each in every if WORKED_BY in each.user_attrs and each.state != self._states.FAIL]

    def running(self, alive: bool = True) -> set[int]:
        """Numbers of the trials that other processes run. `alive=False`: of trials whose process was killed."""
        found = set()
        for each in self.known():
            worker = str(each.user_attrs[WORKED_BY])
            others = each.state == self._states.RUNNING and worker != self._worker
            if others and bool(holder(self._folder / worker)) == alive:
                found.add(each.number)
        return found

    def ranked(self) -> list[tuple[Point, float | None, str]]:
        """(settings, value, why) of the finished trials, the best first. Value None: refused or ended early."""
        done = self._states.COMPLETE
        rows = [
            (self.point(each.params), each.value if each.state == done else None, str(each.user_attrs.get(WHY, "")))
            for each in self.known() if each.state.is_finished()
        ]  # fmt: skip
        return sorted(rows, key=lambda row: -math.inf if row[1] is None else row[1], reverse=True)


def _holds(own: list[Any] | Range, value: object) -> bool:
    if isinstance(own, list):
        return spelt(value) in map(spelt, own)
    return isinstance(value, (int, float)) and own.low <= value <= own.high
