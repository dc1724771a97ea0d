"""Loggers and callbacks that a configuration names: SB3's, ours and the user's.

A resumed run appends to progress.csv, which is SB3's own file. Experiment trackers are found by their names
(`fasttrain_integrations`, or another package). A tracker gets the settings at the start, then every row of SB3's log,
[PERF] and evaluations over env steps, and at the end the results and files. Trackers write into the run's folder, or
into the folder of a sweep, whose runs form one group. A tracker that fails is left out after one warning.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.logger import CSVOutputFormat, HumanOutputFormat, KVWriter, Logger, SeqWriter
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.envs.names import NOTHING, Supplies, arguments, callable_at
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.folders import GROUP
from fasttrain.runs.logs import number_in
from fasttrain.saving.files import read_json, write_json
from fasttrain.spec import plugins
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.removed import flat
from fasttrain.spec.setting import Named, named

T = TypeVar("T")

STEPS = "time/total_timesteps"
PROMETHEUS = "prometheus"  # no writer: it reads figures when it wants, {logger: prometheus, port: 9100}


class ContinuedCSV(CSVOutputFormat):
    """SB3's writer of progress.csv, but it appends. SB3's own class would empty the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(os.devnull)
        self.file.close()
        file.touch()
        self.file = file.open("r+", encoding="utf-8", newline="")
        self._find_end()

    def cut(self, env_steps: int) -> None:
        self.file.seek(0)
        rows = list(csv.reader(self.file))
        if rows and STEPS in rows[0]:
            column = rows[0].index(STEPS)
            older = [row for row in rows[1:] if len(row) > column and (number_in(row[column]) or 0.0) <= env_steps]
            self.file.seek(0)
            self.file.truncate()
            csv.writer(self.file, lineterminator="\n").writerows([rows[0], *older])
            self.file.flush()
        self._find_end()

    def _find_end(self) -> None:
        self.file.seek(0)
        header = self.file.readline().rstrip("\n")
        self.keys = header.split(",") if header else []
        self.file.seek(0, os.SEEK_END)


def check_loggers(config: Config) -> None:
    """Raises ConfigError if `loggers` has an unknown name or a class that is no logger. Called at the start."""
    if (metrics := metrics_of(config)) is not None:
        metrics.check_metrics(metrics.endpoint_of(config))
    for name in (named(entry, "logger", "loggers")[0] for entry in config.loggers or ()):
        if name in ("csv", "stdout", PROMETHEUS) or tracker(name):
            continue
        if ":" not in name:
            known = ("csv", "stdout", *trackers(), PROMETHEUS)
            none = f"{name!r} is none of {', '.join(known)}, nor module:Class"
            raise ConfigError(f"loggers: {none}{plugins.hint(name, known)}")
        callable_at(name, f"loggers: {name}", only=KVWriter)


def metrics_of(config: Config) -> Any:
    """The module `fasttrain_integrations.metrics` if `loggers` names Prometheus; else None."""
    named_in = [named(entry, "logger", "loggers")[0] for entry in config.loggers or ()]
    return plugins.load(plugins.INTEGRATIONS, PROMETHEUS) if PROMETHEUS in named_in else None


def make_logger(config: Config, folder: Path, continued: bool, say: Callable[[str], None] = print) -> Logger:
    """SB3's logger with the writers in `loggers`, or those of `train_log_…`. `continued`: a resumed run appends."""
    wanted: list[Named] = [one for one in config.loggers or () if named(one, "logger", "loggers")[0] != PROMETHEUS]
    if config.loggers is None and config.train_log_enabled:
        asked = {"csv": config.train_log_to_file, "stdout": config.train_log_to_console}
        wanted = [name for name, on in asked.items() if on]
    logger = Logger(str(folder), [])
    try:
        logger.output_formats.extend(_writer(entry, config, folder, continued, say) for entry in wanted)
    except BaseException:
        logger.close()
        raise
    return logger


def _writer(entry: Named, config: Config, folder: Path, continued: bool, say: Callable[[str], None]) -> KVWriter:
    name, given = named(entry, "logger", "loggers")
    if name == "csv":
        file = folder / "progress.csv"
        return ContinuedCSV(file) if continued else CSVOutputFormat(str(file))
    if name == "stdout":
        return HumanOutputFormat(sys.stdout)
    if (kind := tracker(name)) is not None:
        try:
            shown = {flag.name for flag in FLAGS} | {"total_timesteps", "seed", "device", "env", "algo", "opponent"}
            settings = {key: value for key, value in flat(to_dict(config)).items() if key.split(".")[0] in shown}
            return GuardedWriter(start_tracker(kind, Home(folder), settings, given), say)
        except ConfigError:
            raise
        except Exception as error:  # for example, no server: the run continues without this logger
            say(f"warning: logger {name} could not be started: {blame(error)}; it is left out, the run goes on")
            return GuardedWriter(None, say, name, blame(error))
    return GuardedWriter(instance_of(name, given, "loggers", KVWriter), say)


