"""The files of a run's folder: each is written completely or not at all, and by one process at a time.

If a file cannot be written (disk full, no permission), there is one warning, and another try later. Training continues,
and lists at its end what is missing. The operating system releases the folder's lock when the process ends.
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
MOST_CONTAINERS, MOST_VALUES = 1_000_000, 20_000_000  # in JSON: a list or object takes 60 bytes, a number 40


def write_json(path: Path, content: object) -> None:
    """Write strict JSON completely or not at all. NaN and infinities become null, keys become texts."""
    write_whole(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all: it gets a temporary name, and is then renamed."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the run's folder may have been deleted
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # the temporary file is left if the disk was full


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_finite(str(key)): _finite(item) for key, item in value.items()}
    if isinstance(value, str):  # remove lone surrogates, which strict readers refuse
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def parse_json(text: bytes, what: str) -> Any:
    """The value of a JSON text. Raises ConfigError if it is no JSON, or would take far more memory than its length."""
    if sum(map(text.count, (b"[", b"{"))) > MOST_CONTAINERS or text.count(b",") > MOST_VALUES:
        raise ConfigError(f"{what} has too many values or lists")
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is no JSON: {error}") from error


def yaml_values(text: bytes) -> int:
    """The number of values in a YAML text, without creating them: with aliases it can be far larger than the text.

    0 if the text is no YAML: the code that parses it later raises a better error.
    """
    import yaml

    counts: dict[int, int] = {}

    def count(node: Any) -> int:
        if id(node) not in counts:
            counts[id(node)] = 1  # for now, because a node may contain itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            counts[id(node)] += sum(sum(map(count, part)) if isinstance(part, tuple) else count(part) for part in parts)
        return counts[id(node)]

    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return count(yaml.compose(text, Loader=yaml.SafeLoader))
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


FAILED_WRITES = (OSError, RuntimeError)  # torch's own writer raises RuntimeError


class Saving:
    """Notes which files of a run could not be written.

    Attributes:
        failed: for each file whose last writing failed, the reason.
        extras: names in `failed` that are no part of the training.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failed: dict[str, str] = {}
        self.extras: set[str] = set()
        self._say = say

    def missing(self, extras: bool = False) -> list[str]:
        """Texts such as `a.csv, b.zip (No space left on device)`: one for each reason."""
        failed = {name: why for name, why in self.failed.items() if (name in self.extras) == extras}
        by_reason = {why: [name for name, other in failed.items() if other == why] for why in failed.values()}
        return [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The block writes the file `name`. If that fails, the error is noted and not raised."""
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
        """The block is no part of the training (evaluation, loggers). Any error is noted and not raised."""
        try:
            yield
        except (Exception, SystemExit) as error:
            from fasttrain.envs.user_code import blame  # imports gymnasium, which takes 0.5 s

            what = one_line(error if isinstance(error, FastTrainError) else blame(error))
            if name not in self.failed:
                self._say(f"warning: {name} failed ({what}); the run goes on")
            self.cost(name, what)

    def cost(self, name: str, why: str) -> None:
        """Record that `name`, which is no part of the training, was lost because of `why`."""
        self.failed[name] = why
        self.extras.add(name)


SAVING = ".saving-"
DRAFTS = ("*.json.tmp", "evaluations.csv.tmp", "report.html.tmp")  # temporary names of `write_whole`


def clean(folder: Path) -> None:
    """Remove incomplete files that a killed process has left in a run's folder. No other process may work there."""
    for left in list(folder.rglob(f"{SAVING}*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in [draft for name in DRAFTS for draft in folder.glob(name)]:
        with suppress(OSError):
            left.unlink()


@contextmanager
def into_place(file: Path) -> Iterator[Path]:
    """A path for `file` in a temporary folder. After the block all files of that folder are moved beside `file`."""
    folder = file.parent / f"{SAVING}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)  # the run's folder may have been deleted
    try:
        yield folder / file.name
        for part in sorted(folder.iterdir()):
            os.replace(part, file.parent / part.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Not the package filelock: it has no shared lock (`holder` takes one), needs a writable file, imports in 60 ms.
LOCK = ".lock"
ENDS = ("done", "stopped", "crashed")  # phases in status.json of a run that has ended
TAKEN = (errno.EAGAIN, errno.EACCES)  # errors if another process has the lock; EACCES: Windows
LOOK_S = 0.02  # seconds before the next try, because `holder` also takes the lock for a moment
BEYOND = 1 << 20  # position of the locked byte, behind the process id: Windows cannot read a locked byte


@contextmanager
def lock_folder(folder: Path, join: bool = False) -> Iterator[None]:
    """Hold the folder's lock inside the block, if the disk has locks. `join`: another process may hold it instead.

    Raises:
        ConfigError: another process works in the folder, and `join` is False.
    """
    if join and holder(folder):
        yield
        return
    if not (folder / LOCK).exists() and (other := _process_by_status(folder)):
        raise ConfigError(f"run={folder}: still going on (process {other})")
    try:  # child processes do not inherit the file, so that none of them keeps the lock
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        if not _take(file, tries=3):
            raise ConfigError(f"run={folder}: still going on (process {_holder(file)})")
        with suppress(OSError):  # for example if the disk is full
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, str(os.getpid()).encode())
        yield
    finally:
        os.close(file)


def holder(folder: Path) -> str:
    """Id of the process that works in the folder, or "unknown"; empty if none does."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return _process_by_status(folder)
    try:
        return "" if _take(file, shared=True) else _holder(file)
    finally:
        os.close(file)


def _process_by_status(folder: Path) -> str:
    """Id in status.json of the process that works in the folder; empty: none. Helps if the lock file was deleted."""
    status = read_json(folder / "status.json")
    pid, at_s, ended = status.get("pid"), status.get("time"), status.get("phase") in ENDS
    if ended or status.get("host") != platform.node() or type(pid) is not int or pid == os.getpid():
        return ""
    return str(pid) if isinstance(at_s, float) and lived_at(pid, at_s) else ""


def _take(file: int, shared: bool = False, tries: int = 1) -> bool:
    """Take the lock. Returns False if another process has it. Several processes can have a `shared` lock."""
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
    content = os.read(file, 20)
    return content.decode() if content.isdigit() else "unknown"
