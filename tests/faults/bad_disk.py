"""A file layer that fails at any operation or after any number of bytes, and one that notes what a crash may leave."""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.saving.checkpoints import Disk, Writer

NEVER = 10**9
PLAIN_FILES: dict[str, bytes | Writer] = {"state.json": b"{}", "arrays.npz": bytes(99), "model.zip": b"zip"}


class BadDisk(Disk):
    """Fails at the `at`-th operation (`how`), or once `room` bytes are written; `times` times, then it works again."""

    def __init__(
        self, at: int = NEVER, how: str = "before", error: int = errno.ENOSPC, room: int = NEVER, times: int = 1
    ) -> None:
        self.at, self.how, self.room, self.times = at, how, room, times
        self.error = OSError(error, os.strerror(error))
        self.count = self.written = self.failed = 0

    def _step(self, operation: Callable[[], None], half: Callable[[], None] = lambda: None) -> None:
        self.count += 1
        if self.count < self.at or self.failed >= self.times:
            return operation()
        {"before": lambda: None, "half": half, "after": operation}[self.how]()
        self.refuse()

    def refuse(self) -> None:
        self.failed += 1
        raise self.error

    def make(self, folder: Path) -> None:
        self._step(lambda: super(BadDisk, self).make(folder))

    def write(self, path: Path, write: Writer) -> None:
        def whole() -> None:
            with io.BufferedWriter(_Limited(path, self)) as file:  # SB3 takes no file of another class
                write(file)
                file.flush()
                os.fsync(file.fileno())

        def half() -> None:
            whole()
            os.truncate(path, path.stat().st_size // 2)

        self._step(whole, half)

    def sync(self, folder: Path) -> None:
        self._step(lambda: super(BadDisk, self).sync(folder))

    def rename(self, source: Path, target: Path) -> None:
        self._step(lambda: super(BadDisk, self).rename(source, target))

    def take(self, size: int) -> int:
        """How many of so many bytes there is room for."""
        fits = size if self.failed >= self.times else min(size, self.room - self.written)
        self.written += fits
        return fits


class _Limited(io.FileIO):
    """A file that ends up full."""

    def __init__(self, path: Path, disk: BadDisk) -> None:
        super().__init__(path, "wb")
        self._disk = disk

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        fits = self._disk.take(len(view))
        if fits == 0 and len(view):
            self._disk.refuse()
        return super().write(view[:fits]) or 0


# --- what a crash leaves


class Operation(NamedTuple):
    """One entry of a log; paths below the noted folder."""

    kind: str  # make, write, sync, rename, remove
    path: str
    target: str = ""
    content: bytes = b""


class NotingDisk(Disk):
    """Does everything, and notes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []

    def _note(self, kind: str, path: Path, target: Path | None = None, content: bytes = b"") -> None:
        names = [each.relative_to(self.root).as_posix() for each in (path, target or self.root)]
        self.log.append(Operation(kind, *names, content))

    def make(self, folder: Path) -> None:
        super().make(folder)
        self._note("make", folder)

    def write(self, path: Path, write: Writer) -> None:
        super().write(path, write)
        self._note("write", path, content=path.read_bytes())

    def sync(self, folder: Path) -> None:
        super().sync(folder)
        self._note("sync", folder)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, target)

    def remove(self, folder: Path) -> None:
        super().remove(folder)
        self._note("remove", folder)


def crashes(log: list[Operation]) -> Iterator[list[Operation]]:
    """What may have reached the disk when a machine lost its power at any point of the log.

    A process that is killed leaves a prefix of the log, the last write of it torn anywhere. A machine that loses power
    may also have kept back any operation on a folder's names that no `sync` of that folder has followed: making and
    removing, renaming, the names of files. What is written within a file is on disk when `write` returns.
    """
    for end in range(len(log) + 1):
        done = log[:end]
        loose = [at for at in range(end) if not _is_settled(done, at)]
        for kept in itertools.product((True, False), repeat=len(loose)):
            dropped = {at for at, keeps in zip(loose, kept, strict=True) if not keeps}
            survived = [operation for at, operation in enumerate(done) if at not in dropped]
            yield survived
            if all(kept) and end < len(log) and log[end].kind == "write":
                whole = log[end].content
                for size in (0, 1, len(whole) // 2, len(whole) - 1):
                    yield [*survived, log[end]._replace(content=whole[:size])]


def _is_settled(done: list[Operation], at: int) -> bool:
    operation = done[at]
    folder = os.path.dirname(operation.path) or "."
    return operation.kind == "sync" or any(later.kind == "sync" and later.path == folder for later in done[at + 1 :])


def replay(survived: list[Operation], root: Path) -> None:
    """Make `root` what those operations leave of what it is. One whose folder is not there is lost too."""
    for operation in survived:
        path = root / operation.path
        if operation.kind == "make":
            path.mkdir(exist_ok=True)
        elif operation.kind == "write" and path.parent.is_dir():
            path.write_bytes(operation.content)
        elif operation.kind == "rename" and path.exists() and not (root / operation.target).exists():
            path.rename(root / operation.target)
        elif operation.kind == "remove":
            shutil.rmtree(path, ignore_errors=True)
