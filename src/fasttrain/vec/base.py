"""Vector envs that write each step into preallocated slots. Copies and infos for SB3 are built only on demand.

An algorithm sees its envs as a `SlotSource`. A `SlotVecEnv` is a SlotSource. `SlotAdapter` makes a SlotSource of any
other SB3 `VecEnv`: stock classes, wrappers, third-party classes. So algorithms have one code path. An env gets an
adapter unless its outermost class is a SlotVecEnv: so no wrapper is skipped, as in `VecNormalize(NativeVecEnv(...))`.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvStepReturn

from fasttrain.batch import NO_LEGAL_ACTION, BoolArray, FinishedEpisode, Int64Array, Observations, Slots
from fasttrain.envs.masks import FlatMasks
from fasttrain.envs.retrace import close_env
from fasttrain.errors import EnvError
from fasttrain.spec.infos import record_of, truth

MASK_METHOD = "action_masks"
ALL_LEGAL = "All count as legal there, as in sb3-contrib; env.on_empty_mask=raise makes this an error"


def copy_observations(observations: Observations) -> Observations:
    """Observations that the next step does not overwrite."""
    if isinstance(observations, dict):
        return {key: np.array(part) for key, part in observations.items()}
    return np.array(observations)


def stuck_envs(action_masks: BoolArray, dims: Sequence[int]) -> Int64Array:  # (N, A), (K,)
    """Indices of the envs in which some sub-action has no legal choice."""
    count, ones = len(action_masks), np.ones(max(dims), np.bool_)  # on (256, 86) masks `@` takes 3 µs, `any` 9 µs
    if len(set(dims)) == 1:
        return np.flatnonzero(~(action_masks.reshape(count, -1, dims[0]) @ ones).all(axis=1))
    ends = list(accumulate(dims))
    free = [action_masks[:, end - size : end] @ ones[:size] for end, size in zip(ends, dims, strict=True)]
    return np.flatnonzero(~np.logical_and.reduce(free))


def unblock_masks(action_masks: BoolArray, dims: Sequence[int]) -> BoolArray:  # (N, A), (K,)
    """Allow every choice of each sub-action that has no legal choice. Returns a copy if there is such a sub-action."""
    rows = stuck_envs(action_masks, dims)
    if not len(rows):
        return action_masks
    action_masks = action_masks.copy()
    for end, size in zip(accumulate(dims), dims, strict=True):
        part = action_masks[:, end - size : end]
        part[~part.any(axis=1)] = True
    return action_masks


class EmptyMasks:
    """Counts the masks in which some sub-action has no legal choice, and warns of the first such mask.

    Every choice of this sub-action then counts as legal, as in sb3-contrib. Many games have such a mask in their last
    state, before the step that ends the episode.

    Args:
        raises: raise an error instead of warning.
        warn: receives the warning.
    """

    def __init__(self, raises: bool = False, warn: Callable[[str], None] = warnings.warn) -> None:
        self.raises, self.warn, self.count, self.step = raises, warn, 0, 0

    def check(
        self,
        action_masks: BoolArray,  # (N, A) of the states that the next actions act on
        dims: Sequence[int],
        step: int | None = None,  # env step, for the message; None: that of the last check
        envs: Int64Array | None = None,  # (N,) env of each mask; None: the masks are those of all envs
        whose: str = "",
    ) -> None:
        """Check one mask for each of `envs`. Raises EnvError if a mask is empty and `self.raises` is set."""
        self.step = self.step if step is None else step
        rows = stuck_envs(action_masks, dims)
        if not len(rows):
            return
        indices = rows if envs is None else envs[rows]
        names = ", ".join(f"{i}{_stuck_heads(action_masks[row], dims)}" for i, row in zip(indices, rows, strict=True))
        what = f"no legal action{whose} in env {names} at step {self.step:,}: the action mask is False for every choice"
        if self.raises:
            raise EnvError(f"{what}. {NO_LEGAL_ACTION}")
        if not self.count:
            self.warn(f"{what}. {ALL_LEGAL}")
        self.count += len(rows)


def _stuck_heads(action_mask: BoolArray, dims: Sequence[int]) -> str:  # (A,), (K,)
    """Name the sub-actions without a legal choice; empty if the action has only one sub-action."""
    heads = [head for head, end in enumerate(accumulate(dims)) if not action_mask[end - dims[head] : end].any()]
    return f" (head {', '.join(map(str, heads))})" if len(dims) > 1 else ""


def empty_observations(space: spaces.Space[Any], num_envs: int) -> Observations:
    """Zeros (N, ...) in the space's dtype; a dict of such arrays for a Dict space."""
    if isinstance(space, spaces.Dict):
        return {key: np.zeros((num_envs, *(sub.shape or ())), sub.dtype) for key, sub in space.spaces.items()}
    return np.zeros((num_envs, *(space.shape or ())), space.dtype)


