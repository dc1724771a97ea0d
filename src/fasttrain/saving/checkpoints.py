"""Checkpoints on disk: each is complete or does not exist, and is read without executing anything.

A checkpoint is a folder `step_000001234` with state.json (plain values), arrays.npz (named arrays without objects) and,
for users, a stock model.zip, which contains pickles and which `resume` never opens. The folder is first written under
another name, with a manifest of sizes and SHA-256 sums. After all files and the folder are forced to disk, it is
renamed. The newest checkpoint whose manifest fits is used. The order of operations follows Pillai et al. (OSDI 2014).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError
from fasttrain.saving.archives import check_arrays, open_archive
from fasttrain.saving.files import parse_json

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
PREFIX, STAGED, REMOVED = "step_", ".staged-", ".removed-"
CHUNK_BYTES = 1 << 20
MOST_MANIFEST_BYTES = 1 << 20
PUBLISHED = re.compile(rf"{PREFIX}\d{{12,}}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Writer = Callable[[BinaryIO], object]


class Disk:
    """The operations by which a checkpoint is written. Tests put faults between these operations."""

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=False)

    def write(self, path: Path, write: Writer) -> None:
        """Write the file and force it to disk."""
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, folder: Path) -> None:
        """Force the folder's list of names to disk. Windows does this by itself, and cannot open folders."""
        if os.name == "nt":
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder)


class CheckpointFolder:
    """The checkpoints of one run in `root`, of which the newest `keep` are kept. The first checkpoint makes `root`."""

    def __init__(self, root: Path, keep: int = 3, disk: Disk | None = None) -> None:
        self.root, self.keep, self.disk = root, keep, disk or Disk()

    def publish(self, step: int, files: Mapping[str, bytes | Writer]) -> Path:
        """Write a checkpoint, then remove the oldest beyond `keep`. If the disk is full, old checkpoints are kept."""
        target = self.root / name_of(step)
        staged = self.root / f"{STAGED}{target.name}-{os.getpid()}"
        with suppress(FileNotFoundError):
            self.disk.remove(staged)
        first = not self.root.exists()
        try:
            self.disk.make(staged)
            for name, content in files.items():
                self.disk.write(staged / name, _writer(content))
            entries = {name: _fingerprint(staged / name) for name in files}
            manifest = {"schema": MANIFEST_SCHEMA, "step": step, "files": entries}
            self.disk.write(staged / MANIFEST, _writer(_manifest_text(manifest)))
            self.disk.sync(staged)
            if target.exists():  # after a resume the same step is written again
                self._discard(target)
            self.disk.rename(staged, target)
            self.disk.sync(self.root)
            if first:
                self.disk.sync(self.root.parent)
        except Exception:  # because torch reports a full disk as a RuntimeError
            with suppress(OSError):
                self.disk.remove(staged)
            raise
        self._forget_old(target)
        return target

    def all(self) -> list[Path]:
        """All checkpoints by their names, the newest first. They are not checked."""
        if not self.root.is_dir():
            return []
        return sorted((path for path in self.root.iterdir() if PUBLISHED.fullmatch(path.name)), reverse=True)

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next((folder for folder in self.all() if not problem_of(folder)), None)

    def clean(self) -> None:
        """Remove what a killed process has left incomplete."""
        for path in self.root.glob(".*") if self.root.is_dir() else ():
            if path.name.startswith((STAGED, REMOVED)):
                with suppress(OSError):
                    self.disk.remove(path)

    def _forget_old(self, newest: Path) -> None:
        # Checkpoints of later steps than `newest` do not count: a resume passed over them, because they are damaged.
        earlier = [folder for folder in self.all() if folder.name <= newest.name]
        for folder in earlier[self.keep :]:
            with suppress(OSError):  # an old checkpoint that remains does no harm
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that a partly removed checkpoint does not look damaged."""
        away = self.root / f"{REMOVED}{folder.name}-{os.getpid()}"
        self.disk.rename(folder, away)
        self.disk.remove(away)


def problem_of(folder: Path) -> str:
    """Why this folder is no complete checkpoint; empty if it is one."""
    if folder.is_symlink() or (folder / MANIFEST).is_symlink():
        return "it is a link to another place"
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if folder.name.startswith(PREFIX) and folder.name != name_of(manifest["step"]):
        return f"{MANIFEST} is of step {manifest['step']:,}"
    for name, entry in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        try:
            if (size := path.stat().st_size) != entry["bytes"]:
                return f"{name} has {size:,} bytes, not {entry['bytes']:,}"
            if _fingerprint(path)["sha256"] != entry["sha256"]:
                return f"{name} was changed after it was written (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest, or a text about what is wrong with the file."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            return f"{MANIFEST} is too large"
        manifest = json.loads(text := path.read_bytes())
        if not _is_manifest(manifest):
            return f"{MANIFEST} is of another version"
    except OSError as error:
        return f"{MANIFEST} " + (f"cannot be read ({error.strerror})" if path.exists() else "is missing")
    except (ValueError, RecursionError):
        return f"{MANIFEST} is not readable"
    # The manifest has no checksum of its own: its text must be exactly what `_manifest_text` writes.
    return manifest if text == _manifest_text(manifest) else f"{MANIFEST} was changed after it was written"


def name_of(step: int) -> str:
    """The name of a checkpoint's folder. Sorted by name, folders are sorted by step."""
    return f"{PREFIX}{step:012d}"


