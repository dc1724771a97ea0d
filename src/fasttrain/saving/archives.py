"""Zip archives from anywhere: looked at before anything in them is read, and never unpacked to disk.

What fasttrain reads (models, arrays, statistics) is stored, not compressed, so an archive can hold no more bytes than
its file has. Everything that could be something else than it says is refused.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError

MOST_MEMBERS = 100_000
BYTES_PER_ENTRY = 1000  # of the central directory: 46 bytes, the name, zip64 numbers
ENCRYPTED = 0x1 | 0x40 | 0x2000
DIRECTORY_SIZE = 5  # place in what zipfile's _EndRecData returns
READ_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError)


@contextmanager
def opened(file: Path | BinaryIO, what: str, most_members: int = MOST_MEMBERS) -> Iterator[zipfile.ZipFile]:
    """The archive, if nothing about it is odd.

    Args:
        what: its name in messages.

    Raises:
        ConfigError: it is no zip; or says it holds what it cannot, twice the same, links, compressed or encrypted
            members, or names that are no plain relative paths.
    """
    stream: BinaryIO = file.open("rb") if isinstance(file, Path) else file
    try:
        _check_directory(stream, what, most_members)
        try:
            archive = zipfile.ZipFile(stream)
        except READ_ERRORS as error:
            raise ConfigError(f"{what} cannot be read: {error}") from error
        with archive:
            _check_members(archive.infolist(), stream.seek(0, 2), what, most_members)
            yield archive
    finally:
        if isinstance(file, Path):
            stream.close()


def read_member(archive: zipfile.ZipFile, name: str, most_bytes: int, what: str) -> bytes:
    """A member's bytes, their checksum compared.

    Raises:
        ConfigError: it is missing, larger than `most_bytes`, or damaged.
    """
    try:
        info = archive.getinfo(name)
        if info.file_size > most_bytes:
            raise ConfigError(f"{what}: its {name} is too large ({info.file_size:,} bytes; {most_bytes:,} allowed)")
        return archive.read(name)
    except KeyError:
        raise ConfigError(f"{what}: there is no {name} in it") from None
    except READ_ERRORS as error:
        raise ConfigError(f"{what}: its {name} cannot be read: {error}") from error


def check_arrays(archive: zipfile.ZipFile, what: str) -> None:
    """Every member is an array without objects, as large as its header says, so that reading one takes no more.

    Raises:
        ConfigError: one is not.
    """
    for info in archive.infolist():
        try:
            with archive.open(info) as member:
                shape, dtype, begin = _header(member)
        except READ_ERRORS as error:
            raise ConfigError(f"{what}: its {info.filename!r} is no array: {error}") from error
        if dtype.hasobject:
            raise ConfigError(f"{what}: its {info.filename!r} holds objects (pickles), which are never read")
        count = math.prod(shape)  # Python's numbers: NumPy's product may overflow
        if min(shape, default=0) < 0 or count * dtype.itemsize != info.file_size - begin:
            raise ConfigError(f"{what}: its {info.filename!r} says it has shape {shape}, which it does not hold")


def read_arrays(path: Path, most_bytes: int) -> dict[str, NDArray[Any]]:
    """All arrays of a small .npz.

    Raises:
        ConfigError: it is larger than `most_bytes`, or not what an .npz without objects is.
    """
    if path.stat().st_size > most_bytes:
        raise ConfigError(f"{path} is too large ({path.stat().st_size:,} bytes; {most_bytes:,} allowed)")
    with opened(path, str(path)) as archive:
        check_arrays(archive, str(path))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.array(arrays[name]) for name in arrays.files}
    except READ_ERRORS as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and type that an .npy member says its array has, and where its numbers begin."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    reads = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = reads(member)
    except (SyntaxError, TypeError, RecursionError, MemoryError, OverflowError) as error:  # of literal_eval
        raise ValueError(f"its header is none: {type(error).__name__}") from error
    if not all(type(size) is int for size in shape):
        raise ValueError("its shape is none")
    return shape, dtype, member.tell()


def _check_directory(stream: BinaryIO, what: str, most_members: int) -> None:
    """Before zipfile makes an object of every entry. Its own search is used, so that both look at the same place."""
    try:
        found = getattr(zipfile, "_EndRecData")(stream)  # noqa: B009 - typeshed does not know it
    except READ_ERRORS as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"{what} cannot be read: it is no zip file, or was cut off")
    if found[DIRECTORY_SIZE] > most_members * BYTES_PER_ENTRY:
        raise ConfigError(f"{what}: its list of names is too long ({found[DIRECTORY_SIZE]:,} bytes)")


def _check_members(members: list[zipfile.ZipInfo], length: int, what: str, most_members: int) -> None:
    if len(members) > most_members:
        raise ConfigError(f"{what} has {len(members):,} members; {most_members:,} allowed")
    names = [info.filename for info in members]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{what} has {twice!r} twice")
    for info in members:
        why = _oddity(info)
        if why:
            raise ConfigError(f"{what}: its member {info.orig_filename[:100]!r} {why}, which no file of ours is")
    if sum(info.file_size for info in members) > length:
        raise ConfigError(f"{what} says it holds more than it is long")


def _oddity(info: zipfile.ZipInfo) -> str:
    name = info.orig_filename
    if name != info.filename or not is_plain_path(name):
        return "has a name that leads elsewhere"
    if info.flag_bits & ENCRYPTED:
        return "is encrypted"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return "is compressed"
    kind = stat.S_IFMT(info.external_attr >> 16)
    return "is a link or a device" if kind not in (0, stat.S_IFREG) else ""


def is_plain_path(name: str) -> bool:
    """Relative, below where it is, the same on every system."""
    if not name or len(name) > 500 or re.search(r"[\\:\x00-\x1f\x7f]", name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


# --- tensors out of a file of `torch.save`, without unpickling: the pickle in it is read as a list of what to build
#
# Of pickle's instructions those for numbers, texts, lists, dicts and tuples are understood, and four names: the ways
# in which torch writes a tensor, a parameter and an ordered dict, and the types of storages. Nothing is looked up,
# imported or called by name, so that what comes out is plain values and tensors, whatever torch's own reader would
# allow (its `weights_only` had holes: CVE-2025-32434, CVE-2026-24747). torch itself is loaded where tensors are read.

MOST_PICKLE_BYTES = 1 << 20  # 100 to 200 bytes a tensor; policies have 10 to 100, a pool of opponents ten times as many
MOST_STORAGES = 10_000
MOST_DEPTH = 8  # of tuples in tuples; a tensor's are 2 deep
DTYPES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
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
    with opened(stream, what, MOST_STORAGES) as archive:
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
        import torch

        self.torch, self.archive, self.root, self.what = torch, archive, root, what
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

    def _called(self, name: object, arguments: object) -> object:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError("the pickle calls what is no name")
        if name == ORDERED and not arguments:
            return {}
        if name == PARAMETER and len(arguments) == 3 and isinstance(arguments[0], self.torch.Tensor):
            return arguments[0]
        if name == TENSOR and len(arguments) in (6, 7):
            return self._tensor(*arguments[:4])
        raise ValueError(f"the pickle calls {name} in a way of its own")

    def _storage(self, kind: object, storage_type: object, key: object, location: object, count: object) -> object:
        """All numbers of a storage (count,), read when it is first asked for; `location` was its device."""
        if kind != "storage" or not isinstance(storage_type, Name) or type(key) is not str or type(count) is not int:
            raise ValueError("the pickle asks for what is no storage")
        dtype = getattr(self.torch, DTYPES[storage_type.removeprefix("torch ")])
        if key not in self.storages:
            member = f"{self.root}data/{key}"
            self.storages[key] = bytearray(read_member(self.archive, member, 1 << 62, self.what))
        content = self.storages[key]
        if count < 0 or count * dtype.itemsize != len(content):
            raise ValueError(f"storage {key[:20]!r} says it has {count} numbers and has {len(content)} bytes")
        return self.torch.frombuffer(content, dtype=dtype) if content else self.torch.empty(0, dtype=dtype)

    def _tensor(self, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> object:
        """A view of the storage; torch refuses one that reaches beyond it."""
        numbers = (offset, *size, *stride)
        if type(storage) is not self.torch.Tensor or storage.ndim != 1 or len(size) != len(stride) or len(size) > 8:
            raise ValueError("the pickle makes a tensor of what is no storage")
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise ValueError("a tensor's shape is none")
        if math.prod(size) > storage.numel():  # strides of 0 would let a file of a few bytes hold a huge tensor
            raise ValueError(f"a tensor of {tuple(size)} has more numbers than its storage")
        return storage.as_strided(size, stride, offset)