def empty_slots(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], num_envs: int, mask_width: int = 0
) -> Slots:
    """Zeroed slots for N envs. Masks (N, A) of width A allow every action; width 0 means no masks."""
    return Slots(
        observations=empty_observations(observation_space, num_envs),
        actions=np.zeros((num_envs, *(action_space.shape or ())), action_space.dtype),
        rewards=np.zeros(num_envs, np.float32),
        terminations=np.zeros(num_envs, np.bool_),
        truncations=np.zeros(num_envs, np.bool_),
        action_masks=np.ones((num_envs, mask_width), np.bool_) if mask_width else None,
    )


def episode_info(episode: FinishedEpisode, elapsed_s: float, keeps_records: bool = True) -> dict[str, Any]:
    """The info that SB3 expects in the step in which an episode ended.

    The entry `episode` has return, length and time. With `keeps_records=False` it is the record of the user's Monitor,
    which counts games, not lives. Else a Monitor's record is used only if it agrees, or if the episode was lost.
    """
    info = {key: value for key, value in episode.info.items() if key != "episode"}
    record, counted = record_of(episode.info), (episode.episode_return, episode.length)
    agrees = record is not None and np.allclose([record["r"], record["l"]], counted, 1e-5, 1e-5)
    if keeps_records and not (episode.lost or agrees):
        record = {"r": round(episode.episode_return, 6), "l": episode.length, "t": elapsed_s}
    if record is not None:
        info["episode"] = record
    info["terminal_observation"] = episode.final_observation
    info["TimeLimit.truncated"] = episode.truncated
    return info


class SlotSource(ABC):
    """N envs that write their steps into slots. Also counts the return and the length of each running episode."""

    num_envs: int
    slots: Slots
    reuses_arrays: bool  # True: the next step overwrites the arrays in `slots`, so readers copy what they keep
    # A method that collects in other processes: a rollout, or for DQN and SAC the actions of the next vector step, in
    # which the envs have stepped already. None: the envs step here.
    fill: Any = None

    @property
    @abstractmethod
    def masked(self) -> bool:
        """Whether the envs have action masks."""

    @abstractmethod
    def step_slots(self, actions: NDArray[Any]) -> None:
        """Step every env with its action, (N, ...). This fills all slots and `slots.finished`, and builds no infos."""

    @abstractmethod
    def read_masks(self) -> BoolArray | None:
        """Masks (N, A) of the states that the next actions act on; None without masks."""

    @abstractmethod
    def infos(self) -> list[dict[str, Any]]:
        """The last step's infos as SB3 callbacks expect them, one per env."""

    def count_episodes(self, num_envs: int) -> None:
        """Create the counters. To be called in the constructor."""
        self._returns = np.zeros(num_envs, np.float64)  # float64, because SB3's Monitor sums Python floats
        self._lengths: Int64Array = np.zeros(num_envs, np.int64)

    def begin_episodes(self, envs: BoolArray | Int64Array | slice | int | list[int] = slice(None)) -> None:
        """Set the counters of these envs to zero. `envs` is a mask, indices or a slice."""
        self._returns[envs] = 0.0
        self._lengths[envs] = 0

    def clear_slots(self) -> None:
        """Clear rewards, ends and episode counters, as after a reset of all envs."""
        slots = self.slots
        slots.rewards[:] = 0.0
        slots.terminations[:] = slots.truncations[:] = False
        slots.finished = []
        self.begin_episodes()

    def count_step(self) -> Int64Array:
        """Count one step of all envs. Returns the indices (M,) of the envs whose episode ended in this step."""
        slots = self.slots
        self._returns += slots.rewards
        self._lengths += 1
        return np.flatnonzero(slots.terminations | slots.truncations)

    def end_episode(
        self, index: int, final_observation: object, info: dict[str, Any], lost: bool = False
    ) -> FinishedEpisode:
        """Return the record of an episode that ended in the last step, and reset the counters of its env."""
        slots = self.slots
        counts = float(self._returns[index]), int(self._lengths[index])
        truncated = bool(slots.truncations[index] and not slots.terminations[index])
        episode = FinishedEpisode(index, *counts, final_observation, truncated, info, lost)
        self.begin_episodes(index)
        return episode


