"""Loggers and callbacks that a configuration names: SB3's, ours and the user's.

progress.csv of a resumed run is SB3's own file, gone on with instead of begun anew.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    HumanOutputFormat,
    KVWriter,
    Logger,
    SeqWriter,
    TensorBoardOutputFormat,
)

from fasttrain.envs.user_code import blame, look_up
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.spec.config import Config
from fasttrain.spec.typed import Named, did_you_mean, named

T = TypeVar("T")

STEPS = "time/total_timesteps"


class ContinuedCSV(CSVOutputFormat):
    """Rows and columns that are there stay; SB3's class would empty the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.with_name(f"{file.name}.unused")))
        self.file.close()
        file.with_name(f"{file.name}.unused").unlink()
        file.touch()
        self.file = file.open("r+", encoding="utf-8", newline="")
        self._find_end()

    def cut(self, env_steps: int) -> None:
        """Forget rows of more env steps."""
        self.file.seek(0)
        rows = list(csv.reader(io.StringIO(self.file.read())))
        if rows and STEPS in rows[0]:
            column = rows[0].index(STEPS)
            kept = [row for row in rows[1:] if len(row) > column and _steps_of(row[column]) <= env_steps]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([rows[0], *kept])
            self.file.seek(0)
            self.file.truncate()
            self.file.write(text.getvalue())
            self.file.flush()
        self._find_end()

    def _find_end(self) -> None:
        self.file.seek(0)
        header = self.file.readline().rstrip("\n")
        self.keys = header.split(",") if header else []
        self.file.seek(0, io.SEEK_END)


class Watched(KVWriter):
    """A writer of the user's: one that raises is left out from there on, and one line says so."""

    def __init__(self, writer: KVWriter, say: Callable[[str], None]) -> None:
        self.writer, self.failed, self._say = writer, False, say

    def write(self, *arguments: Any, **further: Any) -> None:
        self._call("write", *arguments, **further)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any, **further: Any) -> None:
        if self.failed:
            return
        try:
            getattr(self.writer, method)(*arguments, **further)
        except Exception as error:  # whatever it is, no training ends for it
            self.failed = True
            name = type(self.writer).__name__
            self._say(f"warning: logger {name}.{method} failed: {blame(error)}; it is left out, the run goes on")


class WatchedSequence(Watched, SeqWriter):
    """One that takes SB3's plain lines too."""

    def write_sequence(self, sequence: list[str]) -> None:
        self._call("write_sequence", sequence)


def make_logger(config: Config, folder: Path, continued: bool, say: Callable[[str], None] = print) -> Logger:
    """Where SB3's statistics go, under SB3's names over env steps: as `loggers` lists it, else as `train_log_…` say.

    Args:
        continued: the files of a run that is resumed are gone on with.
        say: takes a line for the user.

    Raises:
        ConfigError: a logger is unknown, cannot be made, or is no `KVWriter`.
    """
    wanted: list[Named] = list(config.loggers or ())
    if config.loggers is None and config.train_log_enabled:
        wanted = [*(["csv"] if config.train_log_to_file else []), *(["stdout"] if config.train_log_to_console else [])]
    return Logger(str(folder), [_writer(entry, folder, continued, say) for entry in wanted])


def _writer(entry: Named, folder: Path, continued: bool, say: Callable[[str], None]) -> KVWriter:
    name, arguments = named(entry, "logger", "loggers")
    if name == "csv":
        file = folder / "progress.csv"
        return ContinuedCSV(file) if continued else CSVOutputFormat(str(file))
    if name == "stdout":
        return HumanOutputFormat(sys.stdout)
    if name == "tensorboard":
        try:
            return TensorBoardOutputFormat(str(folder / "tensorboard"))
        except AssertionError as error:
            raise ConfigError("loggers: tensorboard is not installed; pip install tensorboard") from error
    if ":" not in name:
        known = ("csv", "stdout", "tensorboard")
        raise ConfigError(
            f"loggers: {name!r} is none of {', '.join(known)}, nor module:Class{did_you_mean(name, known)}"
        )
    writer = made(name, arguments, "loggers", KVWriter)
    return (WatchedSequence if isinstance(writer, SeqWriter) else Watched)(writer, say)


def made(name: str, arguments: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """An instance of the user's class `module:Class`.

    Raises:
        ConfigError: there is no such class, it does not take the arguments, or it is no `kind`.
    """
    found = look_up(name, f"{key}: {name}", os.getcwd(), f"{key}=[my_game.parts:Mine]")
    try:
        part = found(**arguments)
    except Exception as error:
        raise ConfigError(f"{key}: {name} could not be made with {dict(arguments)}: {blame(error)}") from error
    if not isinstance(part, kind):
        raise ConfigError(f"{key}: {name} must be a {kind.__module__}.{kind.__name__}, it is {part!r:.80}")
    return part


def cut_back(logger: Logger, env_steps: int) -> None:
    """What was logged after that is logged again."""
    for writer in logger.output_formats:
        if isinstance(writer, ContinuedCSV):
            writer.cut(env_steps)


def _steps_of(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0


class UsersCallbacks(CallbackList):
    """The callbacks that `callbacks` names. Their time is phase `log`; one that returns False ends the training."""

    def __init__(self, config: Config, clock: PhaseClock) -> None:
        entries = [named(entry, "callback", "callbacks") for entry in config.callbacks]
        kind: Any = BaseCallback  # abstract: no type to mypy
        super().__init__([made(name, arguments, "callbacks", kind) for name, arguments in entries])
        self.clock = clock
        self.stopped_by = ""

    def _on_step(self) -> bool:
        with self.clock.phase("log"):
            for callback in self.callbacks:
                if not callback.on_step():
                    self.stopped_by = self.stopped_by or type(callback).__name__
        return True
