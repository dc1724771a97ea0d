"""Calling code that users wrote: find their modules, say where a call is and where an error comes from, leave random
state alone."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal makes enums, which takes longer than all the rest
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
PYTHONS_FOLDERS = _LIBRARY_FOLDERS[:2]


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Undo what the block draws from the global streams of `random` and NumPy: looking must not change a run."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def process_settings() -> dict[str, Any]:
    """What an env may spoil in the process that also trains, 2 µs."""
    torch = sys.modules.get("torch")
    return {
        "numpy.seterr": "raise" in np.geterr().values(),
        "sys.setrecursionlimit": min(sys.getrecursionlimit(), 1000),  # more harms nobody
        "warnings.simplefilter": [each for each in warnings.filters[:1] if each[0] == "error"],
        "the handler of SIGINT": _signal.getsignal(signal.SIGINT),
        "sys.stdout": sys.stdout.closed,
        "torch.set_default_dtype": torch and torch.get_default_dtype(),
        "torch.set_grad_enabled": torch and torch.is_grad_enabled(),
    }


def put_back(before: dict[str, Any]) -> list[str]:
    """Undo what has changed since; its names."""
    now, torch = process_settings(), sys.modules.get("torch")
    changed = [name for name in now if now[name] != before[name]]
    undo: dict[str, Callable[[Any], Any]] = {
        "numpy.seterr": lambda _: np.seterr(all="warn", under="ignore"),
        "sys.setrecursionlimit": sys.setrecursionlimit,
        "warnings.simplefilter": lambda _: warnings.filters.remove(warnings.filters[0]),  # type: ignore[attr-defined]
        "the handler of SIGINT": lambda kept: signal.signal(signal.SIGINT, kept),
        "sys.stdout": lambda _: setattr(sys, "stdout", open(os.dup(2), "w", 1)),  # noqa: SIM115 - as long as the process
        "torch.set_default_dtype": lambda kept: torch.set_default_dtype(kept),  # type: ignore[union-attr]
        "torch.set_grad_enabled": lambda kept: torch.set_grad_enabled(kept),  # type: ignore[union-attr]
    }
    for name in changed:
        undo[name](before[name])
    return changed


def seed_streams(python: int, numpy: int) -> None:
    """Put the global streams, which no env should use, into a known state."""
    random.seed(python)
    np.random.seed(numpy)


def blame(error: BaseException) -> str:
    """Return "ValueError: text (my_game.py:12, in step)": the type, the text and the user's line that raised."""
    while error.__cause__ is not None and _raised_by_us(error):  # Gymnasium wraps errors of constructors
        error = error.__cause__
    try:
        words = str(error)
    except Exception:  # the user's own class of errors may be broken too
        words = ""
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # carries file and line already
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    if not frames:
        return text
    frame = (users_frames(error) or frames)[-1]
    return f"{text} ({_short_path(frame.filename)}:{frame.lineno}, in {frame.name})"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error came through, without our files and installed ones."""
    others = (*_LIBRARY_FOLDERS, *_OUR_FOLDERS, "<")  # code that was generated, as a dataclass's, tells nothing
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]


def findable(folder: str) -> None:
    """Let modules of `folder` be imported."""
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        fasttrain.put_behind_python(folder)


def import_user_module(name: str, folder: str, option: str) -> ModuleType:
    """Import `name` from an installed package or from `folder`, where SB3's algorithms do not learn meanwhile.

    Raises:
        EnvSpecError: the module is not there, is called as one of Python's own, trains, or its own code fails on
            import; `option` is named as the one to change.
    """
    findable(folder)
    top = name.partition(".")[0]
    for file in (f"{top}.py", top) if top in sys.stdlib_module_names else ():
        if os.path.exists(os.path.join(folder, file)):
            raise EnvSpecError(f"{option}: {file} hides Python's own module of that name; rename it")
    importlib.invalidate_caches()  # the file may be younger than the import system's view of its folder
    try:
        with _NothingLearned():
            return importlib.import_module(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvSpecError(f"{option} needs a package that is not installed: {error}") from error
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise EnvSpecError(_not_found(name, error.name, folder, option)) from error
        raise EnvSpecError(f"{option}: importing module {name!r} failed: {blame(error)}") from error
    except FastTrainError as error:
        told = blame(error).removeprefix(f"{type(error).__name__}: ")
        raise EnvSpecError(f"{option}: importing module {name!r} {told}") from error
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses its arguments at import
        raise EnvSpecError(f"{option}: importing module {name!r} failed: {blame(error)}") from error


BASE = "stable_baselines3.common.base_class"
LEARNS = ("learn", "_setup_learn")  # the latter: `PPO.learn(model)` too
TRAINS = 'trains a model: put what trains under `if __name__ == "__main__":`'


def is_importing() -> bool:
    """Whether this is called by a module of the user's while it is imported."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not import_user_module.__code__:
        frame = frame.f_back
    return frame is not None


