"""The cache of compiled kernels on disk: one file each, named by all that the machine code depends on.

The name has a digest of the signature, the processor, the versions and all code that is compiled (`digest_of`). So a
file is valid wherever it was compiled, there is no index, and two processes that compile at once write the same file.
numba's own cache names a file by its path and trusts modification times, so that a fresh clone, an image's layer or a
reinstallation compiles everything again. That cache also misses changes of the kernels that a kernel calls, and has an
index that the last of two writers overwrites.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np

try:  # private parts of numba: because of them pyproject.toml limits numba's version
    from numba.core import compiler, serialize, sigutils
    from numba.core.caching import NullCache
    from numba.misc import appdirs

    _rebuild: Callable[..., object] = compiler.CompileResult._rebuild
    _dumps: Callable[[object], bytes] = serialize.dumps
    _normalised: Callable[[object], object] = sigutils.normalize_signature
    _AppDirs: Any = appdirs.AppDirs
    KEEPS = True
except (ImportError, AttributeError):  # another version of numba: there is no cache, so that each process compiles
    KEEPS = False
    NullCache: Any = object  # type: ignore[no-redef]

logging.getLogger("numba").setLevel(logging.WARNING)  # else 61,255 log records if an env sets DEBUG for all loggers

KEPT = 2  # files kept per kernel and processor: switching a git branch and back compiles nothing
DEAD_S = 3600  # seconds after which an unfinished file counts as abandoned
_DIGEST_SIZE = 32  # bytes
_CHOICES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")  # variables NUMBA_…
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)


def folders() -> list[Path]:
    """The folders in which kernels are looked for and written.

    Only `NUMBA_CACHE_DIR` if it is set. Else the user's cache folder, which a fresh clone and a reinstall share, and a
    folder of the package, which all users of an image can read.
    """
    if chosen := str(getattr(numba.config, "CACHE_DIR", "")):
        return [Path(chosen) / "fasttrain"]
    users = Path(_AppDirs(appname="fasttrain", appauthor=False).user_cache_dir if KEEPS else "")
    own = Path(__file__).parent / "__pycache__"
    return [folder / "kernels" for folder in (users, own) if folder.is_absolute()]  # relative if there is no home


class KernelCache(NullCache):
    """numba asks this cache before it compiles `dispatcher` for a signature, and stores the compiled kernel in it."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    @cached_property
    def _stamp(self) -> bytes:
        return digest_of(self._dispatcher)

    @property
    def cache_path(self) -> str:
        return str(folders()[0])

    def load_overload(self, sig: object, target_context: Any) -> object:
        """The compiled kernel; None if there is no file, or it is damaged."""
        target_context.refresh()
        payload = recall("".join(self._name(sig, target_context)))
        return None if payload is None else _rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: object, data: Any) -> None:
        """Store the compiled kernel. If no folder can be written to, one warning is printed."""
        if data.library.has_dynamic_globals or any(not loop.can_cache for loop in data.lifted):
            return  # the machine code has addresses that are valid only in this process
        if not remember(*self._name(sig, self._dispatcher.targetctx), _dumps(data._reduce())):
            _cannot_keep(folders()[0])

    def file(self, sig: object) -> str:
        """The name of the file with the kernel for this signature."""
        return "".join(self._name(sig, self._dispatcher.targetctx))

    def holds(self, sig: object) -> bool:
        """Whether there is a file with the kernel for this signature."""
        return any((folder / self.file(sig)).is_file() for folder in folders())

    def _name(self, sig: object, target_context: Any) -> tuple[str, str]:
        """Both parts of the file's name: one for kernel and processor, one for the version of the kernel's code."""
        chosen = [repr(getattr(numba.config, name, None)) for name in _CHOICES]
        key = digest_of((_normalised(sig), target_context.codegen().magic_tuple(), _VERSIONS, chosen))
        kernel = _name(self._dispatcher.py_func).replace("<", "").replace(">", "")
        return f"{kernel[-120:]}-{key.hex()[:24]}", f".{self._stamp.hex()[:24]}.nbc"


def recall(name: str) -> bytes | None:
    """The content of the file `name`; None if no folder has an undamaged file of this name."""
    return next(filter(None, (_read(folder / name) for folder in folders())), None)


