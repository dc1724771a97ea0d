"""Which policy decides at an observation, and which parts of observations and actions belong to a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from torch import Tensor

from fasttrain.batch import Int64Array
from fasttrain.errors import ConfigError

NOBODY, SEVERAL = -1, -2  # used instead of a policy's number


class View(NamedTuple):
    """The parts of the game's observations and actions that one policy sees and chooses. None: all of them."""

    columns: Int64Array | None = None  # column indices of an observation
    actions: slice | None = None  # entries of an action
    masks: slice = slice(None)  # entries of an action mask
    seat: tuple[Any, Any] | None = None  # the policy's observation and action space, if the policies' spaces differ

    @property
    def is_whole(self) -> bool:
        return self.columns is None and self.actions is None

    def seen(self, observations: Any) -> Any:  # (n, D)
        """The columns of observations that the policy sees."""
        return observations if self.columns is None else np.take(observations, self.columns, axis=1)

    def placed(self, given: Any, space: spaces.Space[Any]) -> Tensor:
        """The policy's actions as actions of the game. Entries that the policy does not choose are 0."""
        actions: Tensor = torch.as_tensor(given)
        if self.actions is None:
            return actions
        kind = torch.float32 if isinstance(space, spaces.Box) else torch.int64
        placed = torch.zeros(len(actions), get_action_dim(space), dtype=kind, device=actions.device)
        placed[:, self.actions] = actions.reshape(len(actions), -1).to(kind)
        return placed


def view_of(seen: Sequence[int] | None, width: int, frames: int, goals: int, sets_goals: bool) -> View:
    """The parts of observations and actions that a policy sees and chooses.

    Args:
        seen: the columns of a frame that the policy sees; a frame has `width` columns. None: all columns.
        frames: how many frames are stacked.
        goals: number of goals. The last entry of an action chooses a goal. 0: the game has no goals.
        sets_goals: whether this policy chooses goals. Other policies choose the entries before the last.
    """
    columns = None if seen is None else np.add.outer(np.arange(frames) * width, np.array(seen, np.int64)).ravel()
    if not goals:
        return View(columns)
    return (
        View(columns, slice(-1, None), slice(-goals, None)) if sets_goals else View(columns, slice(-1), slice(-goals))
    )


def view_of_seats(seats: Sequence[tuple[Any, Any]], seen: Sequence[int] | None, what: str) -> View:
    """The view of a policy for `seats`: pairs (observation space, action space). Raises ConfigError: pairs differ."""
    (shown, actions), *others = seats
    if any(other != (shown, actions) for other in others):
        raise ConfigError(f"{what}: the seats for which it decides have different spaces; use one policy per seat")
    columns = np.array(range(shown.shape[0]) if seen is None else seen, np.int64)
    numbers = slice(actions.shape[0]) if isinstance(actions, spaces.Box) else None
    entries = slice(int(actions.n)) if isinstance(actions, spaces.Discrete) else slice(None)
    return View(columns, numbers, entries, (shown, actions))


class Viewed(VecEnvWrapper):
    """`venv` with the spaces that one policy sees. A model built with it takes only these spaces from it."""

    def __init__(self, venv: VecEnv, view: View) -> None:
        seen: Any
        actions: Any
        seen, actions = view.seat or (venv.observation_space, venv.action_space)
        if view.columns is not None:
            low, high = seen.low[view.columns], seen.high[view.columns]
            seen = spaces.Box(low, high, dtype=seen.dtype.type)
        chosen = view.actions if view.seat is None else None
        if chosen is not None and isinstance(actions, spaces.MultiDiscrete):
            sizes = actions.nvec[chosen]
            actions = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
        elif chosen is not None:  # actions of a Box space
            low, high = actions.low[chosen], actions.high[chosen]
            sets_goals = chosen.start is not None
            actions = spaces.Discrete(int(high[0]) + 1) if sets_goals else spaces.Box(low, high, dtype=np.float32)
        super().__init__(venv, seen, actions)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


class Owners:
    """Says which policy decides at an observation.

    Args:
        names: the names of the policies.
        columns: for each policy the columns of the observation that are 1 at its decisions. They are counted from the
            end, so that they lie in the newest of stacked frames. None: all decisions that no other policy takes.
        views: for each policy what it sees and chooses; empty: every policy sees and chooses everything.
    """

    def __init__(
        self, names: Sequence[str], columns: Sequence[Sequence[int] | None], views: Sequence[View] = ()
    ) -> None:
        self.names, self.columns = [*names], [None if own is None else [*own] for own in columns]
        self.views = [*views] or [View() for _ in names]

    def __call__(self, observations: Any) -> Int64Array:  # (..., D) → (...)
        """The number of the policy that decides, NOBODY or SEVERAL."""
        claims = np.zeros((*observations.shape[:-1], len(self.columns)), np.bool_)
        for number, own in enumerate(self.columns):
            if own is not None:
                claims[..., number] = (observations[..., own] > 0.5).any(axis=-1)
        if None in self.columns:
            claims[..., self.columns.index(None)] = ~claims.any(axis=-1)
        count = claims.sum(axis=-1)
        owners: Int64Array = np.where(count == 1, claims.argmax(axis=-1), np.where(count == 0, NOBODY, SEVERAL))
        return owners

    def rows(self, observations: Any) -> list[tuple[int, Any]]:
        """For each policy that decides in some rows of (n, D): its number, and the rows (a slice if they are all rows).

        Rows in which nobody decides (for example when an env only resets) are given to the first policy.
        """
        owners = np.maximum(self(observations), 0)
        found = [(number, rows) for number in range(len(self.names)) if len(rows := np.flatnonzero(owners == number))]
        return [(found[0][0], slice(None))] if len(found) == 1 else found

    def check(self, owners: Int64Array) -> None:
        """Raises ConfigError: a decision belongs to no policy, or to several."""
        if (owners < 0).any():
            how = "several" if (owners == SEVERAL).any() else "none"
            raise ConfigError(
                f"policies: a decision belongs to {how} of {', '.join(self.names)}; the phases of the `decides` "
                "settings must not overlap; with `decides: others` a policy takes all other decisions"
            )


def in_order(parts: list[tuple[int, Any]]) -> Any:
    """An index that sorts the concatenated rows of these parts into their original order."""
    return slice(None) if len(parts) == 1 else np.argsort(np.concatenate([rows for _, rows in parts]))
