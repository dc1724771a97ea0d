"""The interface of a native game for `fasttrain.vec.NativeVecEnv`: N games that compiled code steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import Slots


class NativeGame(Protocol):
    """N independent games of one kind, which step together and write into the slots.

    `VecEnv.env_method` can call all other public methods of the game, for example `set_opponents(mix, indices=None)`. A
    game that can use threads has an attribute `max_threads`, at first 1; a run sets it to the number of cores. If a
    game lists its compiled functions (`kernel_calls`, see `GameBatch`), a run compiles them before training and shows
    their names. A game for self-play is a `TwoSidedGame`.
    """

    num_envs: int
    observation_space: spaces.Box
    action_space: spaces.Discrete | spaces.MultiDiscrete  # actions are (N,) or (N, heads)
    final_observations: NDArray[np.float32]  # (N, O): row i is valid if env i ended in the last step
    opponents_ns: int  # ns of the opponents' turns since construction; also a part of the steps' time

    def bind(self, slots: Slots) -> None:
        """Receive the arrays: the game reads its actions from them and writes all other arrays."""

    def reset(self, indices: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        """Start a new game in each listed env and write its first observation and mask.

        An env whose seed is None keeps its random generator. If it has none, it gets one with a random seed.
        """

    def step(self) -> None:
        """Apply `slots.actions`, let opponents act until each learner must act again, and write all slots.

        Envs that end write their last observation to `final_observations` and are reset in the same step (autoreset).
        They keep their random generator.

        Raises:
            EnvError: an action is illegal. The message names the env, the action and the legal actions.
        """

    def episode_info(self, index: int) -> dict[str, Any]:
        """The info at the end of an episode of env `index`. It is called right after the step in which it ended."""


class ResumableGame(NativeGame, Protocol):
    """A native game whose state can be saved in checkpoints. With any other game a resumed run begins new episodes."""

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """All state that determines how the games go on, as views. The constructor's arguments are not a part of it."""

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the state into a game with the same constructor arguments. The caller loads the slots.

        Raises ConfigError if an array is missing, has another shape or dtype, or has values that no game can have.
        """


class TwoSidedGame(NativeGame, Protocol):
    """A native game for self-play: it can also stop at the decisions of the opponent.

    With the opponent "self" (`set_opponents("self")`) a step ends at the next decision of either side. The slots then
    hold the observation and the mask of the side that must act, as if this side were the learner. Rewards are always
    the learner's, counted since the last decision of either side. A new game may begin with a decision of the opponent.

    A game with several opponents may have `seats_to_decide` (N,), the number of the opponent that acts, from 1.
    """

    opponents_turn: NDArray[np.bool_]  # (N,): the opponent must act; written by reset and step

    def step_listed(self, indices: NDArray[np.int64]) -> None:
        """`step` for these games only, with their rows of `slots.actions`. Only rows of these games are written."""
