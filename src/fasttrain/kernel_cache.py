"""Compiled kernels on disk: one file each, named by all that its machine code depends on.

numba's own cache names a file by its place and trusts modification times, so that a fresh clone, an image's layer or a
reinstall compiles everything anew, knows of the kernel's own file only, though the code of every kernel it calls is
compiled into it, and keeps an index that the last of two writers overwrites. Here the name holds a digest of the
signature, the processor, the versions and everything that is compiled (`kernel_stamp.py`). So there is no index, what
is found is right, wherever it was compiled, and two processes that compile at once write the same file.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
import uuid
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import compiler, serialize, sigutils
from numba.core.caching import NullCache
from numba.misc import appdirs

from fasttrain.kernel_stamp import digest_of

_rebuild: Any = compiler.CompileResult._rebuild
_dumps: Any = serialize.dumps
_normalised: Any = sigutils.normalize_signature
_AppDirs: Any = appdirs.AppDirs

KEPT = 2  # versions of one kernel for one processor: going back to another branch compiles nothing
DEAD_S = 3600  # nobody writes a file for so long
_DIGEST_SIZE = 32  # bytes
_CHOICES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")  # NUMBA_… of the environment
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)


def folders() -> list[Path]:
    """Where kernels are looked for and written to, each where it can be.

    `NUMBA_CACHE_DIR` alone if it is set. Else the user's cache folder, which a fresh clone and a reinstall share, and
    the package's own, which all users of an image can read.
    """
    settings: Any = numba.config
    if settings.CACHE_DIR:
        return [Path(settings.CACHE_DIR) / "fasttrain"]
    users = Path(_AppDirs(appname="fasttrain", appauthor=False).user_cache_dir)
    own = Path(__file__).parent / "__pycache__"
    return [folder / "kernels" for folder in (users, own) if folder.is_absolute()]  # "~/.cache": there is no home


class KernelCache(NullCache):
    """What numba asks before it compiles `dispatcher` for a signature, and hands the result to."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    @cached_property
    def _stamp(self) -> bytes:
        return digest_of(self._dispatcher)

    @property
    def cache_path(self) -> str:
        return str(folders()[0])

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel; None if it is not there, or not whole."""
        target_context.refresh()
        kernel, version = self._name(sig, target_context)
        payload = next(filter(None, (_read(folder / (kernel + version)) for folder in folders())), None)
        return None if payload is None else _rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, if that is possible anywhere; if not, a line says so once and nothing else happens."""
        if data.library.has_dynamic_globals or any(not loop.can_cache for loop in data.lifted):
            return  # addresses of this process are in the machine code
        kernel, version = self._name(sig, self._dispatcher.targetctx)
        payload = _dumps(data._reduce())
        written = [_write(folder, kernel, version, payload) for folder in folders()]
        if not any(written):
            _cannot_keep(folders()[0])

    def holds(self, sig: Any) -> bool:
        """Whether it need not be compiled, as far as that can be told without loading it."""
        name = "".join(self._name(sig, self._dispatcher.targetctx))
        return any((folder / name).is_file() for folder in folders())

    def _name(self, sig: Any, target_context: Any) -> tuple[str, str]:
        """Which kernel for which processor, and which version of it."""
        function = self._dispatcher.py_func
        chosen = [repr(getattr(numba.config, name, None)) for name in _CHOICES]
        key = digest_of((_normalised(sig), target_context.codegen().magic_tuple(), _VERSIONS, chosen))
        kernel = f"{function.__module__}.{function.__qualname__}".replace("<", "").replace(">", "")
        return f"{kernel[-120:]}-{key.hex()[:24]}", f".{self._stamp.hex()[:24]}.nbc"


def _read(file: Path) -> bytes | None:
    """What `_write` wrote. A file that is damaged counts as none: it will be compiled and written anew."""
    try:
        found = file.read_bytes()
    except OSError:
        return None
    payload = found[_DIGEST_SIZE:]
    return payload if hashlib.sha256(payload).digest() == found[:_DIGEST_SIZE] else None


def _write(folder: Path, kernel: str, version: str, payload: bytes) -> bool:
    """Whether it could be written. Nobody ever sees half a file, and none but `KEPT` versions stay."""
    draft = folder / f"{kernel}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            file.write(hashlib.sha256(payload).digest())
            file.write(payload)
        os.replace(draft, folder / (kernel + version))
    except OSError:
        with suppress(OSError):
            draft.unlink()
        return False
    for old in _outdated(folder, kernel):
        with suppress(OSError):  # another process removes the same
            old.unlink()
    return True


def _outdated(folder: Path, kernel: str) -> list[Path]:
    """All versions but the `KEPT` that were written last, and drafts whose writer must be dead."""
    with suppress(OSError):
        written = {file: file.stat().st_mtime for file in folder.glob(f"{kernel}.*")}
        versions = sorted((file for file in written if file.suffix == ".nbc"), key=written.__getitem__, reverse=True)
        drafts = (file for file, when in written.items() if file.suffix == ".tmp" and when < time.time() - DEAD_S)
        return [*versions[KEPT:], *drafts]
    return []


@cache
def _cannot_keep(folder: Path) -> None:
    """Said once."""
    line = f"compiled kernels cannot be written to {folder}: every run compiles them; NUMBA_CACHE_DIR names a place"
    sys.stderr.write(f"fasttrain: warning: {line}\n")
