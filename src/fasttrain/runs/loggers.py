"""Loggers and callbacks that a configuration names: SB3's, ours and the user's.

progress.csv of a resumed run is SB3's own file, gone on with instead of begun anew.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.logger import CSVOutputFormat, HumanOutputFormat, KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.envs.names import NOTHING, Supplies, arguments, callable_at
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.folders import flat
from fasttrain.runs.logs import number_in
from fasttrain.runs.metrics import PROMETHEUS, check_metrics, endpoint_of
from fasttrain.runs.trackers import Home, Watched, numbers_of, started, tracker, trackers
from fasttrain.spec import plugins
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.setting import Named, named

T = TypeVar("T")

STEPS = "time/total_timesteps"


class ContinuedCSV(CSVOutputFormat):
    """Rows and columns that are there stay; SB3's class would empty the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(os.devnull)
        self.file.close()
        file.touch()
        self.file = file.open("r+", encoding="utf-8", newline="")
        self._find_end()

    def cut(self, env_steps: int) -> None:
        """Forget rows of more env steps."""
        self.file.seek(0)
        rows = list(csv.reader(io.StringIO(self.file.read())))
        if rows and STEPS in rows[0]:
            column = rows[0].index(STEPS)
            kept = [row for row in rows[1:] if len(row) > column and (number_in(row[column]) or 0.0) <= env_steps]
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


def check_loggers(config: Config) -> None:
    """Before anything starts: raises ConfigError where `loggers` has a name that nobody knows, or of no logger."""
    check_metrics(endpoint_of(config))
    for name in (named(entry, "logger", "loggers")[0] for entry in config.loggers or ()):
        if name in ("csv", "stdout", PROMETHEUS) or tracker(name):
            continue
        if ":" not in name:
            known = ("csv", "stdout", *trackers(), PROMETHEUS)
            none = f"{name!r} is none of {', '.join(known)}, nor module:Class"
            raise ConfigError(f"loggers: {none}{plugins.hint(name, known)}")
        callable_at(name, f"loggers: {name}", only=KVWriter)


def make_logger(config: Config, folder: Path, continued: bool, say: Callable[[str], None] = print) -> Logger:
    """Where SB3's statistics go, under SB3's names over env steps: as `loggers` lists it, else as `train_log_…` say.

    Args:
        continued: the files of a run that is resumed are gone on with.
        say: takes a line for the user.

    Raises:
        ConfigError: a logger is unknown, cannot be made, or is no `KVWriter`.
    """
    wanted: list[Named] = [one for one in config.loggers or () if named(one, "logger", "loggers")[0] != PROMETHEUS]
    if config.loggers is None and config.train_log_enabled:
        wanted = [*(["csv"] if config.train_log_to_file else []), *(["stdout"] if config.train_log_to_console else [])]
    writers: list[KVWriter] = []
    try:
        writers.extend(_writer(entry, config, folder, continued, say) for entry in wanted)
    except BaseException:
        Logger(None, writers).close()
        raise
    return Logger(str(folder), writers)


def _writer(entry: Named, config: Config, folder: Path, continued: bool, say: Callable[[str], None]) -> KVWriter:
    name, given = named(entry, "logger", "loggers")
    if name == "csv":
        file = folder / "progress.csv"
        return ContinuedCSV(file) if continued else CSVOutputFormat(str(file))
    if name == "stdout":
        return HumanOutputFormat(sys.stdout)
    if (kind := tracker(name)) is not None:
        try:
            return Watched(started(kind, Home(folder), _settings(config), given), say)
        except ConfigError:
            raise
        except Exception as error:  # no server, no network, no room: the run does not need it
            say(f"warning: logger {name} could not be started: {blame(error)}; it is left out, the run goes on")
            return Watched(None, say, name, blame(error))
    return Watched(made(name, given, "loggers", KVWriter), say)


def _settings(config: Config) -> dict[str, Any]:
    """What tells one run from another: flags, env, algorithm, seed, by dotted key."""
    kept = {flag.name for flag in FLAGS} | {"total_timesteps", "seed", "device", "env", "algo", "opponent"}
    return {key: value for key, value in flat(to_dict(config)).items() if key.split(".")[0] in kept}


