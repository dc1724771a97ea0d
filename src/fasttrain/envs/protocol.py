"""What a native game offers to `fasttrain.vec.NativeVecEnv`: N games stepped in place by compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import Slots


class NativeGame(Protocol):
    """N independent games of one kind, stepped together, writing straight into the slots.

    Any further public method (`set_opponents(mix, indices=None)` say) is reachable through `VecEnv.env_method`.
    A game that can step on threads has an attribute `max_threads`, 1 as made; a run sets it to the machine's cores.
    A game that lists its kernels (`kernel_calls`, see `GameBatch`) has them compiled before training, shown by name.
    A two-sided game, where somebody outside may also decide for the opponent, is a `TwoSidedGame`.
    """

    num_envs: int
    observation_space: spaces.Box
    action_space: spaces.Discrete | spaces.MultiDiscrete  # actions are (N,) or (N, heads)
    final_observations: NDArray[np.float32]  # (N, O): row i valid where env i ended in the last step
    opponents_ns: int  # nanoseconds spent in opponents' turns since construction (part of the env step)

    def bind(self, slots: Slots) -> None:
        """Take the arrays to read actions from and to write everything else to."""

    def reset(self, indices: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        """Start a new game in each listed env and write its first observation and mask.

        An env whose seed is None continues its own random stream, or begins one from entropy if it has none.
        """

    def step(self) -> None:
        """Apply `slots.actions`, let opponents move until each learner must decide again, write all slots.

        Envs that end keep their last observation in `final_observations` and are reset in the same step (autoreset),
        going on with their own random stream.

        Raises:
            EnvError: an action is illegal; names the env, the action and the legal ones.
        """

    def episode_info(self, index: int) -> dict[str, Any]:
        """The end-of-episode info of env `index`, valid in the step in which it ended."""


class ResumableGame(NativeGame, Protocol):
    """A native game whose state can be written to a checkpoint and read back; without, a resumed run starts again."""

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything that decides how the games go on: views, not copies. What the game was made with stays out."""

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from there; of a game made with the same arguments, and bound. Slots are the caller's to fill.

        Raises:
            ConfigError: an array is missing, of another shape or dtype, or holds what no game can hold.
        """


class TwoSidedGame(NativeGame, Protocol):
    """A native game that can stop at the opponent's decisions too, for self-play.

    With the opponent "self" (`set_opponents("self")`, or as made) a step ends at the next decision of either side. The
    slots then hold the observation and the mask of the side that must decide, as the learner would see them in its
    place. Rewards are always the learner's, since the game's last decision of either side. A new game may begin with
    the opponent's decision.

    With several opponents a game may have `seats_to_decide` (N,), numbers from 1 on: each remembers what itself saw.
    """

    opponents_turn: NDArray[np.bool_]  # (N,): the side to decide is the opponent; written by reset and step

    def step_listed(self, indices: NDArray[np.int64]) -> None:
        """`step` for the listed games alone, with their rows of `slots.actions`; only their rows are written."""