def instance_of(name: str, settings: Mapping[str, Any], key: str, kind: type[T], supplies: Supplies = NOTHING) -> T:
    """An instance of the user's class. FastTrainError: it is missing, is no `kind`, or refuses `settings`."""
    found = callable_at(name, f"{key}: {name}", only=kind)
    given = arguments(settings, f"{key}: {name}, ", None, supplies, found)
    try:
        return found(**given)  # type: ignore[no-any-return]
    except Exception as error:
        inside = f"; what it takes is {key[:-1]}: {{call: module:Class, …}}" if "callback" in key else ""
        if "eval_env" in settings:
            inside = '; without eval_env it gets the run\'s own; another is eval_env: {call: "module:make_env"}'
        raise ConfigError(f"{key}: {name} could not be made with {dict(settings)}: {blame(error)}{inside}") from error


def cut_logs(logger: Logger, env_steps: int) -> None:
    """Remove rows after `env_steps` from all writers, because a resumed run writes them again."""
    for writer in logger.output_formats:
        if isinstance(writer, (ContinuedCSV, GuardedWriter)):
            writer.cut(env_steps)


def guarded_writers(logger: Logger) -> list[GuardedWriter]:
    """Trackers and the user's writers. They get [PERF] and evaluations besides SB3's rows."""
    return [writer for writer in logger.output_formats if isinstance(writer, GuardedWriter)]


def log_figures(logger: Logger, group: str, figures: Callable[[], Mapping[str, Any]], env_steps: int) -> None:
    """Give trackers and the user's writers figures that SB3's rows lack, as `group/NAME`."""
    if writers := guarded_writers(logger):
        row = {f"{group}/{name}": value for name, value in numbers_of(figures(), {}, "").items()}
        for writer in writers:
            writer.write(row, dict.fromkeys(row, ()), env_steps)


def finish(logger: Logger, summary: Mapping[str, Any], files: Sequence[Path]) -> list[str]:
    """Give the trackers the run's results and files. Returns lines that say where to look at them."""
    groups = {"quality": summary["quality"], "total": summary["perf"]}  # not perf/, which trackers use during training
    final = {f"{group}/{name}": value for group in groups for name, value in numbers_of(groups[group], {}, "").items()}
    there = [file for file in files if file.is_file()]
    writers = guarded_writers(logger)
    lines = [writer.finish(summary["status"], final, there, summary["env_steps"]) for writer in writers]
    return [line for line in lines if line]


class UsersCallbacks(CallbackList):
    """The user's callbacks. Their time counts as phase `log`. A callback that returns False ends the training."""

    def __init__(self, config: Config, clock: PhaseClock, evaluation_env: Callable[[], VecEnv]) -> None:
        self._envs: list[VecEnv] = []  # one for each callback whose settings lack the eval_env that it needs

        def eval_env() -> VecEnv:
            self._envs.append(evaluation_env())
            return self._envs[-1]

        entries = [named(entry, "callback", "callbacks") for entry in config.callbacks]
        kind: Any = BaseCallback  # mypy does not accept an abstract class as `type[T]`
        super().__init__([instance_of(*entry, "callbacks", kind, {"eval_env": eval_env}) for entry in entries])
        for callback in self.callbacks:
            check_parents(callback)
        self.clock = clock
        self.stopped_by = ""

    def _init_callback(self) -> None:
        with warnings.catch_warnings():  # the eval_env is a DummyVecEnv, the training's env may be of another type
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
    """Raises ConfigError for a callback that uses `parent` and is not inside an EvalCallback."""
    name, own = type(callback).__name__, vars(callback).values()
    declared = any("parent" in vars(kind).get("__annotations__", {}) for kind in type(callback).__mro__)
    if declared and not isinstance(callback.parent, EvalCallback):
        place = '{call: "stable_baselines3.common.callbacks:EvalCallback", callback_after_eval: {call: "…:' + name
        raise ConfigError(f'callbacks: {name} works inside an EvalCallback: write {place}", …}}}}')
    for child in {id(one): one for one in own if isinstance(one, BaseCallback) and one is not callback.parent}.values():
        check_parents(child)