def made(name: str, settings: Mapping[str, Any], key: str, kind: type[T], supplies: Supplies = NOTHING) -> T:
    """An instance of the user's class `module:Class`, which is a `kind`.

    Raises:
        FastTrainError: there is no such class, or it does not take the arguments.
    """
    found = callable_at(name, f"{key}: {name}", only=kind)
    given = arguments(settings, f"{key}: {name}, ", None, supplies, found)
    try:
        return found(**given)  # type: ignore[no-any-return]
    except Exception as error:
        inside = f"; what it takes is {key[:-1]}: {{call: module:Class, …}}" if "callback" in key else ""
        if "eval_env" in settings:
            inside = '; without eval_env it gets the run\'s own; another is eval_env: {call: "module:make_env"}'
        raise ConfigError(f"{key}: {name} could not be made with {dict(settings)}: {blame(error)}{inside}") from error


def cut_back(logger: Logger, env_steps: int) -> None:
    """What was logged after that is logged again."""
    for writer in logger.output_formats:
        if isinstance(writer, (ContinuedCSV, Watched)):
            writer.cut(env_steps)


def watched(logger: Logger) -> list[Watched]:
    """Trackers and writers of the user's, which get more than progress.csv and the console: [PERF] and evaluations."""
    return [writer for writer in logger.output_formats if isinstance(writer, Watched)]


def note(logger: Logger, group: str, figures: Callable[[], Mapping[str, Any]], env_steps: int) -> None:
    """Hand figures that are no part of SB3's own row to whoever gets more than that row."""
    if writers := watched(logger):
        row = {f"{group}/{name}": value for name, value in numbers_of(figures(), {}, "").items()}
        for writer in writers:
            writer.write(row, dict.fromkeys(row, ()), env_steps)


def finish(logger: Logger, summary: Mapping[str, Any], files: Sequence[Path]) -> list[str]:
    """Tell the trackers what the run came to; where each of them shows it."""
    groups = {"quality": summary["quality"], "total": summary["perf"]}  # `perf` are the log's stretches
    final = {f"{group}/{name}": value for group in groups for name, value in numbers_of(groups[group], {}, "").items()}
    there = [file for file in files if file.is_file()]
    found = [writer.finish(summary["status"], final, there, summary["env_steps"]) for writer in watched(logger)]
    return [line for line in found if line]


class UsersCallbacks(CallbackList):
    """The callbacks that `callbacks` names. Their time is phase `log`; one that returns False ends the training."""

    def __init__(self, config: Config, clock: PhaseClock, evaluation_env: Callable[[], VecEnv]) -> None:
        self._envs: list[VecEnv] = []  # made for a callback that takes one and was given none

        def eval_env() -> VecEnv:
            self._envs.append(evaluation_env())
            return self._envs[-1]

        entries = [named(entry, "callback", "callbacks") for entry in config.callbacks]
        kind: Any = BaseCallback  # abstract: no type to mypy
        super().__init__([made(*entry, "callbacks", kind, {"eval_env": eval_env}) for entry in entries])
        for callback in self.callbacks:
            check_parents(callback)
        self.clock = clock
        self.stopped_by = ""

    def _init_callback(self) -> None:
        with warnings.catch_warnings():  # the evaluation plays one env in this process, however training steps its own
            warnings.filterwarnings("ignore", "Training and eval env are not of the same type", UserWarning)
            super()._init_callback()

    def _on_training_end(self) -> None:
        super()._on_training_end()
        for env in self._envs:
            env.close()

    def _on_step(self) -> bool:
        with self.clock.phase("log"):
            for callback in self.callbacks:
                if not callback.on_step():
                    self.stopped_by = self.stopped_by or type(callback).__name__
        return True


def check_parents(callback: BaseCallback) -> None:
    """Some callbacks look at an EvalCallback that they belong to, which their classes declare as `parent`.

    Raises:
        ConfigError: it is not there.
    """
    name, own = type(callback).__name__, vars(callback).values()
    declared = any("parent" in vars(kind).get("__annotations__", {}) for kind in type(callback).__mro__)
    if declared and not isinstance(callback.parent, EvalCallback):
        place = '{call: "stable_baselines3.common.callbacks:EvalCallback", callback_after_eval: {call: "…:' + name
        raise ConfigError(f'callbacks: {name} works inside an EvalCallback: write {place}", …}}}}')
    for child in {id(one): one for one in own if isinstance(one, BaseCallback) and one is not callback.parent}.values():
        check_parents(child)
