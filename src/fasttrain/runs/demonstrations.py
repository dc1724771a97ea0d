"""Recorded decisions of whole episodes, in an .npz file with these arrays of M rows:

observations    (M, …), or observations/KEY for each key of a Dict space: as the policy sees them
actions         (M, …)
action_masks    (M, A) bool, only for environments with masks
episode_starts  (M,) bool: true in the first row of each episode
rewards         (M,): the reward for the action of the row
truncations     (M,) bool: true in the last row of an episode that a limit ended; may be missing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import BoolArray, Float32Array, each_array, with_prefix
from fasttrain.errors import ConfigError
from fasttrain.saving.archives import read_arrays
from fasttrain.saving.files import into_place
from fasttrain.spec.infos import truth
from fasttrain.vec.base import copy_observations, resets_and_rests

MOST_BYTES = 64 << 30
UNKNOWN = 0.05  # largest discount at which the unknown rewards after a truncation are ignored


class Demonstrations(NamedTuple):
    """M decisions in order: the rows of an episode stand together. The module's docstring describes the arrays."""

    observations: Any  # (M, …), or an array per key
    actions: NDArray[Any]
    action_masks: BoolArray | None
    episode_starts: BoolArray
    rewards: Float32Array
    truncations: BoolArray

    def returns(self, gamma: float) -> Float32Array:
        """(M,) discounted sums of the rewards from each decision to the end of its episode. NaN: the episode was
        truncated, and the missing rewards after the truncation have a discount above `UNKNOWN`."""
        found, total, unknown = np.zeros(len(self.rewards), np.float32), 0.0, 0.0
        ends = np.append(self.episode_starts[1:], True)
        for row in range(len(found) - 1, -1, -1):
            total = float(self.rewards[row]) + (0.0 if ends[row] else gamma * total)
            unknown = gamma * (float(self.truncations[row]) if ends[row] else unknown)
            found[row] = total if unknown <= UNKNOWN else np.nan
        return found

    def rows(self, chosen: NDArray[Any]) -> Demonstrations:
        """The rows `chosen`, indices or a bool array."""
        masks = None if self.action_masks is None else self.action_masks[chosen]
        observations = each_array(lambda part: part[chosen], self.observations)
        return Demonstrations(
            observations, self.actions[chosen], masks, self.episode_starts[chosen], self.rewards[chosen],
            self.truncations[chosen],
        )  # fmt: skip

    def save(self, file: Path) -> None:
        """Write the decisions as an .npz file."""
        seen = self.observations
        named = with_prefix("observations", seen) if isinstance(seen, Mapping) else {"observations": seen}
        masks = {} if self.action_masks is None else {"action_masks": self.action_masks}
        rest = {name: getattr(self, name) for name in ("actions", "episode_starts", "rewards", "truncations")}
        with into_place(file) as draft, draft.open("wb") as stream:
            np.savez(stream, **{**named, **masks, **rest})


