"""Batch types that the rooms pass to each other, and the shape legend used in every signature.

Shapes: N envs, T steps of a rollout, B rows of a minibatch, A actions (width of the mask), O observation entries.
Words: True in an action mask means legal. A termination ends the episode by the rules, a truncation by a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Observations = NDArray[Any] | dict[str, NDArray[Any]]
OPPONENTS_TURN = "opponents_turn"  # of a two-sided env: its property, and a key in its infos
LAST_MASKS = "terminal_action_masks"  # in the info of a truncated step: (A,) bool, legal in the last state


class FinishedEpisode(NamedTuple):
    """One episode that ended in the last vector step."""

    env_index: int
    episode_return: float  # undiscounted sum of rewards
    length: int  # env steps
    final_observation: Any  # observation before the autoreset; a dict for Dict spaces
    truncated: bool  # True only if the episode was cut and did not also terminate
    info: dict[str, Any]  # the last step's info of that env
    lost: bool = False  # cut by a fault of env or worker, not by a rule: no data about the game


def select_rows(observations: Observations, rows: Int64Array) -> Any:
    """These rows (M,) of observations (N, ...), or of each part of a dict: (M, ...), copied."""
    if isinstance(observations, dict):
        return {key: part[rows] for key, part in observations.items()}
    return observations[rows]


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

    @property
    def num_envs(self) -> int:
        return len(self.rewards)
