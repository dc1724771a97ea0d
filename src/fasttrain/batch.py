"""Batch types that the rooms pass to each other, and the shape legend used in every signature.

Shapes: N envs, T steps of a rollout, B rows of a minibatch, A actions (width of the mask), O observation entries.
Words: True in an action mask means legal. A termination ends the episode by the rules, a truncation by a limit.
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
Records = NDArray[np.void]  # states of games, of a dtype whose fields have names
OPPONENTS_TURN = "opponents_turn"  # of a two-sided env: its property, and a key in its infos
LAST_MASKS = "terminal_action_masks"  # in the info of a truncated step: (A,) bool, legal in the last state


class Record(Protocol):
    """One of `Records`, as compiled code sees it."""

    def __getattr__(self, field: str) -> Any: ...

    def __setattr__(self, field: str, value: object) -> None: ...


class FinishedEpisode(NamedTuple):
    """One episode that ended in the last vector step."""

    env_index: int
    episode_return: float  # undiscounted sum of rewards
    length: int  # env steps
    final_observation: Any  # observation before the autoreset; a dict for Dict spaces
    truncated: bool  # True only if the episode was cut and did not also terminate
    info: dict[str, Any]  # the last step's info of that env
    lost: bool = False  # cut by a fault of env or worker, not by a rule: no data about the game


class QBatches(NamedTuple):
    """U minibatches of B rows out of M stored transitions, as kernels learn from them. What is not there is empty."""

    observations: Float32Array  # (M, O)
    next_observations: Float32Array  # (L, O), may be the same array
    actions: Int64Array  # (M, K), K sub-actions; 1 of a Discrete action
    rows: Int64Array  # (U, B) of `observations` and `actions`
    next_rows: Int64Array  # (U, B) of `next_observations`
    rewards: Float32Array  # (U, B) discounted sums over the steps in between
    discounts: Float32Array  # (U, B) gamma to the number of these steps; (0, 0): the algorithm's gamma, as in stock
    dones: Float32Array  # (U, B) 1 where the episode ended by the rules
    next_masks: BoolArray  # (U, B, A) True = legal in the next observations; (0, 0, 0): all are
    weights: Float32Array  # (U, B) of the rows' losses in prioritized replay; (0, 0): ones


def each_array(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """`function(array, *arrays)` of an array, or of each one in a dict or tuple; as such a dict or tuple.

    Args:
        value: an array, None (which stays None), or a dict or tuple of such values.
        others: of the same form; the arrays in the same place in them are the further arguments.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: each_array(function, part, *(other[key] for other in others)) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [each_array(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return function(value, *others)


def select_rows(arrays: Any, rows: Int64Array | slice | int) -> Any:
    """These rows of arrays (N, ...), of each as in `each_array`: copied if `rows` are indices (M,), else views."""
    return each_array(lambda part: part[rows], arrays)


def draw_choices(rng: Any, dims: Sequence[int], count: int, action_masks: BoolArray | None) -> Int64Array:
    """Uniform over the legal choices of each of K sub-actions, (count, K).

    Args:
        rng: numpy's Generator, or `numpy.random` itself.
        dims: choices of each sub-action, A their sum.
        action_masks: (count, A) bool; None: all are legal, as they are where a sub-action has no legal choice.
    """
    keys = rng.random((count, sum(dims)))
    if action_masks is not None:
        keys[~action_masks] -= 1.0
    parts = np.split(keys, np.cumsum(dims)[:-1], axis=1)
    return np.stack([part.argmax(axis=1) for part in parts], axis=1)


NO_LEGAL_ACTION = "End the episode in such a state, offer a pass action, or use env.on_empty_mask=all_legal"


def load_into(target: NDArray[Any], arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """target[...] = arrays[name], an array of a checkpoint.

    Raises:
        ConfigError: there is none of that name, or it is of another shape or dtype.
    """
    given = arrays.get(name)
    if given is None:
        raise ConfigError(f"the checkpoint has no array {name}")
    if given.shape != target.shape or given.dtype != target.dtype:
        raise ConfigError(
            f"{name} of the checkpoint is {given.dtype} {given.shape}, this run needs {target.dtype} {target.shape}"
        )
    target[...] = given


def joined(observations: Any, keys: Iterable[str] = ()) -> Float32Array:  # (M, ...), or an array per key → (M, O)
    """Rows of float32, contiguous; the parts of a Dict flat and side by side in the order of `keys`, else its own."""
    if not isinstance(observations, dict):
        rows: Float32Array = np.ascontiguousarray(observations, np.float32)
        return rows if rows.ndim == 2 else rows.reshape(len(rows), -1)
    parts = [np.asarray(observations[key]) for key in (keys or observations)]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], 1, dtype=np.float32, casting="unsafe")


class inside(Mapping[str, NDArray[Any]]):  # noqa: N801 - reads as a function
    """The arrays named `prefix/…`, without that prefix; none is read from its file before it is asked for."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], prefix: str) -> None:
        self._arrays, self._start = arrays, f"{prefix}/"

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[self._start + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._start) for name in self._arrays if name.startswith(self._start))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same arrays as `prefix/…`."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


@dataclass(slots=True)
class Slots:
    """Preallocated arrays that an env batch writes in place, once per vector step.

    After a step with autoreset, row i of `observations` and `action_masks` belongs to the state the next action acts
    on; if env i ended, that is the first state of its next episode and `finished` holds what was before.
    Readers must copy what they keep: the next step overwrites every array.
    """

    observations: Observations  # (N, ...) in the observation space's dtype, or one array per key
    actions: NDArray[Any]  # (N, ...) in the action space's dtype: what the next step applies
    rewards: Float32Array  # (N,)
    terminations: BoolArray  # (N,)
    truncations: BoolArray  # (N,)
    action_masks: BoolArray | None = None  # (N, A), None for an env without masks
    finished: list[FinishedEpisode] = field(default_factory=list)  # sparse: only the envs that ended
    resets: BoolArray | None = None  # (N,) where the step was no transition: it began an episode, or the row rested
    rests: BoolArray | None = None  # (N,) where the next step will be none; None: nowhere

    @property
    def num_envs(self) -> int:
        return len(self.rewards)

    @property
    def transitions(self) -> int:
        """How many the step brought: one per env that did not only reset."""
        return len(self.rewards) - (0 if self.resets is None else int(np.count_nonzero(self.resets)))