def _manifest_text(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def _is_manifest(manifest: object) -> bool:
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        return False
    files = manifest.get("files")
    if not (isinstance(manifest.get("step"), int) and isinstance(files, dict) and files):
        return False
    kinds = {"bytes": int, "sha256": str}
    return all(
        NAME.fullmatch(name)
        and isinstance(entry, dict)
        and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
        for name, entry in files.items()
    )


def _fingerprint(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _writer(content: bytes | Writer) -> Writer:
    return content if callable(content) else lambda file: file.write(content)


SCHEMA = 1
STATE, ARRAYS, MODEL, STATISTICS = "state.json", "arrays.npz", "model.zip", "vecnormalize.pkl"
MOST_STATE_BYTES = 256 << 20


class Snapshot(NamedTuple):
    """The state of a run. The arrays are views of arrays that training changes."""

    env_steps: int
    state: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    model: Writer  # writes model.zip
    statistics: bytes | None = None  # VecNormalize in SB3's own format, for users of model.zip

    @property
    def size_bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def copied(self) -> Snapshot:
        """This snapshot with copies of its arrays."""
        return self._replace(arrays={name: np.array(array) for name, array in self.arrays.items()})

    def files(self) -> dict[str, bytes | Writer]:
        """The files for `CheckpointFolder.publish`."""
        text = json.dumps({"schema": SCHEMA, **self.state}).encode()
        files: dict[str, bytes | Writer] = {STATE: text, ARRAYS: array_writer(self.arrays), MODEL: self.model}
        return files if self.statistics is None else {**files, STATISTICS: self.statistics}


def array_writer(arrays: Mapping[str, NDArray[Any]]) -> Writer:
    """Writes arrays as np.savez does, but refuses objects, and copies views part by part."""

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return write


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[tuple[dict[str, Any], Mapping[str, NDArray[Any]]]]:
    """State and arrays of a complete checkpoint. Arrays are read on access. Raises ConfigError for another version."""
    manifest = read_manifest(folder)
    listed = manifest["files"] if isinstance(manifest, dict) else {}
    if missing := [name for name in (STATE, ARRAYS) if name not in listed]:
        raise ConfigError(f"{MANIFEST} does not list {' and '.join(missing)}")
    path = folder / STATE
    if path.stat().st_size > MOST_STATE_BYTES:
        raise ConfigError(f"{path} is too large for a checkpoint file ({path.stat().st_size:,} bytes)")
    state = parse_json(path.read_bytes(), str(path))
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise ConfigError(f"{folder} is of another version of fasttrain: its schema is not {SCHEMA}")
    if type(state.get("env_steps")) is not int or state["env_steps"] < 0:
        raise ConfigError(f"{path}: its env_steps are no number of steps")
    try:
        with open_archive(folder / ARRAYS, str(folder / ARRAYS)) as archive:
            check_arrays(archive, str(folder / ARRAYS))
        arrays = np.load(folder / ARRAYS, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    with arrays:
        yield state, arrays