def remember(name: str, version: str, payload: bytes) -> bool:
    """Write the file `name` + `version` into every folder; returns whether at least one folder could be written to."""
    written = [_write(folder, name, version, payload) for folder in folders()]
    return any(written)


def _read(file: Path) -> bytes | None:
    """The payload that `_write` wrote; None if the file is damaged: then the kernel is compiled and written again."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    payload = content[_DIGEST_SIZE:]
    return payload if hashlib.sha256(payload).digest() == content[:_DIGEST_SIZE] else None


def _write(folder: Path, kernel: str, version: str, payload: bytes) -> bool:
    """Write a file whole or not at all, and remove old versions; returns whether it could be written."""
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
        with suppress(OSError):  # another process may remove the same file
            old.unlink()
    return True


def _outdated(folder: Path, kernel: str) -> list[Path]:
    """The files to remove: all versions of the kernel except the last `KEPT` ones, and abandoned drafts."""
    with suppress(OSError):
        written = {file: file.stat().st_mtime for file in folder.glob(f"{kernel}.*")}
        versions = sorted((file for file in written if file.suffix == ".nbc"), key=written.__getitem__, reverse=True)
        drafts = (file for file, when in written.items() if file.suffix == ".tmp" and when < time.time() - DEAD_S)
        return [*versions[KEPT:], *drafts]
    return []


@cache
def _cannot_keep(folder: Path) -> None:
    line = f"compiled kernels cannot be written to {folder}: every run compiles them; set NUMBA_CACHE_DIR"
    sys.stderr.write(f"fasttrain: warning: {line}\n")


_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))
_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_exceptiontable")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSIONED = {"numba", "llvmlite", "numpy", *sys.stdlib_module_names}  # hashed by version, not by code


def digest_of(value: object) -> bytes:
    """A digest of a kernel, or of anything that a kernel may refer to.

    Of a function, the bytecode and all that it names are hashed: constants with their values, other kernels and
    functions with their code, and so on. So the digest does not depend on comments or on functions that are not called,
    but on everything that is called and on constants, in whatever file. Of all other objects the whole file from which
    they come is hashed. Code is read from memory, because files may have changed since the import.
    """
    hasher = hashlib.sha256()
    for part in _Walk().of(value):
        data = part if isinstance(part, bytes) else part.encode(errors="backslashreplace")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()


class _Walk:
    """Visits all parts of a value once, in an order that depends only on the code."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # id → (number, object): keeping the object keeps its id unique

    def of(self, value: object, names: Iterable[str] = ()) -> Iterator[str | bytes]:
        """What is hashed of a value. Of a module only the attributes listed in `names`, which the calling code uses."""
        yield type(value).__name__
        if isinstance(value, Enum):
            yield f"{_name(type(value))}.{value.name}"
            yield from self.of(value.value)
        elif isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, (np.ndarray, np.generic)):
            yield from (repr(value.dtype), repr(value.shape), value.tobytes())
        elif isinstance(value, (set, frozenset)):
            yield repr(sorted(map(repr, value)))
        elif isinstance(value, (tuple, list)):
            if hasattr(value, "_fields"):
                yield from self.of(type(value))
            yield from self._all(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                yield from self._all((key, value[key]))
        elif isinstance(value, CodeType):
            for field in _CODE:
                yield repr(getattr(value, field, None))
            yield from self._all(value.co_consts)
        elif isinstance(value, numba.types.Type):
            yield _ADDRESS.sub("", str(value))
            yield from self._parts(value, ("dispatcher", "typing_key", "instance_class", "types"))
        elif isinstance(value, ModuleType):
            yield from self._module(value, names)
        elif id(value) in self._seen:
            yield str(self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            yield from self._once(value)

    def _once(self, value: object) -> Iterator[str | bytes]:
        """What is hashed of a function, class or other object. Called once for each: it may refer to itself."""
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif hasattr(value, "py_func"):  # a kernel
            yield from self._parts(value, ("targetoptions", "py_func"))
        elif hasattr(value, "_defn"):  # an intrinsic
            yield from self._parts(value, ("_defn",))
        elif isinstance(value, type) and hasattr(value, "_fields"):
            yield from (_name(value), repr(value._fields))
        else:
            yield _name(value if hasattr(value, "__qualname__") else type(value))
            yield _source(value)

    def _all(self, values: Iterable[Any]) -> Iterator[str | bytes]:
        for value in values:
            yield from self.of(value)

    def _parts(self, value: object, names: Iterable[str]) -> Iterator[str | bytes]:
        yield from self._all(getattr(value, name) for name in names if hasattr(value, name))

    def _function(self, function: FunctionType) -> Iterator[str | bytes]:
        yield _name(function)
        if not _is_ours(function):
            return
        yield from self._all((function.__code__, function.__defaults__, function.__kwdefaults__))
        yield from self._all(cell.cell_contents for cell in function.__closure__ or ())
        names = list(_names(function.__code__))
        for name in names:
            if name in function.__globals__:
                yield name
                yield from self.of(function.__globals__[name], names)

    def _module(self, module: ModuleType, names: Iterable[str]) -> Iterator[str | bytes]:
        yield module.__name__
        if _is_ours(module):
            for name in names:
                if hasattr(module, name):
                    yield name
                    yield from self.of(getattr(module, name), names)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in the code, also in its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _name(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _is_ours(value: object) -> bool:
    """Whether the code of `value` belongs to no package whose version is hashed, so that the code must be hashed."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return module.partition(".")[0] not in _VERSIONED


def _source(value: object) -> bytes:
    """The content of the file from which `value` comes; empty for a package whose version is hashed."""
    holder = value if hasattr(value, "__module__") else type(value)
    file = getattr(sys.modules.get(str(holder.__module__)), "__file__", None)
    return Path(file).read_bytes() if file and _is_ours(holder) else b""


# --- compiling kernels before they are called: in this process, or in a second one during training, which imports numba
# and the kernels' modules but not torch.

_START = "from fasttrain_kernels.kernel_cache import compile_asked; compile_asked()"


class KernelCall(NamedTuple):
    """A kernel, and arguments of the types with which it will be called."""

    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.py_func.__name__)

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(numba.typeof(argument) for argument in self.arguments)

    @property
    def file(self) -> str:
        """The name of the kernel's file in the cache."""
        return str(self.kernel._cache.file(self.signature))

    @property
    def is_kept(self) -> bool:
        """Whether the kernel's machine code is on disk or in this process."""
        signature = self.signature
        return signature in self.kernel.overloads or (KEEPS and self.kernel._cache.holds(signature))


def compile_all(calls: Sequence[KernelCall], now: Callable[[str], None] = lambda _: None) -> None:
    """Compile the kernels, or load them from disk. `now` is called with texts such as `2 of 3: train_epoch`."""
    for number, call in enumerate(calls, start=1):
        now(f"{number} of {len(calls)}: {call.name}")
        call.kernel.compile(call.signature)


class Compiler:
    """A process that compiles kernels into the cache. It ends when the process that started it ends.

    Its priority is normal: with two busy cores a million steps of CartPole took 84 s, and 133 s with niceness 5,
    because compiling then took 85 s instead of 29. On idle cores there was no difference.
    """

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        asked = [(call.kernel.py_func.__module__, call.name, call.signature) for call in calls]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            self._pipe.write(pickle.dumps(asked))
            self._pipe.flush()  # the pipe stays open: when it is closed, the process ends
        except OSError:
            pass  # the process has ended already; `failure` says why

    @property
    def _pipe(self) -> Any:
        return self._process.stdin

    def is_done(self) -> bool:
        return self._process.poll() is not None

    @property
    def failure(self) -> str:
        """The last line on stderr of a process that has ended; empty if everything was compiled."""
        if self._process.returncode == 0 or self._process.stderr is None:
            return ""
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"ended with exit code {self._process.returncode}"

    def stop(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()


def compile_asked() -> None:
    """The code that the process of `Compiler` runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after a Ctrl-C the trainer decides when to end this process
    asked = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    try:
        for module, name, signature in asked:
            getattr(import_module(module), name).compile(signature)
    except Exception as error:  # the trainer shows any error as one line
        sys.exit(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _end_with_trainer() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when Python ends
        pass
    os._exit(0)
