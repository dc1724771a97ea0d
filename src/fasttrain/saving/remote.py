"""`checkpoint.copy_to`: a copy of the run's folder at another place, from which any machine can continue the run.

The place is an address of fsspec: a folder, `s3://bucket/run`, `gs://…`. A checkpoint is complete there as soon as its
manifest is, so the manifest is copied last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.saving.checkpoints import MANIFEST, PUBLISHED, CheckpointFolder, Writer
from fasttrain.saving.files import LOCK, parse_json, read_json

CHECKPOINTS, PLAN = "checkpoints", "plan.json"
NOT_COPIED = (LOCK, "daemons", "evaluating")  # they belong to processes of this machine


class CopyError(OSError):
    """A checkpoint was written in the run's folder, but not copied."""


class RemoteFolder:
    """The copy of one run's folder.

    Raises:
        ConfigError: fsspec does not know the address, or lacks a package for it.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address
        try:
            self.system, root = url_to_fs(address)
            self.root = str(root).rstrip("/")
        except Exception as error:  # each file system of fsspec has its own errors
            raise ConfigError(f"checkpoint.copy_to={address}: {error}") from error
        self._known: dict[str, tuple[int, int]] = {}  # name → size and time of the file that was copied last
        self._is_ours = False  # whether the place was found to hold this run, or none

    def store(self, folder: Path) -> None:
        """Copy the files that were changed since the last call, and remove old checkpoints there.

        Raises:
            CopyError: the place cannot be reached or written, or another run was copied there.
        """
        names = _names(folder)
        manifests = [name for name in names if name.startswith(f"{CHECKPOINTS}/") and name.endswith(MANIFEST)]
        try:
            if not self._is_ours and self.is_another(folder):
                raise ValueError("another run was copied there; use another place")
            self._is_ours = True
            for name in [*(name for name in names if name not in manifests), *manifests]:
                self._put(folder, name)
            for step in self._steps() - {Path(name).parts[1] for name in manifests}:
                self.system.rm(self._at(f"{CHECKPOINTS}/{step}"), recursive=True)
                self._known = {name: it for name, it in self._known.items() if f"{CHECKPOINTS}/{step}/" not in name}
        except Exception as error:  # each file system of fsspec has its own errors
            raise CopyError(f"its copy at {self.address}: {type(error).__name__}: {error}") from error

    def _put(self, folder: Path, name: str) -> None:
        try:
            stat = (folder / name).stat()
            if self._known.get(name) != (now := (stat.st_size, stat.st_mtime_ns)):
                self.system.makedirs(self._at(str(PurePosixPath(name).parent)), exist_ok=True)
                self.system.put_file(str(folder / name), self._at(name))
                self._known[name] = now
        except FileNotFoundError:
            if (folder / name).exists():  # the other place is missing; a file that is gone here needs no copy
                raise

    def fetch_newer(self, folder: Path) -> bool:
        """Copy the run here if it has a later checkpoint there than in `folder`. Returns whether it was copied.

        Raises:
            ConfigError: the place cannot be read, or has names that lead out of the folder.
        """
        if self.is_another(folder):
            raise ConfigError(f"checkpoint.copy_to={self.address} holds another run than {folder}: use another place")
        newest = CheckpointFolder(folder / CHECKPOINTS).newest()
        try:
            if max(self._steps(), default="") <= ("" if newest is None else newest.name):
                return False
            for path in sorted(self.system.find(self.root), key=lambda path: path.endswith(MANIFEST)):
                name = PurePosixPath(path).relative_to(self.root)
                if ".." in name.parts:
                    raise ValueError(f"{name} leads out of the folder")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self.system.get_file(path, str(folder / name))
        except Exception as error:
            raise self._unreadable(error) from error
        return True

    def is_another(self, folder: Path) -> bool:
        """Whether another run than that of `folder` was copied there. Raises ConfigError: it cannot be read."""
        here, there = read_json(folder / PLAN).get("provenance"), self._plan().get("provenance")
        return None not in (here, there) and here != there

    def has_run(self) -> bool:
        """Whether a run was copied there. Raises ConfigError: the place cannot be read."""
        return bool(self._plan())

    def _plan(self) -> dict[str, Any]:
        """The plan.json of the run there; empty if there is none."""
        try:
            self.system.invalidate_cache()
            if not self.system.exists(self._at(PLAN)):
                return {}
            return dict(parse_json(self.system.cat_file(self._at(PLAN)), self._at(PLAN)))
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"checkpoint.copy_to={self.address} cannot be read: {type(error).__name__}: {error}")

    def clear(self) -> None:
        """Remove what a later run would continue from. Raises ConfigError: the place cannot be written."""
        try:
            for name in (PLAN, "summary.json", CHECKPOINTS):
                if self.system.exists(self._at(name)):
                    self.system.rm(self._at(name), recursive=name == CHECKPOINTS)
        except Exception as error:
            raise self._unreadable(error) from error

    def _at(self, name: str) -> str:
        return self.root if name == "." else f"{self.root}/{name}"

    def _steps(self) -> set[str]:
        """Names of the complete checkpoints there."""
        self.system.invalidate_cache()
        paths = [PurePosixPath(path) for path in self.system.glob(self._at(f"{CHECKPOINTS}/*/{MANIFEST}"))]
        return {path.parent.name for path in paths if PUBLISHED.fullmatch(path.parent.name)}


class CopiedCheckpoints(CheckpointFolder):
    """Checkpoints that are copied, with all files of the run, as soon as they are written."""

    def __init__(self, root: Path, keep: int, remote: RemoteFolder) -> None:
        super().__init__(root, keep)
        self.remote = remote

    def publish(self, step: int, files: Mapping[str, bytes | Writer]) -> Path:
        target = super().publish(step, files)
        self.remote.store(self.root.parent)
        return target


def _names(folder: Path) -> list[str]:
    """The run's files, relative to its folder, without links and without checkpoints that are not complete."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        at = Path(place).relative_to(folder)
        inside = at.parts[:1] == (CHECKPOINTS,)
        folders[:] = [
            name for name in folders
            if (PUBLISHED.fullmatch(name) if at.parts == (CHECKPOINTS,) else name not in NOT_COPIED)
        ]  # fmt: skip
        files = [name for name in files if name not in NOT_COPIED and not (Path(place) / name).is_symlink()]
        if not inside or len(at.parts) == 2:
            found += [(at / name).as_posix() for name in files]
    return found


def fetch(folder: Path, address: str, way: str) -> str:
    """Fetch a newer copy of the run before it is continued. Returns what was done, for the user.

    Args:
        way: `on_existing`, of a run that begins or goes on in `folder`.

    Raises:
        ConfigError: there is a run, and `way` is refuse; or the place cannot be read.
    """
    remote = RemoteFolder(address)
    if folder.absolute() in (Path(remote.root), *Path(remote.root).parents):
        raise ConfigError(f"checkpoint.copy_to={address} lies in the run's own folder: name another place")
    if way == "resume":
        return f"the run was copied from {address}\n" if remote.fetch_newer(folder) else ""
    if way == "refuse" and remote.has_run():
        raise ConfigError(
            f"checkpoint.copy_to={address} holds a run: use another place, on_existing=resume continues it, "
            "on_existing=overwrite starts it again"
        )
    return ""