class SlotVecEnv(SlotSource, VecEnv):
    """Base of the vector envs that write slots. A subclass allocates `slots`, then calls this constructor.

    Fast code reads the slots after `step_slots`. Other SB3 code uses `step`, `reset` and `env_method`, which return
    copies, as SB3's own vector envs do.
    """

    reuses_arrays = True
    keeps_records = True  # see `episode_info`
    elsewhere = ""  # for messages: where the envs are, if no method of theirs can be called

    def __init__(self, num_envs: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.count_episodes(num_envs)
        self.num_envs = num_envs  # needed by `get_attr("render_mode")` in SB3's constructor
        super().__init__(num_envs, observation_space, action_space)
        self._started_at = time.monotonic()  # not the wall clock, which can be changed
        self._pending_actions: NDArray[Any] | None = None

    @property
    def masked(self) -> bool:
        return self.slots.action_masks is not None

    def read_masks(self) -> BoolArray | None:
        return self.slots.action_masks

    def infos(self) -> list[dict[str, Any]]:
        """One info per env. Envs whose episode goes on share one empty dict."""
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        if self.slots.finished:
            self.fill_ends(infos, self.slots.finished)
        return infos

    def step_async(self, actions: NDArray[Any]) -> None:
        self._pending_actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        if self._pending_actions is None:
            raise RuntimeError("step_wait() without step_async(): call step(actions), or step_async(actions) first")
        actions, self._pending_actions = self._pending_actions, None
        self.step_slots(actions)
        slots = self.slots
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.fill_ends(infos, slots.finished)
        dones = slots.terminations | slots.truncations
        return copy_observations(slots.observations), slots.rewards.copy(), dones, infos

    def has_attr(self, attr_name: str) -> bool:
        if attr_name == MASK_METHOD:
            return self.masked
        return super().has_attr(attr_name)

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[Any]:
        """Call a method of the envs. `action_masks` is copied from the slots, without a call into an env."""
        masks = self.slots.action_masks
        if method_name == MASK_METHOD and masks is not None:
            return list(masks.copy() if indices is None else masks[self.env_indices(indices)])
        return self.call_envs(method_name, method_args, method_kwargs, indices)

    def groups(self) -> Any:
        """`groups.Groups` of rows that can step independently; None if all envs step together."""
        return None

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """`env_method` for every method but `action_masks`. Raises EnvError: the envs are not Python objects here."""
        raise EnvError(f"{self.elsewhere}: their method {name!r} cannot be called")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":  # SB3's constructor asks every env for it
            return [None] * len(self.env_indices(indices))
        raise AttributeError(f"{self.elsewhere}: their attribute {attr_name!r} cannot be read")

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        raise EnvError(f"{self.elsewhere}: their attribute {attr_name!r} cannot be set; give it as env.kwargs")

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return [False] * len(self.env_indices(indices))

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        return [None] * self.num_envs

    def env_indices(self, indices: VecEnvIndices) -> list[int]:
        """SB3's env indices (None, int or iterable) as a list. Raises IndexError if an index is out of range."""
        if indices is None:
            return list(range(self.num_envs))
        chosen = [int(i) for i in indices] if isinstance(indices, Iterable) else [int(indices)]
        for index in chosen:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"env index {index} is out of range: there are {self.num_envs} envs")
        return [index % self.num_envs for index in chosen]

    def fill_ends(self, infos: list[dict[str, Any]], finished: Iterable[FinishedEpisode]) -> None:
        """Write the infos of the episodes that ended."""
        elapsed_s = round(time.monotonic() - self._started_at, 6)
        for episode in finished:
            infos[episode.env_index] = episode_info(episode, elapsed_s, self.keeps_records)


