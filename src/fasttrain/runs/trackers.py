"""Experiment trackers behind SB3's logger, each found by its name (`fasttrain/integrations`, or a package of yours).

They get every row of the log under SB3's names over env steps, [PERF] and evaluations beside it, the settings at the
start, and at the end what the run came to, with model and report where the tracker keeps files. What they write lies
in the run's folder, or in the sweep's, where its cells are one group. A tracker that fails is left out from there on:
one line, and no run ends for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter, SeqWriter

from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import GROUP
from fasttrain.saving.files import read_json, write_json
from fasttrain.spec import plugins

IDS = "trackers.json"  # in the run's folder: as whom each tracker knows the run, for a resume
PROJECT = "fasttrain"
MOST_CHARACTERS = 500  # of a value: MLflow's limit of old servers, and nobody reads more
Numbers = Mapping[str, float]
Settings = Mapping[str, Any]


class Home:
    """Where a run's trackers write, and as whom they know it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        group = os.environ.get(GROUP)
        self.group = Path(group) if group and folder.is_relative_to(group) else None

    @property
    def shared(self) -> Path:
        """A folder for all runs of the group, else the run's own."""
        return self.group or self.folder

    def known_as(self, tracker: str) -> str | None:
        """The run's id there, if it is gone on with."""
        found = read_json(self.folder / IDS).get(tracker)
        return found if isinstance(found, str) else None

    def remember(self, tracker: str, run_id: str) -> None:
        """For a resume."""
        write_json(self.folder / IDS, {**read_json(self.folder / IDS), tracker: run_id})


class Tracker(KVWriter):
    """One run as one tracker sees it: what the entry point of a tracker's name, in `fasttrain.integrations`, names.

    Args:
        home: where it writes.
        settings: what the run was asked for, by dotted key.
        further: what `loggers` says beside the tracker's name.
    """

    name: str  # as `loggers` has it
    _over = False

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self.measure(numbers_of(key_values, key_excluded, self.name), step)

    def measure(self, numbers: Numbers, step: int) -> None:
        """Take a row."""

    def cut(self, env_steps: int) -> None:
        """What was written of later steps is written again."""

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        """The run is over: `done` or `stopped`, what it came to, what it left. How to look at it."""
        raise TypeError(type(self))

    def end(self, status: str) -> None:
        """Leave nothing open, after `done`, `stopped` or `failed`."""

    def close(self) -> None:
        self.over("failed")

    def over(self, status: str) -> None:
        """`end`, the first time."""
        over, self._over = self._over, True
        if not over:
            self.end(status)


def trackers() -> list[str]:
    """The names of those that packages offer; imports all integrations."""
    return [name for name, one in plugins.loaded(plugins.INTEGRATIONS).items() if _is_tracker(one)]


def _is_tracker(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Tracker)


def tracker(name: str) -> type[Tracker] | None:
    """The tracker of that name; None where it is none.

    Raises:
        ConfigError: the package that offers it cannot be loaded.
    """
    found = plugins.load(plugins.INTEGRATIONS, name) if name in plugins.names(plugins.INTEGRATIONS) else None
    return found if _is_tracker(found) else None


def started(kind: Any, home: Home, settings: Settings, further: Mapping[str, Any]) -> Tracker:
    """A tracker, made.

    Raises:
        ConfigError: its package is missing, or it takes no such arguments.
    """
    name = kind.name
    try:
        made: Tracker = kind(home, settings, **further)
    except ImportError as error:
        extra = f"; pip install 'fasttrain[{name}]'" if kind.__module__.partition(".")[0] in plugins.OURS else ""
        raise ConfigError(f"loggers: {name} needs what is not installed ({error}){extra}") from error
    except TypeError as error:
        raise ConfigError(f"loggers: {name} does not take {dict(further)}: {error}") from error
    return made


def numbers_of(
    key_values: Mapping[str, Any], excluded: Mapping[str, Sequence[str] | None], name: str
) -> dict[str, float]:
    """What a tracker can draw: finite numbers that are not kept from the writer of that name."""
    meant = {key: value for key, value in key_values.items() if name not in (excluded.get(key) or ())}
    kinds = (bool, int, float, np.number, np.bool_)
    found = {key: float(value) for key, value in meant.items() if isinstance(value, kinds)}
    return {key: value for key, value in found.items() if math.isfinite(value)}


class Watched(KVWriter, SeqWriter):
    """A tracker, or a writer of the user's: one that raises is left out from there on, and one line says so.

    Attributes:
        failed: why it is left out.
    """

    def __init__(self, writer: KVWriter | None, say: Callable[[str], None], name: str = "", failed: str = "") -> None:
        self.writer, self.failed, self._say = writer, failed, say
        self.name = name or type(writer).__name__

    def write(self, *arguments: object, **further: object) -> None:
        self._call("write", *arguments, **further)

    def write_sequence(self, sequence: list[str]) -> None:
        self._call("write_sequence", sequence)

    def cut(self, env_steps: int) -> None:
        self._call("cut", env_steps)

    def finish(self, *arguments: object) -> str:
        return str(self._call("finish", *arguments) or "")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object, **further: object) -> object:
        if self.failed or not hasattr(self.writer, method):
            return None
        try:
            return getattr(self.writer, method)(*arguments, **further)
        except Exception as error:  # whatever it is, no training ends for it
            self.failed = blame(error)
            self._say(f"warning: logger {self.name}.{method} failed: {self.failed}; it is left out, the run goes on")
            return None
