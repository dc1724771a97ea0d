"""What the vector envs on a crew share: calls of chosen envs, and the infos that workers send."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fasttrain.errors import EnvError
from fasttrain_vec.crew import Crew
from fasttrain_vec.process import WorkerTraceback
from fasttrain_vec.worker_envs import Failure
from fasttrain_vec.worker_memory import BOOL, FLOAT, INT, Arrays

LOST = "the env or its worker failed and was replaced"  # info["lost"] at the end of such an episode
_NUMBER_TYPES: dict[int, type] = {FLOAT: float, INT: int, BOOL: bool}  # types of the values in `info_values`


def call_envs(crew: Crew, name: str, arguments: tuple[Any, ...], envs: Sequence[int]) -> list[Any]:
    """Send one message to each worker that has any of `envs`. Returns the answers in the order of `envs`."""
    requests: dict[int, tuple[Any, ...]] = {}
    places: list[list[int]] = []
    for number, worker in enumerate(crew.workers):
        mine = [place for place, env in enumerate(envs) if worker.first <= env < worker.stop]
        if mine:
            requests[number] = (*arguments, [envs[place] - worker.first for place in mine])
            places.append(mine)
    answers: list[Any] = [None] * len(envs)
    for mine, part in zip(places, crew.call(name, requests), strict=True):
        if isinstance(part, Failure):
            raise _call_error(part, envs[mine[0]])
        for place, value in zip(mine, part or [None] * len(mine), strict=True):
            answers[place] = value
    return answers


def _call_error(error: Failure, env_index: int) -> Exception:
    kind = AttributeError if error.missing else EnvError
    exception = kind(f"a call to env {env_index} or a later env of its worker failed: {error.text}")
    exception.__cause__ = WorkerTraceback(f"\n{error.traceback}")
    return exception


def sent_numbers(arrays: Arrays, rows: slice, keys: tuple[str, ...]) -> Iterator[tuple[int, str, Any]]:
    """Env, key and value of the numbers under `keys` that the envs in `rows` sent with the last step."""
    kinds = arrays.info_kinds[rows]
    for row, column in zip(*np.nonzero(kinds), strict=True):
        index = rows.start + int(row)
        yield index, keys[column], _NUMBER_TYPES[int(kinds[row, column])](arrays.info_values[index, column])


class InfoReader:
    """Reads infos of workers. It warns once of each kind of loss."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def unpack(self, packed: bytes, index: int) -> dict[str, Any]:
        """Unpickle the info of env `index`. If a class in it cannot be imported here, warn and return {}."""
        try:
            return pickle.loads(packed) if packed else {}
        except Exception as error:
            self._warn(f"the info of env {index} cannot be read in the trainer ({error}); it is left out")
            return {}

    def warn_unsent(self, index: int, unsent: tuple[str, ...]) -> None:
        if unsent:
            self._warn(f"info entries of env {index} cannot be pickled and are left out: {', '.join(unsent)}")

    def _warn(self, text: str) -> None:
        kind = text.split(" cannot ")[0].rstrip("0123456789")
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, UserWarning, stacklevel=4)