def slots_of(env: VecEnv) -> SlotSource:
    """`env` itself if it writes slots, else an adapter around it."""
    # The type decides: a VecEnvWrapper forwards unknown attributes to the env inside, so `hasattr(env, "step_slots")`
    # would be true for a wrapper, and the wrapper would be bypassed.
    return env if isinstance(env, SlotVecEnv) else SlotAdapter(env)


def close_envs(env: VecEnv) -> str:
    """Close all envs. Returns the error of an env's own `close()` as text, or an empty string."""
    failure, inner = close_env(env), env.unwrapped
    return failure or getattr(getattr(inner, "inner", inner), "close_failed", "")


def resets_and_rests(env: VecEnv) -> tuple[BoolArray | None, BoolArray | None]:
    """Arrays `resets` and `rests` (N,) bool of the innermost vector env's slots; (None, None) if it has no slots."""
    inner = env.unwrapped
    return (inner.slots.resets, inner.slots.rests) if isinstance(inner, SlotVecEnv) else (None, None)


def lost_in(env: VecEnv) -> list[int]:
    """Envs whose episode was lost in the last step, because they were replaced."""
    inner = env.unwrapped
    if isinstance(inner, SlotVecEnv):
        return [episode.env_index for episode in inner.slots.finished if episode.lost]
    return getattr(inner, "lost_envs", [])


class SlotAdapter(SlotSource):
    """Steps any SB3 `VecEnv` and puts what it returns into slots. `infos()` returns the infos of that env unchanged."""

    reuses_arrays = False

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.fill = env.unwrapped.fill if isinstance(env.unwrapped, SlotVecEnv) else None
        self._masked: bool | None = None  # read at the first use, because reading calls every worker
        self._flat_masks = FlatMasks(0)  # only its method `legal` is used, for masks of any width
        self._infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.slots = empty_slots(env.observation_space, env.action_space, self.num_envs)
        self.count_episodes(self.num_envs)

    @property
    def masked(self) -> bool:
        if self._masked is None:
            self._masked = self.env.has_attr(MASK_METHOD)
        return self._masked

    def reset(self) -> Observations:
        self.begin_episodes()
        self.slots.finished = []
        self.slots.observations = cast(Observations, self.env.reset())
        return self.slots.observations

    def read_masks(self) -> BoolArray | None:
        """Call `action_masks` of every env, right before the action is chosen, as sb3-contrib does."""
        if not self.masked:
            return None
        rows = self.env.env_method(MASK_METHOD)
        self.slots.action_masks = self._flat_masks.legal(np.stack([np.asarray(row).reshape(-1) for row in rows]))
        return self.slots.action_masks

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots = self.slots
        observations, rewards, dones, self._infos = self.env.step(actions)
        if len(rewards) != self.num_envs:
            raise EnvError(f"{type(self.env).__name__}.step returned {len(rewards)} rewards for {self.num_envs} envs")
        slots.actions = actions
        slots.observations = cast(Observations, observations)
        slots.rewards = np.asarray(rewards, np.float32)
        self._returns += rewards
        self._lengths += 1
        slots.terminations = np.array(dones, np.bool_)
        slots.truncations = np.zeros(self.num_envs, np.bool_)
        ended = slots.terminations.nonzero()[0]  # a third of np.flatnonzero's time
        lost = lost_in(self.env) if len(ended) else []
        slots.finished = [self._finish(index, index in lost) for index in ended.tolist()]
        slots.resets, slots.rests = resets_and_rests(self.env)

    def infos(self) -> list[dict[str, Any]]:
        return self._infos

    def _finish(self, index: int, lost: bool) -> FinishedEpisode:
        info = self._infos[index]
        truncated = truth(info.get("TimeLimit.truncated")) or False
        self.slots.truncations[index] = truncated
        self.slots.terminations[index] = not truncated
        record = record_of(info) or {}  # a Monitor below VecNormalize has the return before normalization
        self._returns[index] = record.get("r", self._returns[index])
        self._lengths[index] = record.get("l", self._lengths[index])
        return self.end_episode(index, info.get("terminal_observation"), info, lost)
