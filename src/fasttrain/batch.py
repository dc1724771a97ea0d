"""Types of data that are used in the whole package, and the legend of shapes.

Shapes: N envs, T steps of a rollout, B rows of a minibatch, A actions (width of the mask), O observation entries. True
in an action mask means legal. A termination ends the episode by the rules, a truncation by a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError

BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Observations = NDArray[Any] | dict[str, NDArray[Any]]
Records = NDArray[np.void]  # (N,) states of games, with a structured dtype
OPPONENTS_TURN = "opponents_turn"  # a property of a two-sided env, and a key in its infos
LAST_MASKS = "terminal_action_masks"  # key in the info of a truncated step: (A,) bool, True = legal in the last state


class Record(Protocol):
    """An entry of `Records`, as compiled code sees it."""

    def __getattr__(self, field: str) -> Any: ...

    def __setattr__(self, field: str, value: object) -> None: ...


class FinishedEpisode(NamedTuple):
    """One episode that ended in the last vector step."""

    env_index: int
    episode_return: float  # undiscounted sum of rewards
    length: int  # env steps
    final_observation: Any  # observation before the autoreset; a dict for Dict spaces
    truncated: bool  # True if a limit ended the episode and the rules did not end it in the same step
    info: dict[str, Any]  # info of the env's last step
    lost: bool = False  # True if a fault of the env or of its worker ended the episode


class QBatches(NamedTuple):
    """U minibatches of B rows out of M stored transitions, for kernels. Arrays that are not needed are empty."""

    observations: Float32Array  # (M, O)
    next_observations: Float32Array  # (L, O), L rows; may be the same array as `observations`
    actions: Int64Array  # (M, K), K sub-actions; a Discrete action has 1
    rows: Int64Array  # (U, B) row indices into `observations` and `actions`
    next_rows: Int64Array  # (U, B) row indices into `next_observations`
    rewards: Float32Array  # (U, B) sums of discounted rewards over the n steps of a transition
    discounts: Float32Array  # (U, B) gamma to the power of the number of steps; shape (0, 0): the algorithm's gamma
    dones: Float32Array  # (U, B) 1 where the episode ended by the rules
    next_masks: BoolArray  # (U, B, A) True = legal in the next observations; shape (0, 0, 0): all are legal
    weights: Float32Array  # (U, B) weights of the losses in prioritized replay; shape (0, 0): all are 1


def each_array(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Call `function` with an array, or with each array in a dict or tuple; returns the results in the same form.

    Args:
        value: an array, None (which stays None), or a dict or tuple of such values.
        others: values of the same form; their arrays in the same place are further arguments of `function`.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: each_array(function, part, *(other[key] for other in others)) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [each_array(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return function(value, *others)


def written(place: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Copy `values` into `place`, which has as many entries; returns `place`."""
    place[...] = values.reshape(place.shape)
    return place


def select_rows(arrays: Any, rows: Int64Array | slice | int) -> Any:
    """The rows `rows` of an array (N, ...), or of each array in a dict or tuple. Indices give copies, slices views."""
    return each_array(lambda part: part[rows], arrays)


def draw_choices(rng: Any, dims: Sequence[int], count: int, action_masks: BoolArray | None) -> Int64Array:
    """Draw uniformly among the legal choices of each of K sub-actions: (count, K).

    Args:
        rng: numpy's Generator, or `numpy.random` itself.
        dims: numbers of choices of the sub-actions; A is their sum.
        action_masks: (count, A) bool; None: all are legal. A sub-action without a legal choice draws any choice.
    """
    keys = rng.random((count, sum(dims)))
    if action_masks is not None:
        keys[~action_masks] -= 1.0
    parts = np.split(keys, np.cumsum(dims)[:-1], axis=1)
    return np.stack([part.argmax(axis=1) for part in parts], axis=1)


NO_LEGAL_ACTION = "End the episode in such a state, offer a pass action, or use env.on_empty_mask=all_legal"


def load_into(target: NDArray[Any], arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Copy a checkpoint's array `name` into `target`.

    Raises:
        ConfigError: there is no such array, or it has another shape or dtype.
    """
    array = arrays.get(name)
    if array is None:
        raise ConfigError(f"the checkpoint has no array {name}")
    if array.shape != target.shape or array.dtype != target.dtype:
        raise ConfigError(
            f"{name} of the checkpoint is {array.dtype} {array.shape}, this run needs {target.dtype} {target.shape}"
        )
    target[...] = array


def flat_rows(observations: Any, keys: Iterable[str] = ()) -> Float32Array:  # (M, ...), or an array per key → (M, O)
    """Contiguous float32 rows. Parts of a Dict are flattened and joined, in the order of `keys` or of the Dict."""
    if not isinstance(observations, dict):
        rows: Float32Array = np.ascontiguousarray(observations, np.float32)
        return rows if rows.ndim == 2 else rows.reshape(len(rows), -1)
    parts = [np.asarray(observations[key]) for key in (keys or observations)]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1, dtype=np.float32, casting="unsafe")


class without_prefix(Mapping[str, NDArray[Any]]):  # noqa: N801 - reads as a function
    """The arrays named `prefix/NAME`, with NAME as the key. Arrays are read on access."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], prefix: str) -> None:
        self._arrays, self._start = arrays, f"{prefix}/"

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[self._start + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._start) for name in self._arrays if name.startswith(self._start))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_prefix(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """`arrays` with `prefix/` before each name."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


@dataclass(slots=True)
class Slots:
    """Preallocated arrays that vector envs write in place, once per vector step.

    Row i of `observations` and `action_masks` belongs to the state in which env i acts next. If its episode ended, that
    is the first state of the next episode, and `finished` has the end of the old episode. The next step overwrites
    every array, so readers must copy what they need for longer.
    """

    observations: Observations  # (N, ...) in the observation space's dtype, or one array per key
    actions: NDArray[Any]  # (N, ...) in the action space's dtype, for the next step
    rewards: Float32Array  # (N,)
    terminations: BoolArray  # (N,)
    truncations: BoolArray  # (N,)
    action_masks: BoolArray | None = None  # (N, A), None for an env without masks
    finished: list[FinishedEpisode] = field(default_factory=list)  # one for each env whose episode ended
    resets: BoolArray | None = None  # (N,) True where the step was no transition but only a reset, or `rests` was True
    rests: BoolArray | None = None  # (N,) True where the next step will be no transition; None: in no env

    @property
    def num_envs(self) -> int:
        return len(self.rewards)

    @property
    def transitions(self) -> int:
        """The number of transitions in this step."""
        return len(self.rewards) - (0 if self.resets is None else int(np.count_nonzero(self.resets)))
