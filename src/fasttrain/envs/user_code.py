"""Calling the user's code: import modules, report where an error comes from, and leave random state unchanged."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal makes enums, which is slow
import importlib
import importlib.util
import mmap
import os
import random
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import gymnasium
import numpy as np

import fasttrain
from fasttrain.errors import EnvSpecError, FastTrainError
from fasttrain.spec.plugins import OURS
from fasttrain.spec.setting import did_you_mean

_OUR_FOLDERS = (
    os.path.join(os.path.dirname(str(gymnasium.__file__)), ""),
    *(os.path.join(os.path.dirname(os.path.dirname(str(fasttrain.__file__))), name, "") for name in OURS),
)
_LIBRARY_FOLDERS = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
MAX_MESSAGE = 2000  # most characters of an exception's message, which may contain a whole array
PYTHONS_FOLDERS = _LIBRARY_FOLDERS[:2]


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the global random state of `random` and NumPy after the block, so that a check does not change a run."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def process_settings() -> dict[str, Any]:
    """Settings of this process that an env may change and that training depends on. Reading them takes 2 µs."""
    torch = sys.modules.get("torch")
    return {
        "numpy.seterr": "raise" in np.geterr().values(),
        "sys.setrecursionlimit": min(sys.getrecursionlimit(), 1000),  # raising the limit does no harm
        "warnings.simplefilter": [each for each in warnings.filters[:1] if each[0] == "error"],
        "the handler of SIGINT": _signal.getsignal(signal.SIGINT),
        "sys.stdout": sys.stdout.closed,
        "torch.set_default_dtype": torch and torch.get_default_dtype(),
        "torch.set_grad_enabled": torch and torch.is_grad_enabled(),
    }


def restore_settings(before: dict[str, Any]) -> list[str]:
    """Undo changes since `process_settings` returned `before`. Returns the names of the changed settings."""
    now, torch = process_settings(), sys.modules.get("torch")
    changed = [name for name in now if now[name] != before[name]]
    undo: dict[str, Callable[[Any], Any]] = {
        "numpy.seterr": lambda _: np.seterr(all="warn", under="ignore"),
        "sys.setrecursionlimit": sys.setrecursionlimit,
        "warnings.simplefilter": lambda _: warnings.filters.remove(warnings.filters[0]),  # type: ignore[attr-defined]
        "the handler of SIGINT": lambda handler: signal.signal(signal.SIGINT, handler),
        "sys.stdout": lambda _: setattr(sys, "stdout", open(os.dup(2), "w", 1)),  # noqa: SIM115 - for the whole process
        "torch.set_default_dtype": lambda dtype: torch.set_default_dtype(dtype),  # type: ignore[union-attr]
        "torch.set_grad_enabled": lambda enabled: torch.set_grad_enabled(enabled),  # type: ignore[union-attr]
    }
    for name in changed:
        undo[name](before[name])
    return changed


def seed_streams(python: int, numpy: int) -> None:
    """Seed the global generators of `random` and NumPy, which no env should use."""
    random.seed(python)
    np.random.seed(numpy)


def attribute_of(env: object, name: str, default: Any = None) -> Any:
    """An attribute that an env or a wrapper around it may have; else `default`.

    Any exception means that there is no such attribute: a user's `__getattr__` may raise KeyError, for example.
    """
    try:
        return env.get_wrapper_attr(name) if isinstance(env, gymnasium.Env) else getattr(env, name)
    except Exception:
        return default


def needs_package(error: BaseException) -> bool:
    """Whether an env could not go on because a package is missing, as `pygame` for a window."""
    return isinstance(error, gymnasium.error.DependencyNotInstalled)


def blame(error: BaseException) -> str:
    """Return "ValueError: text (my_game.py:12, in step)": the type, the message and the user's line that raised."""
    while error.__cause__ is not None and _raised_by_us(error) and not needs_package(error):
        error = error.__cause__  # Gymnasium wraps the error of a constructor
    if needs_package(error):
        return f"it needs a package that is not installed: {error}"
    try:
        message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    except Exception:  # the user's own class of exceptions may be broken
        message = ""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # the message itself has file and line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    if not frames:
        return text
    frame = (users_frames(error) or frames)[-1]
    return f"{text} ({_short_path(frame.filename)}:{frame.lineno}, in {frame.name})"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error that are in the user's files, not in installed packages."""
    others = (*_LIBRARY_FOLDERS, *_OUR_FOLDERS, "<")  # "<": generated code, such as a dataclass's
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]


