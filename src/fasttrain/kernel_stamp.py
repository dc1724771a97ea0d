"""A digest of everything that numba would compile for a kernel: the same in every process, at every place."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.core import types

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...))
_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_exceptiontable")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSIONED = {"numba", "llvmlite", "numpy", *sys.stdlib_module_names}  # named, not read: the cache knows the versions


def digest_of(value: Any) -> bytes:
    """Of a kernel or of anything that a kernel may refer to.

    A function is what its bytecode says and all that this names: a constant counts with its value, another kernel or
    function with its code, down to the last. So editing a comment or a kernel's neighbour changes nothing, and editing
    what it calls, in whatever file, or a constant, wherever it comes from, does. What is neither counts with the whole
    file that it comes from. Taken from memory, not from the file, which may have been edited since it was imported.
    """
    hasher = hashlib.sha256()
    for part in _Walk().of(value):
        data = part if isinstance(part, bytes) else part.encode(errors="backslashreplace")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()


class _Walk:
    """Everything once, in an order that depends on nothing but the code."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # id → number; the object too, so that no id is used twice

    def of(self, value: Any, names: Iterable[str] = ()) -> Iterator[str | bytes]:
        """`names`: what the code that mentions a module may want of it."""
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
        elif isinstance(value, types.Type):
            yield _ADDRESS.sub("", str(value))
            yield from self._parts(value, ("dispatcher", "typing_key", "instance_class", "types"))
        elif isinstance(value, ModuleType):
            yield from self._module(value, names)
        elif id(value) in self._seen:
            yield str(self._seen[id(value)][0])
        else:
            self._seen[id(value)] = len(self._seen), value
            yield from self._once(value)

    def _once(self, value: Any) -> Iterator[str | bytes]:
        """What may refer to itself."""
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

    def _parts(self, value: Any, names: Iterable[str]) -> Iterator[str | bytes]:
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
    """Of globals and attributes, also in functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _is_ours(value: Any) -> bool:
    """Whether its code may change without a change of a version that the cache knows."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return module.partition(".")[0] not in _VERSIONED


def _source(value: Any) -> bytes:
    """The file that it comes from, empty where that is a versioned package's."""
    holder = value if hasattr(value, "__module__") else type(value)
    file = getattr(sys.modules.get(str(holder.__module__)), "__file__", None)
    return Path(file).read_bytes() if file and _is_ours(holder) else b""