# --- experiment trackers

IDS = "trackers.json"  # in the run's folder: the run's id in each tracker, for a resume
PROJECT = "fasttrain"
MOST_CHARACTERS = 500  # most characters of a setting's value: old MLflow servers allow no more
Numbers = Mapping[str, float]
Settings = Mapping[str, Any]


class Home:
    """The folder in which a run's trackers write, and the run's id in each tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        group = os.environ.get(GROUP)
        self.group = Path(group) if group and folder.is_relative_to(group) else None

    @property
    def shared(self) -> Path:
        """The folder of the sweep or study that the run belongs to, else the run's own."""
        return self.group or self.folder

    def known_as(self, tracker: str) -> str | None:
        """The id of a resumed run in a tracker; None for a new run."""
        run_id = read_json(self.folder / IDS).get(tracker)
        return run_id if isinstance(run_id, str) else None

    def remember(self, tracker: str, run_id: str) -> None:
        """Store the run's id in a tracker for a resume."""
        write_json(self.folder / IDS, {**read_json(self.folder / IDS), tracker: run_id})


class Tracker(KVWriter):
    """One run in an experiment tracker. An entry point of `fasttrain.integrations` names such a class.

    Args:
        home: the folder for the tracker's files, and the ids that the run has in trackers.
        settings: the run's settings by dotted key.
        further: the entries beside `logger:` in the setting `loggers`.
    """

    name: str  # the tracker's name in the setting `loggers`
    _over = False

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self.measure(numbers_of(key_values, key_excluded, self.name), step)

    def measure(self, numbers: Numbers, step: int) -> None:
        """Log a row of numbers."""

    def cut(self, env_steps: int) -> None:
        """Remove rows after `env_steps`, if the tracker supports that. A resumed run writes these rows again."""

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        """Log the results and files of a run that is `done` or `stopped`. Returns how to look at them."""
        raise TypeError(type(self))

    def end(self, status: str) -> None:
        """Close the tracker's run with status `done`, `stopped` or `failed`."""

    def close(self) -> None:
        self.over("failed")

    def over(self, status: str) -> None:
        """Call `end`, unless it was called before."""
        if not self._over:
            self._over = True
            self.end(status)


def trackers() -> list[str]:
    """The names of all trackers that packages offer; imports all integrations."""
    return [name for name, one in plugins.load_all(plugins.INTEGRATIONS).items() if _is_tracker(one)]


def _is_tracker(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Tracker)


def tracker(name: str) -> type[Tracker] | None:
    """The tracker of that name; None if there is none. Raises ConfigError if its package cannot be loaded."""
    found = plugins.load(plugins.INTEGRATIONS, name) if name in plugins.names(plugins.INTEGRATIONS) else None
    return found if _is_tracker(found) else None


def start_tracker(kind: Any, home: Home, settings: Settings, further: Mapping[str, Any]) -> Tracker:
    """Make a tracker. Raises ConfigError if its package is missing or it does not accept `further`."""
    name = kind.name
    try:
        return kind(home, settings, **further)  # type: ignore[no-any-return]
    except ImportError as error:
        extra = f"; pip install 'fasttrain[{name}]'" if kind.__module__.partition(".")[0] in plugins.OURS else ""
        raise ConfigError(f"loggers: {name} needs a package that is not installed ({error}){extra}") from error
    except TypeError as error:
        raise ConfigError(f"loggers: {name} does not take {dict(further)}: {error}") from error


def numbers_of(
    key_values: Mapping[str, Any], excluded: Mapping[str, Sequence[str] | None], name: str
) -> dict[str, float]:
    """The finite numbers in a row of SB3's log, without the keys that exclude the writer `name`."""
    kinds = (bool, int, float, np.number, np.bool_)
    return {
        key: float(value)
        for key, value in key_values.items()
        if name not in (excluded.get(key) or ()) and isinstance(value, kinds) and math.isfinite(value)
    }


class GuardedWriter(KVWriter, SeqWriter):
    """A tracker or a user's writer. After its first exception it is not called again; `self.failed` says why."""

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
        except Exception as error:  # a failing logger must not end the training
            self.failed = blame(error)
            self._say(f"warning: logger {self.name}.{method} failed: {self.failed}; it is left out, the run goes on")
            return None