class _NothingLearned(MetaPathFinder):
    """Inside, no model of SB3's kind learns: a script that trains as it is imported would train in every process, and
    write over its model. One that goes on after the error is told at its end.

    A worker leaves it to the user's modules to import SB3, so that its base class may come in the middle.
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
        if (found := importlib.util.find_spec(name)) is not None:
            loader: Any = found.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._guard(module)

            loader.exec_module = exec_module
        return found

    def _guard(self, module: object) -> None:
        base = getattr(module, "BaseAlgorithm", None)
        if base is None or base.__getattribute__ is not object.__getattribute__:  # one import within another
            return

        def refuse_to_learn(*_: object, **__: object) -> None:
            self.refused = True
            raise EnvSpecError(TRAINS)

        def attribute(algorithm: object, name: str) -> Any:
            return refuse_to_learn if name in LEARNS else object.__getattribute__(algorithm, name)

        base.__getattribute__, self.guarded = attribute, base


def look_up(entry: str, option: str, folder: str | None = None) -> Any:
    """What `module:Name` or `module:Outer.Name` leads to; the module is installed, or lies in `folder` (left out: the
    working directory).

    Raises:
        EnvSpecError: it leads nowhere; `option` is named as the one to change.
    """
    module_name, _, path = entry.partition(":")
    if not module_name or not path:
        head, _, last = entry.rpartition(".")
        written = f"; did you mean {head}:{last}?" if head and last.isidentifier() else ""
        raise EnvSpecError(f"{option}: expected module:Name, e.g. my_game.parts:Mine{written}")
    found = import_user_module(module_name, os.getcwd() if folder is None else folder, option)
    try:
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError:
        raise EnvSpecError(_missing_name(entry, option, found, name)) from None
    except Exception as error:  # a package's own word on a name that it gave up, such as supersuit's
        raise EnvSpecError(f"{option}: {blame(error)}") from error
    return found


def _not_found(name: str, missing: str, folder: str, option: str) -> str:
    top = missing.split(".", maxsplit=1)[0]
    message = f"{option}: no module named {missing!r}, neither in {folder} nor among the installed packages"
    source = Path(folder, "src", top)
    if source.is_dir() or source.with_suffix(".py").is_file():
        return f"{message}; there is one under src/: install it with `pip install -e .` or set PYTHONPATH=src."
    if missing != name:
        return message
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
    public = [known for known in vars(owner) if not known.startswith("_")]
    classes = {known: value for known in public if isinstance(value := getattr(owner, known), type)}
    envs = [
        known for known, value in classes.items() if issubclass(value, gymnasium.Env) and value is not gymnasium.Env
    ]
    hint = did_you_mean(name, public) or (f"; envs there: {', '.join(envs)}" if envs else "")
    return f"{option}: module {module_name!r} has no {name!r}{hint}"


BEATS, PHASE, SEED, EPISODE, STEP = range(5)  # words of 8 bytes; BEATS: entries so far
WORDS = 5
STARTING, BUILDING, LOOKING, RESETTING, STEPPING, MASKING, CLOSING = range(7)


class Place:
    """Where a play of an env is at this moment, in memory that another process reads.

    So that it can be named after a hang or a death. An entry costs 0.3 µs, which the time of a step does not contain.

    Args:
        memory: at least `WORDS` words, zeroed; None: of its own, where nobody looks.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._words = memoryview(bytearray(8 * WORDS) if memory is None else memory).cast("q")

    @property
    def beats(self) -> int:
        """Changes with every entry."""
        return self._words[BEATS]

    def enter(self, phase: int) -> None:
        """The play is about to call the env."""
        self._words[PHASE] = phase
        self._words[BEATS] += 1

    def reset(self, seed: int | None) -> None:
        """It is about to call `reset(seed=seed)`."""
        words = self._words
        if seed is None:
            words[EPISODE] += 1
        else:
            words[SEED], words[EPISODE] = seed, 1
        words[STEP] = 0
        self.enter(RESETTING)

    def step(self, step: int) -> None:
        """It is about to call `step` for this step of the episode, counted from 1."""
        self._words[STEP] = step
        self.enter(STEPPING)

    @property
    def started(self) -> bool:
        """Whether the process got as far as the env."""
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
            LOOKING: "its first reset",  # which looks for action masks
            RESETTING: step,
            STEPPING: step,
            MASKING: f"action_masks() after {step}",
            CLOSING: "close()",
        }[words[PHASE]]
