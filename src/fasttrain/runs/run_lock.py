"""One process at a time in a run's folder.

The kernel keeps the lock and lets go of it at any kind of death: what a killed trainer leaves behind stops nobody.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fasttrain.errors import ConfigError

LOCK = ".lock"
TAKEN = (errno.EAGAIN, errno.EACCES)  # the latter on Windows
BEYOND = 1 << 20  # the byte that Windows locks: what is locked cannot be read, and the process id stands before it


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, the folder is this process's alone; not so where nothing can be locked, on some network drives.

    Raises:
        ConfigError: another process has it.
    """
    file = _opened(folder / LOCK)
    if file is None:
        yield
        return
    try:
        if not _take(file):
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
        file = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return ""
    try:
        return "" if _take(file) else _holder(file)
    finally:
        os.close(file)


def _opened(path: Path) -> int | None:
    """Python has it closed in processes that this one starts: none of them keeps the lock."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _take(file: int) -> bool:
    """Whether nobody else has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, BEYOND, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in TAKEN
    return True


def _holder(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    said = os.read(file, 20)
    return said.decode() if said.isdigit() else "unknown"
