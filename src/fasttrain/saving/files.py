"""The files of a run's folder: written whole or not at all, by one process at a time.

A file that cannot be written (a full disk, no permission) costs one warning and another try later; training goes on,
and the end lists what is missing. The operating system releases the lock on the folder however its process ends.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.errors import ConfigError, FastTrainError
from fasttrain.machine import lived_at
from fasttrain.terminal import one_line

SUMMARY_SCHEMA = 1
MOST_CONTAINERS, MOST_VALUES = 1_000_000, 20_000_000  # of JSON: 60 bytes each list or object, 40 each number


def write_json(path: Path, content: object) -> None:
    """Write strict JSON whole or not at all; NaN and infinities become null, keys become texts."""
    write_whole(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write whole or not at all: to a temporary name first, then renamed. Ends of lines stay as they are."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # that of the run may have been deleted
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a full disk; a written one has its name by now


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_finite(str(key)): _finite(item) for key, item in value.items()}
    if isinstance(value, str):  # without halves of surrogate pairs, which strict readers refuse
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def parse_json(text: bytes, what: str) -> Any:
    """The value of a JSON text. Raises ConfigError if it is none, or would take far more memory than its length."""
    if sum(map(text.count, (b"[", b"{"))) > MOST_CONTAINERS or text.count(b",") > MOST_VALUES:
        raise ConfigError(f"{what} has too many parts for what it should be")
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is no JSON: {error}") from error


def yaml_values(text: bytes) -> int:
    """How many values a YAML text comes to, without making them: one that names its own parts again and again has more
    than it is long. 0 where it is none, which whoever reads it says better."""
    import yaml

    counts: dict[int, int] = {}

    def count(node: Any) -> int:
        if id(node) not in counts:
            counts[id(node)] = 1  # as long as its parts are counted, of which it may be one
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            counts[id(node)] += sum(sum(map(count, part)) if isinstance(part, tuple) else count(part) for part in parts)
        return counts[id(node)]

    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return count(yaml.compose(text, Loader=yaml.SafeLoader))
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty where there is none to read."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


FAILED_WRITES = (OSError, RuntimeError)  # torch's own writer raises the latter


class Saving:
    """Knows which files of a run could not be written.

    Attributes:
        failed: name of a file → why its last writing failed; one that worked since is not in it.
        extras: names in `failed` that are no part of the training.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failed: dict[str, str] = {}
        self.extras: set[str] = set()
        self._say = say

    def missing(self, extras: bool = False) -> list[str]:
        """`a.csv, b.zip (No space left on device)`: names with the same reason together."""
        failed = {name: why for name, why in self.failed.items() if (name in self.extras) == extras}
        named = {why: [name for name, other in failed.items() if other == why] for why in failed.values()}
        return [f"{', '.join(names)} ({why})" for why, names in named.items()]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Writing of `name` inside; a failure ends the block and nothing else."""
        try:
            yield
        except FAILED_WRITES as error:
            if name not in self.failed:
                self._say(f"warning: {name} could not be written ({error}); the run goes on")
            self.failed[name] = str(error)
        else:
            self.failed.pop(name, None)

    @contextmanager
    def extra(self, name: str) -> Iterator[None]:
        """What is no part of the training inside (evaluation, loggers): a failure costs that alone, and is listed."""
        try:
            yield
        except (Exception, SystemExit) as error:
            from fasttrain.envs.user_code import blame  # which imports gymnasium, half a second

            what = one_line(error if isinstance(error, FastTrainError) else blame(error))
            if name not in self.failed:
                self._say(f"warning: {name} failed ({what}); the run goes on")
            self.cost(name, what)

    def cost(self, name: str, why: str) -> None:
        """Something that is no part of the training is lost."""
        self.failed[name] = why
        self.extras.add(name)


SAVING = ".saving-"
DRAFTS = ("*.json.tmp", "evaluations.csv.tmp", "report.html.tmp")  # what is written whole or not at all, half written


def clean(folder: Path) -> None:
    """Remove what a process that was killed left half written in a run's folder; nobody else may be at work there."""
    for left in list(folder.rglob(f"{SAVING}*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in [draft for name in DRAFTS for draft in folder.glob(name)]:
        with suppress(OSError):
            left.unlink()


@contextmanager
def into_place(file: Path) -> Iterator[Path]:
    """A path in a folder of its own, whose files replace those beside `file` at the end, all together."""
    folder = file.parent / f"{SAVING}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)  # that of the run may have been deleted
    try:
        yield folder / file.name
        for part in sorted(folder.iterdir()):
            os.replace(part, file.parent / part.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


LOCK = ".lock"
ENDS = ("done", "stopped", "crashed")  # phases of a run after which nothing follows
TAKEN = (errno.EAGAIN, errno.EACCES)  # the latter on Windows
LOOK_S = 0.02  # `holder` has the lock for a moment, in which nobody shall be refused
BEYOND = 1 << 20  # the byte that Windows locks: what is locked cannot be read, and the process id stands before it


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, the folder is this process's alone, if the disk can lock files. Raises ConfigError if another has it."""
    if not (folder / LOCK).exists() and (other := _said_to_work(folder)):
        raise ConfigError(f"run={folder}: still going on (process {other})")
    try:  # Python has it closed in processes that this one starts: none of them keeps the lock
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        if not _take(file, tries=3):
            raise ConfigError(f"run={folder}: still going on (process {_holder(file)})")
        with suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, str(os.getpid()).encode())
        yield
    finally:
        os.close(file)


def holder(folder: Path) -> str:
    """The process that works there, as far as can be told; empty if none does."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return _said_to_work(folder)
    try:
        return "" if _take(file, shared=True) else _holder(file)
    finally:
        os.close(file)


def _said_to_work(folder: Path) -> str:
    """The process of which status.json says that it works there, for where the lock's file was deleted; else empty."""
    told = read_json(folder / "status.json")
    pid, at_s = told.get("pid"), told.get("time")
    if told.get("phase") in ENDS or told.get("host") != platform.node() or type(pid) is not int or pid == os.getpid():
        return ""
    return str(pid) if isinstance(at_s, float) and lived_at(pid, at_s) else ""


def _take(file: int, shared: bool = False, tries: int = 1) -> bool:
    """Whether nobody else has it. A `shared` one is for looking: those who look are not in each other's way."""
    for _ in range(tries - 1):
        if _take(file, shared):
            return True
        time.sleep(LOOK_S)
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, BEYOND, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in TAKEN
    return True


def _holder(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    said = os.read(file, 20)
    return said.decode() if said.isdigit() else "unknown"
