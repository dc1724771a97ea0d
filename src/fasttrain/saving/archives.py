"""Reading zip archives from untrusted sources: they are checked before anything is read, and never unpacked to disk.

The archives that fasttrain reads (models, arrays, statistics) must not be compressed, so that an archive cannot contain
more bytes than its file has.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError

MOST_MEMBERS = 100_000
BYTES_PER_ENTRY = 1000  # maximum of an entry in the zip's central directory: 46 bytes, name, zip64 numbers
ENCRYPTED = 0x1 | 0x40 | 0x2000
DIRECTORY_SIZE = 5  # index in the result of zipfile's _EndRecData
READ_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError)


@contextmanager
def open_archive(file: Path | BinaryIO, what: str, most_members: int = MOST_MEMBERS) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive, which messages call `what`.

    Raises:
        ConfigError: it is no zip file, claims to contain more bytes than it has, or has duplicate, linked, compressed
            or encrypted members or names that are no plain relative paths.
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
    """The bytes of a member. Raises ConfigError if it is missing, damaged, or larger than `most_bytes`."""
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
    """Raise ConfigError unless every member is an array without objects, exactly as large as its header says."""
    for info in archive.infolist():
        try:
            with archive.open(info) as member:
                shape, dtype, begin = _header(member)
        except READ_ERRORS as error:
            raise ConfigError(f"{what}: its {info.filename!r} is no array: {error}") from error
        if dtype.hasobject:
            raise ConfigError(f"{what}: its {info.filename!r} holds objects (pickles), which are never read")
        count = math.prod(shape)  # with Python's integers, because NumPy's product may overflow
        if min(shape, default=0) < 0 or count * dtype.itemsize != info.file_size - begin:
            raise ConfigError(f"{what}: its {info.filename!r} has another size than its shape {shape} requires")


def read_arrays(path: Path, most_bytes: int) -> dict[str, NDArray[Any]]:
    """All arrays of a small .npz. Raises ConfigError if it is larger than `most_bytes`, no .npz, or has objects."""
    if path.stat().st_size > most_bytes:
        raise ConfigError(f"{path} is too large ({path.stat().st_size:,} bytes; {most_bytes:,} allowed)")
    with open_archive(path, str(path)) as archive:
        check_arrays(archive, str(path))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.array(arrays[name]) for name in arrays.files}
    except READ_ERRORS as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and dtype from an .npy member's header, and the position where its numbers begin."""
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the .npy format is not supported")
    reads = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = reads(member)
    except (SyntaxError, TypeError, RecursionError, MemoryError, OverflowError, TokenError) as error:  # from the parser
        raise ValueError(f"its header is not NumPy's: {type(error).__name__}") from error
    if not all(type(size) is int for size in shape):
        raise ValueError("its shape is not valid")
    return shape, dtype, member.tell()


def _check_directory(stream: BinaryIO, what: str, most_members: int) -> None:
    """Check the size of the zip's directory before zipfile makes an object for each entry in it."""
    try:
        end_record = getattr(zipfile, "_EndRecData")(stream)  # noqa: B009 - typeshed lacks this name
    except READ_ERRORS as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error
    if not end_record:
        raise ConfigError(f"{what} cannot be read: it is no zip file, or was cut off")
    if end_record[DIRECTORY_SIZE] > most_members * BYTES_PER_ENTRY:
        raise ConfigError(f"{what}: its directory is too large ({end_record[DIRECTORY_SIZE]:,} bytes)")


def _check_members(members: list[zipfile.ZipInfo], length: int, what: str, most_members: int) -> None:
    if len(members) > most_members:
        raise ConfigError(f"{what} has {len(members):,} members; {most_members:,} allowed")
    names = [info.filename.casefold() for info in members]  # torch ignores the case of names
    if len(set(names)) < len(names):
        twice = next(info.filename for info in members if names.count(info.filename.casefold()) > 1)
        raise ConfigError(f"{what} has {twice!r} twice")
    for info in members:
        if fault := _fault_of(info):
            raise ConfigError(f"{what}: its member {info.orig_filename[:100]!r} {fault}; fasttrain writes no such file")
    if sum(info.file_size for info in members) > length:
        raise ConfigError(f"{what} is damaged: its members are larger than the file")