def read_demonstrations(
    file: Path, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> Demonstrations:
    """Read a file of decisions in an environment with these spaces.

    Raises:
        ConfigError: an array is missing or does not fit its space, or an action is illegal under its mask.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file of decisions")
    arrays = read_arrays(file, MOST_BYTES)
    if missing := [name for name in ("actions", "episode_starts", "rewards") if name not in arrays]:
        raise ConfigError(f"{file}: there is no array {missing[0]} in it")
    if odd := next((name for name, array in arrays.items() if array.dtype.kind not in "biuf" or not array.ndim), None):
        raise ConfigError(f"{file}: {odd} must hold a number for each decision, it is {arrays[odd].dtype} of shape "
                          f"{arrays[odd].shape}")  # fmt: skip
    seen: Any = arrays.get("observations")
    if isinstance(observation_space, spaces.Dict):
        seen = {key: arrays.get(f"observations/{key}") for key in observation_space.spaces}
    actions, count = arrays["actions"], len(arrays["actions"])
    parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
    for key, space in parts.items():
        name, part = f"observations{f'/{key}' if key else ''}", seen[key] if key else seen
        if part is None or part.shape != (count, *(space.shape or ())):
            found = "missing" if part is None else f"of shape {part.shape}"
            raise ConfigError(f"{file}: {name} is {found}; this environment needs ({count:,}, …) of {space}")
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise ConfigError(f"{file}: {name} is not finite in row {_first(~np.isfinite(part)):,}")
    masks = arrays.get("action_masks")
    starts, rewards = arrays["episode_starts"].astype(np.bool_), arrays["rewards"].astype(np.float32)
    if not count or starts.shape != (count,) or rewards.shape != (count,) or not np.isfinite(rewards).all():
        raise ConfigError(f"{file}: episode_starts and rewards need a finite value for each of the {count:,} actions")
    starts[0] = True
    check_actions(str(file), actions, masks, action_space)
    cuts = arrays.get("truncations", np.zeros(count, np.bool_))
    if cuts.shape != (count,):
        raise ConfigError(f"{file}: truncations have shape {cuts.shape}, expected ({count:,},)")
    legal = None if masks is None else masks.astype(np.bool_)
    return Demonstrations(seen, actions, legal, starts, rewards, cuts.astype(np.bool_))


def _first(wrong: NDArray[Any]) -> int:
    """The index of the first row with a true entry."""
    return int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])


def check_actions(source: str, actions: NDArray[Any], masks: NDArray[Any] | None, space: spaces.Space[Any]) -> None:
    """Raises ConfigError: an action is not in the space, or illegal under its mask. `source` begins the message."""
    if actions.shape[1:] != (space.shape or ()):
        raise ConfigError(f"{source}: actions have shape {actions.shape}, this environment takes {space}")
    if isinstance(space, spaces.Box):
        if not np.isfinite(actions).all():
            raise ConfigError(f"{source}: the action of row {_first(~np.isfinite(actions)):,} is not finite")
        return
    dims = np.array(action_dims(space))
    chosen = actions.reshape(len(actions), -1)
    wrong = (chosen < 0) | (chosen >= dims)
    if actions.dtype.kind not in "iu" or wrong.any():
        raise ConfigError(f"{source}: the action of row {_first(wrong) if wrong.any() else 0:,} is not in {space}")
    if masks is None:
        return
    if masks.shape != (len(actions), dims.sum()):
        raise ConfigError(f"{source}: action_masks have shape {masks.shape}, expected ({len(actions):,}, {dims.sum()})")
    begins = np.array([0, *accumulate(dims.tolist())][:-1])
    illegal = ~np.take_along_axis(masks.astype(np.bool_), chosen + begins, axis=1)
    if illegal.any():
        row = _first(illegal)
        raise ConfigError(f"{source}: action {actions[row].tolist()} of row {row:,} is illegal under its mask")


@dataclass(slots=True)
class Decision:
    """One recorded decision of one environment."""

    observation: Any
    action: NDArray[Any]
    action_mask: BoolArray | None
    begins: bool  # whether this decision is the first of its episode
    reward: float = 0.0
    truncated: bool = False  # whether a limit ended the episode after this decision


def stacked(decisions: Sequence[Decision], masked: bool) -> Demonstrations:
    """The decisions as arrays."""
    return Demonstrations(
        each_array(lambda *parts: np.stack(parts), *[each.observation for each in decisions]),
        np.stack([each.action for each in decisions]),
        np.stack([each.action_mask for each in decisions]) if masked else None,  # type: ignore[misc]
        np.array([each.begins for each in decisions], np.bool_),
        np.array([each.reward for each in decisions], np.float32),
        np.array([each.truncated for each in decisions], np.bool_),
    )


class Player(Protocol):
    """Chooses actions in N environments for `record`: a policy, a bot or a class of the user."""

    def act(self, observations: Any, action_masks: BoolArray | None, envs: NDArray[np.int64]) -> NDArray[Any]:
        """Return actions (N, …) for observations (N, …) and masks (N, A) of the environments `envs` (N,)."""


def record(
    env: VecEnv, player: Player, episodes: int, tell: Callable[[int, int], object] = lambda done, steps: None
) -> Demonstrations:
    """Let a player play about `episodes` whole episodes, and return its decisions."""
    count, masked = env.num_envs, env.has_attr("action_masks")
    everyone, running = np.arange(count), [list[Decision]() for _ in range(count)]
    quota = np.array([(episodes + index) // count for index in range(count)])
    kept: list[Decision] = []
    observations: Any = env.reset()
    observations = copy_observations(observations)
    done_episodes = steps = 0
    while quota.any():
        masks = np.stack(env.env_method("action_masks")) if masked else None
        actions = np.asarray(player.act(observations, masks, everyone))
        if actions.shape != (expected := (count, *(env.action_space.shape or ()))):
            raise ConfigError(f"{type(player).__name__}.act returned actions of shape {actions.shape}, not {expected}")
        seen = observations
        observations, rewards, dones, infos = env.step(actions)
        observations, late = copy_observations(observations), resets_and_rests(env)[0]
        steps += count
        for row in np.flatnonzero(quota > 0).tolist():
            if late is None or not late[row]:
                mask = None if masks is None else masks[row].copy()
                seen_here = each_array(lambda part, row=row: part[row], seen)
                begins, gain = not running[row], float(rewards[row])
                running[row].append(Decision(seen_here, np.array(actions[row]), mask, begins, gain))
            if dones[row]:
                for last in running[row][-1:]:
                    last.truncated = bool(truth(infos[row].get("TimeLimit.truncated")))
                if "lost" not in infos[row]:
                    kept += running[row]
                    quota[row] -= 1
                    done_episodes += 1
                running[row] = []
        tell(done_episodes, steps)
    return stacked(kept, masked)