def make_importable(folder: str) -> None:
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        fasttrain.put_behind_python(folder)


def import_user_module(name: str, folder: str, option: str) -> ModuleType:
    """Import `name` from an installed package or from `folder`. The import must not train a model.

    Raises:
        EnvSpecError: the module is not found, hides a module of Python's own, trains a model, or fails on import. The
            message names `option` as the one to change.
    """
    make_importable(folder)
    top = name.partition(".")[0]
    for file in (f"{top}.py", top) if top in sys.stdlib_module_names else ():
        if os.path.exists(os.path.join(folder, file)):
            raise EnvSpecError(f"{option}: {file} hides Python's own module of that name; rename it")
    importlib.invalidate_caches()  # because the file may be newer than Python's cache of its folder
    try:
        with _TrainingForbidden():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise EnvSpecError(_not_found(name, error.name, folder, option)) from error
        raise EnvSpecError(f"{option}: importing module {name!r} failed: {blame(error)}") from error
    except FastTrainError as error:
        text = blame(error).removeprefix(f"{type(error).__name__}: ")
        raise EnvSpecError(f"{option}: importing module {name!r} {text}") from error
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses its arguments on import
        raise EnvSpecError(f"{option}: importing module {name!r} failed: {blame(error)}") from error


BASE = "stable_baselines3.common.base_class"
LEARNS = ("learn", "_setup_learn")  # `PPO.learn(model)` does not look up `model.learn`, but calls `model._setup_learn`
TRAINS = 'trains a model: put the training under `if __name__ == "__main__":`'


