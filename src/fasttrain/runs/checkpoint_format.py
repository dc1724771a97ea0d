"""The files of a checkpoint: state.json (plain values), arrays.npz (named arrays), and for users model.zip.

Reading executes nothing: JSON, and NumPy arrays without objects, stored uncompressed, so that none is larger than its
file. model.zip is a stock Stable-Baselines3 zip, which does hold pickles; `resume` never opens it.
"""

from __future__ import annotations

import copy
import json
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.save_util import recursive_getattr, save_to_zip_file

from fasttrain.errors import ConfigError
from fasttrain.runs.checkpoint_files import MANIFEST, Writer, read_manifest
from fasttrain.runs.files import parse_json
from fasttrain.runs.safe_zip import check_arrays, opened

SCHEMA = 1
STATE, ARRAYS, MODEL, STATISTICS = "state.json", "arrays.npz", "model.zip", "vecnormalize.pkl"
MOST_STATE_BYTES = 256 << 20


class Snapshot(NamedTuple):
    """A run at one moment; the arrays are views of what training will change."""

    env_steps: int
    state: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    model: Writer  # of model.zip
    statistics: bytes | None = None  # of VecNormalize, in SB3's own format, for users of model.zip

    @property
    def size_bytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def copied(self) -> Snapshot:
        """The same, of which training changes nothing when it goes on."""
        return self._replace(arrays={name: np.array(array) for name, array in self.arrays.items()})

    def files(self) -> dict[str, bytes | Writer]:
        """What `CheckpointFolder.publish` takes."""
        text = json.dumps({"schema": SCHEMA, **self.state}).encode()
        files: dict[str, bytes | Writer] = {STATE: text, ARRAYS: array_writer(self.arrays), MODEL: self.model}
        return files if self.statistics is None else {**files, STATISTICS: self.statistics}


def array_writer(arrays: Mapping[str, NDArray[Any]]) -> Writer:
    """Writes them as np.savez does, but refuses objects, and of views copies only what a file's buffer holds."""

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return write


def lacks(folder: Path) -> str:
    """What a manifest leaves out, and with it out of what is checked; empty if nothing that `stored` reads."""
    manifest = read_manifest(folder)
    listed = manifest["files"] if isinstance(manifest, dict) else {}
    missing = [name for name in (STATE, ARRAYS) if name not in listed]
    return f"{MANIFEST} does not list {' and '.join(missing)}" if missing else ""


@contextmanager
def stored(folder: Path) -> Iterator[tuple[dict[str, Any], Mapping[str, NDArray[Any]]]]:
    """State and arrays of a checkpoint that is whole; an array is read when it is asked for.

    Raises:
        ConfigError: they are of another version, or not what a checkpoint has.
    """
    path = folder / STATE
    if path.stat().st_size > MOST_STATE_BYTES:
        raise ConfigError(f"{path} is too large for a checkpoint's ({path.stat().st_size:,} bytes)")
    state = parse_json(path.read_bytes(), str(path))
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise ConfigError(f"{folder} is of another version of fasttrain: its schema is not {SCHEMA}")
    if type(state.get("env_steps")) is not int or state["env_steps"] < 0:
        raise ConfigError(f"{path}: its env_steps are no number of steps")
    try:
        with opened(folder / ARRAYS, str(folder / ARRAYS)) as archive:
            check_arrays(archive, str(folder / ARRAYS))
        arrays = np.load(folder / ARRAYS, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
    with arrays:
        yield state, arrays


def zip_writer(model: BaseAlgorithm) -> Writer:
    """Writes what `model.save` would write now, whatever the model does meanwhile. Copying takes 0.3 ms."""
    excluded = set(model._excluded_save_params())
    names, tensor_names = model._get_torch_save_params()
    excluded |= {name.split(".")[0] for name in (*names, *tensor_names)}
    data = {name: _kept(value) for name, value in model.__dict__.items() if name not in excluded}
    params = {name: _cloned(recursive_getattr(model, name).state_dict()) for name in names}
    tensors = {name: recursive_getattr(model, name).detach().clone() for name in tensor_names}

    def write(file: BinaryIO) -> None:
        save_to_zip_file(file, data=data, params=params, pytorch_variables=tensors)  # type: ignore[arg-type]

    return write


def _kept(value: Any) -> Any:
    """Safe from what training changes in place."""
    return copy.copy(value) if isinstance(value, (deque, dict, list, np.ndarray)) else value


def _cloned(value: Any) -> Any:
    clone: Callable[[], Any] | None = getattr(value, "detach", None)
    if clone is not None:
        return clone().clone()
    if isinstance(value, Mapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _cloned(item)  # type: ignore[index]
        return copied
    return [_cloned(item) for item in value] if isinstance(value, list) else value
