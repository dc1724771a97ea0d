"""Tensors out of a file of `torch.save`, without unpickling: the pickle in it is read as a list of what to build.

Of pickle's instructions those for numbers, texts, lists, dicts and tuples are understood, and four names: the ways in
which torch writes a tensor, a parameter and an ordered dict, and the types of storages. Nothing is looked up, imported
or called by name, so that what comes out is plain values and tensors, whatever torch's own reader would allow (its
`weights_only` had holes: CVE-2025-32434, CVE-2026-24747).
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import Any, BinaryIO

import torch

from fasttrain.errors import ConfigError
from fasttrain.saving.archives import opened, read_member

MOST_PICKLE_BYTES = 1 << 20  # 100 to 200 bytes a tensor; policies have 10 to 100, a pool of opponents ten times as many
MOST_MEMBERS = 10_000
MOST_DEPTH = 8  # of tuples in tuples; a tensor's are 2 deep
DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
ORDERED = "collections OrderedDict"
NAMES = {TENSOR, PARAMETER, ORDERED, *(f"torch {name}" for name in DTYPES)}
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")


class Name(str):
    """A name that the pickle wants to have looked up; it stays text."""


class Mark:
    """Where on the stack a list, dict or tuple begins."""


def read_tensors(file: bytes | BinaryIO, what: str) -> Any:
    """What was saved: numbers, texts, lists, tuples, dicts and tensors, on the CPU.

    Tensors may share memory with each other, and together take no more than the file has.

    Args:
        what: the file's name in messages.

    Raises:
        ConfigError: it is damaged, or wants anything else to be built.
    """
    stream = io.BytesIO(file) if isinstance(file, bytes) else file
    with opened(stream, what, MOST_MEMBERS) as archive:
        found = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise ConfigError(f"{what} is no file of torch.save")
        pickle = read_member(archive, found[0], MOST_PICKLE_BYTES, what)
        try:
            return _Builder(archive, found[0].removesuffix("data.pkl"), what).build(pickle)
        except ConfigError:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise ConfigError(f"{what} is not what torch.save writes of tensors: {reason}") from error


class _Builder:
    """Reads one pickle. `root` is the folder in the archive where its storages lie."""

    def __init__(self, archive: zipfile.ZipFile, root: str, what: str) -> None:
        self.archive, self.root, self.what = archive, root, what
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, bytearray] = {}
        self.depths: dict[int, int] = {}  # id of a tuple with tuples in it → how deep it is
        order = f"{root}byteorder"
        if order in archive.namelist() and read_member(archive, order, 100, what) != b"little":
            raise ConfigError(f"{what} was written on a machine of another byte order")

    def build(self, pickle: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        (result,) = self.stack
        return result

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "GLOBAL":
            if argument not in NAMES:
                raise ConfigError(f"{self.what} wants {argument.replace(' ', '.')[:100]!r}, which no tensor needs")
            stack.append(Name(argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            stack.append(Mark())
        elif name != "PROTO":
            self._compose(name)

    def _compose(self, name: str) -> None:
        stack = self.stack
        if name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(self._tuple(self._taken(int(name[-1]))))
        elif name == "TUPLE":
            stack.append(self._tuple(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._taken(1) if name == "APPEND" else self._since_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._taken(2) if name == "SETITEM" else self._since_mark()
            if not all(type(key) in (str, int) for key in items[::2]):
                raise ValueError("the pickle has a dict with keys that are neither texts nor integers")
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "BINPERSID":
            stack.append(self._storage(*stack.pop()))
        elif name == "REDUCE":
            called, arguments = self._taken(2)
            stack.append(self._called(called, arguments))
        elif name == "BUILD":  # the _metadata of a state dict: versions of modules, which no policy asks for
            stack.pop()
            self._top(dict)
        else:
            raise ConfigError(f"{self.what} has the pickle instruction {name}, which no tensor needs")

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        """Not deep: hashing one, which whoever looks it up does, recurses on the C stack without a limit."""
        made = tuple(items)
        inside = max((self.depths.get(id(item), 1) for item in items if type(item) is tuple), default=0)
        if inside >= MOST_DEPTH:
            raise ValueError(f"the pickle has tuples more than {MOST_DEPTH} deep")
        self.depths.pop(id(made), None)  # of one that is gone and had this place in memory
        if inside:
            self.depths[id(made)] = inside + 1
        return made

    def _taken(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the pickle takes more than it has")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], Mark):
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise ValueError("the pickle has an end without a beginning")

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"the pickle fills a {type(self.stack[-1]).__name__} like a {kind.__name__}")
        return self.stack[-1]

    def _called(self, name: Any, arguments: Any) -> Any:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError("the pickle calls what is no name")
        if name == ORDERED and not arguments:
            return {}
        if name == PARAMETER and len(arguments) == 3 and isinstance(arguments[0], torch.Tensor):
            return arguments[0]
        if name == TENSOR and len(arguments) in (6, 7):
            return _tensor(*arguments[:4])
        raise ValueError(f"the pickle calls {name} in a way of its own")

    def _storage(self, kind: Any, storage_type: Any, key: Any, location: Any, count: Any) -> torch.Tensor:
        """All numbers of a storage (count,), read when it is first asked for; `location` was its device."""
        if kind != "storage" or not isinstance(storage_type, Name) or type(key) is not str or type(count) is not int:
            raise ValueError("the pickle asks for what is no storage")
        dtype = DTYPES[storage_type.removeprefix("torch ")]
        if key not in self.storages:
            member = f"{self.root}data/{key}"
            self.storages[key] = bytearray(read_member(self.archive, member, 1 << 62, self.what))
        content = self.storages[key]
        if count < 0 or count * dtype.itemsize != len(content):
            raise ValueError(f"storage {key[:20]!r} says it has {count} numbers and has {len(content)} bytes")
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    """A view of the storage; torch refuses one that reaches beyond it."""
    numbers = (offset, *size, *stride)
    if type(storage) is not torch.Tensor or storage.ndim != 1 or len(size) != len(stride) or len(size) > 8:
        raise ValueError("the pickle makes a tensor of what is no storage")
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("a tensor's shape is none")
    count = 1
    for each in size:
        count *= each
    if count > storage.numel():  # strides of 0 would let a file of a few bytes hold a huge tensor
        raise ValueError(f"a tensor of {tuple(size)} has more numbers than its storage")
    return storage.as_strided(size, stride, offset)