def is_importing() -> bool:
    """Whether this is called while a module of the user is being imported."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not import_user_module.__code__:
        frame = frame.f_back
    return frame is not None


class _TrainingForbidden(MetaPathFinder):
    """Refuse trainings inside the block: an SB3 model that learns raises an error.

    A script that trains on import would train in every process, and overwrite its model. If the script catches the
    error, the end of the block raises it again. A worker does not import SB3 itself, but the user's module may do so
    inside the block: then `find_spec`, an import hook, guards SB3's classes.
    """

    guarded: Any = None
    refused = False

    def __enter__(self) -> None:
        if BASE in sys.modules:
            self._guard(sys.modules[BASE])
        else:
            sys.meta_path.insert(0, self)

    def __exit__(self, kind: object, *_: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self.guarded is not None:
            del self.guarded.__getattribute__
        if self.refused and kind is None:
            raise EnvSpecError(TRAINS)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != BASE:
            return None
        sys.meta_path.remove(self)
        if (spec := importlib.util.find_spec(name)) is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._guard(module)

            loader.exec_module = exec_module
        return spec

    def _guard(self, module: object) -> None:
        base = getattr(module, "BaseAlgorithm", None)
        if base is None or base.__getattribute__ is not object.__getattribute__:  # no such class, or guarded already
            return

        def refuse_to_learn(*_: object, **__: object) -> None:
            self.refused = True
            raise EnvSpecError(TRAINS)

        def attribute(algorithm: object, name: str) -> Any:
            return refuse_to_learn if name in LEARNS else object.__getattribute__(algorithm, name)

        base.__getattribute__, self.guarded = attribute, base


def look_up(entry: str, option: str, folder: str | None = None) -> Any:
    """The object that `module:Name` or `module:Outer.Name` names.

    Args:
        folder: where to look for modules besides the installed packages; None: the working directory.

    Raises:
        EnvSpecError: there is no such object. The message names `option` as the one to change.
    """
    module_name, _, path = entry.partition(":")
    if not module_name or not path:
        head, _, last = entry.rpartition(".")
        hint = f"; did you mean {head}:{last}?" if head and last.isidentifier() else ""
        raise EnvSpecError(f"{option}: expected module:Name, e.g. my_game.parts:Mine{hint}")
    value = import_user_module(module_name, os.getcwd() if folder is None else folder, option)
    try:
        for name in path.split("."):
            value = getattr(value, name)
    except AttributeError:
        raise EnvSpecError(_missing_name(entry, option, value, name)) from None
    except Exception as error:  # a package may raise its own error for a removed name, as supersuit does
        raise EnvSpecError(f"{option}: {blame(error)}") from error
    return value


def _not_found(name: str, missing: str, folder: str, option: str) -> str:
    top = missing.split(".", maxsplit=1)[0]
    message = f"{option}: no module named {missing!r}, neither in {folder} nor among the installed packages"
    source = Path(folder, "src", top)
    if source.is_dir() or source.with_suffix(".py").is_file():
        return f"{message}; there is one under src/: install it with `pip install -e .` or set PYTHONPATH=src."
    if missing != name or missing == "ale_py":
        return message + "; pip install 'fasttrain[atari]' adds it" * (missing == "ale_py")
    files = Path(folder).glob("*.py") if os.path.isdir(folder) else ()
    return message + did_you_mean(top, sorted({file.stem for file in files}))


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _is_ours(filename: str) -> bool:
    return filename.startswith((*_OUR_FOLDERS, "<frozen"))


def _short_path(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


def _missing_name(entry: str, option: str, owner: object, name: str) -> str:
    module_name, _, path = entry.partition(":")
    if path == name and name in gymnasium.registry:
        return f"{option}: {name!r} is a registered id, not a class: use env.id={entry}"
    public = {known: value for known, value in vars(owner).items() if not known.startswith("_")}
    classes = {known: value for known, value in public.items() if isinstance(value, type)}
    wraps = option.startswith("env.wrappers")
    kind: Any = gymnasium.Wrapper if wraps else gymnasium.Env
    names = [known for known, value in classes.items() if issubclass(value, kind) and value is not kind]
    several = f"{', '.join(names[:MOST_NAMED])}{', …' * (len(names) > MOST_NAMED)}"
    hint = did_you_mean(name, public) or (f"; {'wrappers' if wraps else 'envs'} there: {several}" if names else "")
    return f"{option}: module {module_name!r} has no {name!r}{hint}"


MOST_NAMED = 12  # names in one message
BEATS, PHASE, SEED, EPISODE, STEP = range(5)  # indices of words of 8 bytes; BEATS: number of calls of `enter`
WORDS = 5
STARTING, BUILDING, LOOKING, RESETTING, STEPPING, MASKING, CLOSING = range(7)


class Place:
    """Which call of an env is running now, in memory that another process can read after a hang or a crash.

    An update costs 0.3 µs, which does not count as time of the env.

    Args:
        memory: at least `WORDS` words, zeroed; None: private memory.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._words = memoryview(bytearray(8 * WORDS) if memory is None else memory).cast("q")

    @property
    def beats(self) -> int:
        """A number that changes with every call of `enter`."""
        return self._words[BEATS]

    def enter(self, phase: int) -> None:
        """To be called before a call of the env."""
        self._words[PHASE] = phase
        self._words[BEATS] += 1

    def reset(self, seed: int | None) -> None:
        """To be called before `reset(seed=seed)`."""
        words = self._words
        if seed is None:
            words[EPISODE] += 1
        else:
            words[SEED], words[EPISODE] = seed, 1
        words[STEP] = 0
        self.enter(RESETTING)

    def step(self, step: int) -> None:
        """To be called before a step. `step` counts the steps of the episode from 1."""
        self._words[STEP] = step
        self.enter(STEPPING)

    @property
    def started(self) -> bool:
        """Whether the process has begun to call the env."""
        return self._words[PHASE] != STARTING

    def __str__(self) -> str:
        """`step 37 of seed 5`, `reset of episode 3 after seed 5`, `its constructor`."""
        words = self._words
        nth = f"episode {words[EPISODE]} after " if words[EPISODE] > 1 else ""
        which = f"of {nth}seed {words[SEED]}"
        step = f"step {words[STEP]} {which}" if words[STEP] else f"reset {which}"
        return {
            STARTING: "the start of its process",
            BUILDING: "its constructor",
            LOOKING: "its first reset",  # the reset that looks for action masks
            RESETTING: step,
            STEPPING: step,
            MASKING: f"action_masks() after {step}",
            CLOSING: "close()",
        }[words[PHASE]]