def _fault_of(info: zipfile.ZipInfo) -> str:
    name = info.orig_filename
    if name != info.filename or not is_plain_path(name):
        return "has a name that leads out of the archive"
    if info.flag_bits & ENCRYPTED:
        return "is encrypted"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return "is compressed"
    kind = stat.S_IFMT(info.external_attr >> 16)
    return "is a link or a device" if kind not in (0, stat.S_IFREG) else ""


def is_plain_path(name: str) -> bool:
    """Whether the path is relative, does not lead out of its folder, and means the same on every system."""
    if not name or len(name) > 500 or re.search(r"[\\:\x00-\x1f\x7f]", name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


# --- reading tensors from a file of `torch.save`, by torch's own reader with `weights_only`
#
# First the pickle in the file is checked. It may only name what torch writes for tensors, parameters and ordered dicts,
# although torch's reader allows more. Tuples must not be nested so deeply that their hash overflows the stack. torch is
# imported only where tensors are read.

MOST_PICKLE_BYTES = 1 << 20  # a tensor takes 100 to 200 bytes; a policy has 10 to 100 tensors, a pool of opponents more
MOST_STORAGES = 10_000
MOST_TUPLES = 20_000  # a tensor needs four tuples
KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
NAMES = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
    *(f"torch {kind}Storage" for kind in KINDS),
}
INSTRUCTIONS = {
    *("PROTO", "STOP", "GLOBAL", "MARK", "REDUCE", "BUILD", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def read_tensors(file: bytes | BinaryIO, what: str) -> Any:
    """The numbers, texts, lists, tuples, dicts and tensors that `torch.save` has written, on the CPU.

    All tensors together take no more memory than the file has bytes. `what` is the file's name in messages.

    Raises:
        ConfigError: the file is damaged or contains anything else.
    """
    import torch

    stream = io.BytesIO(file) if isinstance(file, bytes) else file
    with open_archive(stream, what, MOST_STORAGES) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ConfigError(f"{what} is no file of torch.save")
        pickled = read_member(archive, pickles[0], MOST_PICKLE_BYTES, what)
    try:
        _check_pickle(pickled, what)
        stream.seek(0)
        value = torch.load(stream, map_location="cpu", weights_only=True)
        _check_value(value, torch.Tensor, set())
    except ConfigError:
        raise
    except Exception as error:  # torch's reader may raise anything for a senseless pickle
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(f"{what} is not a torch.save file of tensors only: {reason}") from error
    return value


def _check_pickle(pickled: bytes, what: str) -> None:
    tuples, last = 0, ""
    of_tuples: set[int] = set()  # memo indices of tuples; a second use is refused: nested (a, a) takes hours to hash
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in INSTRUCTIONS:
            raise ConfigError(f"{what} has the pickle instruction {opcode.name}, which no tensor has")
        if opcode.name == "GLOBAL" and argument not in NAMES:
            raise ConfigError(f"{what} names {str(argument).replace(' ', '.')[:100]!r}, which no tensor needs")
        if opcode.name.endswith("BINGET") and argument in of_tuples:
            raise ConfigError(
                f"{what} refers to one tuple twice, which torch.save never writes; the file is damaged or was changed"
            )
        if opcode.name.endswith("BINPUT"):
            (of_tuples.add if last.startswith("TUPLE") else of_tuples.discard)(argument)
        elif opcode.name != "PROTO":
            last = opcode.name
        tuples += opcode.name.startswith("TUPLE")
    if tuples > MOST_TUPLES:
        raise ConfigError(f"{what} has {tuples:,} tuples in its pickle; {MOST_TUPLES:,} allowed")


def _check_value(value: Any, tensors: type[Any], seen: set[int]) -> None:
    """Raise ValueError: a tensor is larger than its storage, or a type is forbidden. `seen`: ids of checked values."""
    if isinstance(value, tensors):
        if value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise ValueError(f"a tensor of {tuple(value.shape)} has more numbers than its storage")
    elif isinstance(value, (dict, list, tuple)):
        if isinstance(value, dict) and not all(type(key) in (str, int) for key in value):
            raise ValueError("a dict has keys that are neither texts nor integers")
        if id(value) not in seen:
            seen.add(id(value))
            for item in value.values() if isinstance(value, dict) else value:
                _check_value(item, tensors, seen)
    elif not isinstance(value, (int, float, str, type(None))):
        raise ValueError(f"there is a {type(value).__name__} in it")
