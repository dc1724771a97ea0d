"""Vector envs whose steps land in preallocated slots; SB3's copies and infos are built only on demand.

`SlotSource` is all that an algorithm sees of its envs. A `SlotVecEnv` is one by itself; any other SB3 `VecEnv` (stock
classes, wrappers, third parties) becomes one through `SlotAdapter`, so that algorithms have one code path. What a
wrapper does (normalise, stack frames) stays in force, because the outermost env decides:
`VecNormalize(NativeVecEnv(...))` is adapted like a stock env, never bypassed.
"""

from __future__ import annotations

import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvStepReturn

from fasttrain.batch import NO_LEGAL_ACTION, BoolArray, FinishedEpisode, Int64Array, Observations, Slots
from fasttrain.envs.masks import FlatMasks
from fasttrain.envs.retrace import closed
from fasttrain.errors import EnvError
from fasttrain.spec.infos import record_of, truth

MASK_METHOD = "action_masks"


class SlotSource(Protocol):
    """N envs that step into slots."""

    num_envs: int
    slots: Slots
    reuses_arrays: bool  # True: the next step overwrites the arrays in `slots`, so readers copy what they keep

    @property
    def masked(self) -> bool:
        """Whether the envs have action masks."""

    def step_slots(self, actions: NDArray[Any]) -> None:
        """Apply one action per env, (N, ...), and fill the slots."""

    def read_masks(self) -> BoolArray | None:
        """Masks (N, A) of the states the next actions act on; None without masks."""

    def infos(self) -> list[dict[str, Any]]:
        """The last step's infos as SB3 callbacks expect them, one per env."""


def copy_observations(observations: Observations) -> Observations:
    """Observations that the next step does not overwrite."""
    if isinstance(observations, dict):
        return {key: np.array(part) for key, part in observations.items()}
    return np.array(observations)


def stuck_envs(action_masks: BoolArray, dims: Sequence[int]) -> Int64Array:  # (N, A), (K,)
    """Envs in which some sub-action has no legal choice. A product of booleans: 3 µs for 256 × 86, `any` takes 9."""
    count, ones = len(action_masks), np.ones(max(dims), np.bool_)
    if len(set(dims)) == 1:
        return np.flatnonzero(~(action_masks.reshape(count, -1, dims[0]) @ ones).all(axis=1))
    ends = list(accumulate(dims))
    free = [action_masks[:, end - size : end] @ ones[:size] for end, size in zip(ends, dims, strict=True)]
    return np.flatnonzero(~np.logical_and.reduce(free))


def opened(action_masks: BoolArray, dims: Sequence[int]) -> BoolArray:  # (N, A), (K,)
    """The masks, in which all choices are legal of a sub-action that had no legal one: a copy where there was such."""
    rows = stuck_envs(action_masks, dims)
    if not len(rows):
        return action_masks
    action_masks = action_masks.copy()
    for end, size in zip(accumulate(dims), dims, strict=True):
        part = action_masks[:, end - size : end]
        part[~part.any(axis=1)] = True
    return action_masks


class EmptyMasks:
    """Counts the masks that leave a (sub-)action without a legal choice, and tells of the first.

    Any choice counts as legal there, as in sb3-contrib. Many games have such masks where they are over and the step
    that ends the episode is still to come.

    Args:
        raises: they are an error instead.
        say: tells a person.
    """

    def __init__(self, raises: bool = False, say: Callable[[str], None] = warnings.warn) -> None:
        self.raises, self.say, self.count, self.step = raises, say, 0, 0

    def look(
        self,
        action_masks: BoolArray,  # (N, A) of the states that are acted on
        dims: Sequence[int],
        step: int | None = None,  # env step; None: that of the last look
        envs: Int64Array | None = None,  # (N,); None: all
        whose: str = "",
    ) -> None:
        """Look at the masks of one decision in each of some envs. Raises EnvError: some allow nothing, and `raises`."""
        self.step = self.step if step is None else step
        rows = stuck_envs(action_masks, dims)
        if not len(rows):
            return
        of = rows if envs is None else envs[rows]
        named = ", ".join(f"{env}{_head(action_masks[row], dims)}" for env, row in zip(of, rows, strict=True))
        what = f"no legal action{whose} in env {named} at step {self.step:,}: the action mask is False for every choice"
        if self.raises:
            raise EnvError(f"{what} there. {NO_LEGAL_ACTION}")
        if not self.count:
            self.say(f"{what}; all count as legal there, as in sb3-contrib (env.on_empty_mask=raise: an error)")
        self.count += len(rows)


def _head(action_mask: BoolArray, dims: Sequence[int]) -> str:  # (A,), (K,)
    """Which sub-action of several has no legal choice."""
    heads = [head for head, end in enumerate(accumulate(dims)) if not action_mask[end - dims[head] : end].any()]
    return f" (head {', '.join(map(str, heads))})" if len(dims) > 1 else ""


def empty_observations(space: spaces.Space[Any], num_envs: int) -> Observations:
    """Zeros (N, ...) in the space's dtype, or one such array per key of a Dict space."""
    if isinstance(space, spaces.Dict):
        return {key: np.zeros((num_envs, *(sub.shape or ())), sub.dtype) for key, sub in space.spaces.items()}
    return np.zeros((num_envs, *(space.shape or ())), space.dtype)


def empty_slots(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], num_envs: int, mask_width: int = 0
) -> Slots:
    """Zeroed slots for N envs; with a width A of masks everything is legal in them, without there are none."""
    return Slots(
        observations=empty_observations(observation_space, num_envs),
        actions=np.zeros((num_envs, *(action_space.shape or ())), action_space.dtype),
        rewards=np.zeros(num_envs, np.float32),
        terminations=np.zeros(num_envs, np.bool_),
        truncations=np.zeros(num_envs, np.bool_),
        action_masks=np.ones((num_envs, mask_width), np.bool_) if mask_width else None,
    )


def episode_info(episode: FinishedEpisode, elapsed_s: float, keeps_records: bool = True) -> dict[str, Any]:
    """The info SB3 expects in the step in which an episode ended. `episode` is its record, as Monitor has it; that of a
    Monitor in the env stays as it is.

    Args:
        keeps_records: False where a record of the env's own is the only one, because a life is no game.
    """
    info = {key: value for key, value in episode.info.items() if key != "episode"}
    told, counted = record_of(episode.info), (episode.episode_return, episode.length)
    exact = told is not None and np.allclose([told["r"], told["l"]], counted, 1e-5, 1e-5)
    if keeps_records and not (episode.lost or exact):
        told = {"r": round(episode.episode_return, 6), "l": episode.length, "t": elapsed_s}
    if told is not None:
        info["episode"] = told
    info["terminal_observation"] = episode.final_observation
    info["TimeLimit.truncated"] = episode.truncated
    return info


class RunningEpisodes:
    """Returns and lengths of the episodes that N envs are in, and the slots that their steps are read from."""

    slots: Slots

    def count_episodes(self, num_envs: int) -> None:
        """Begin with nothing: a constructor's part."""
        self._returns = np.zeros(num_envs, np.float64)  # float64 as SB3's Monitor, which sums Python floats
        self._lengths: Int64Array = np.zeros(num_envs, np.int64)

    def begin_episodes(self, envs: BoolArray | Int64Array | slice | int | list[int] = slice(None)) -> None:
        """Drop the unfinished records of these envs (BoolArray, indices or slice), which were reset."""
        self._returns[envs] = 0.0
        self._lengths[envs] = 0

    def clear_slots(self) -> None:
        """What a reset leaves: no step, no episode."""
        slots = self.slots
        slots.rewards[:] = 0.0
        slots.terminations[:] = slots.truncations[:] = False
        slots.finished = []
        self.begin_episodes()

    def count_step(self) -> Int64Array:
        """Add the rewards of a step of all envs; those (M,) whose episode ended in it."""
        slots = self.slots
        self._returns += slots.rewards
        self._lengths += 1
        return np.flatnonzero(slots.terminations | slots.truncations)

    def end_episode(
        self, index: int, final_observation: object, info: dict[str, Any], lost: bool = False
    ) -> FinishedEpisode:
        """The record of an episode that ended in the last step; the next one begins."""
        slots = self.slots
        episode = FinishedEpisode(
            env_index=index,
            episode_return=float(self._returns[index]),
            length=int(self._lengths[index]),
            final_observation=final_observation,
            truncated=bool(slots.truncations[index] and not slots.terminations[index]),
            info=info,
            lost=lost,
        )
        self.begin_episodes(index)
        return episode


class SlotVecEnv(RunningEpisodes, VecEnv):
    """Base of the vector envs that write slots. A subclass allocates `slots`, then calls this constructor.

    `step_slots` serves fast readers. `step`, `reset` and the masks behind `env_method` serve any SB3 code: they hand
    out copies, as SB3's own vector envs do.
    """

    reuses_arrays = True
    keeps_records = True  # False: a Monitor in the envs tells of whole games, and what ends may be less than one

    def __init__(self, num_envs: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.count_episodes(num_envs)
        self.num_envs = num_envs  # get_attr("render_mode") in SB3's constructor needs it
        super().__init__(num_envs, observation_space, action_space)
        self._started_at = time.monotonic()  # not the wall clock, which may be set
        self._pending_actions: NDArray[Any] | None = None

    @abstractmethod
    def step_slots(self, actions: NDArray[Any]) -> None:
        """Step every env with its action, (N, ...), fill all slots and `slots.finished`; build no infos."""

    @property
    def masked(self) -> bool:
        return self.slots.action_masks is not None

    def read_masks(self) -> BoolArray | None:
        return self.slots.action_masks

    def infos(self) -> list[dict[str, Any]]:
        """One info per env: content where an episode ended, elsewhere one empty dict that is shared for this step."""
        infos: list[dict[str, Any]] = [{}] * self.num_envs
        if self.slots.finished:
            self._fill_infos(infos)
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
        self._fill_infos(infos)
        dones = slots.terminations | slots.truncations
        return copy_observations(slots.observations), slots.rewards.copy(), dones, infos

    def has_attr(self, attr_name: str) -> bool:
        if attr_name == MASK_METHOD:
            return self.masked
        return super().has_attr(attr_name)

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[Any]:
        """Call a method of the envs. `action_masks` is read from the slots: no env is called, one copy is made."""
        masks = self.slots.action_masks
        if method_name == MASK_METHOD and masks is not None:
            return list(masks.copy() if indices is None else masks[self.env_indices(indices)])
        return self.call_envs(method_name, method_args, method_kwargs, indices)

    def groups(self) -> Any:
        """`groups.Groups` of rows that can step apart from each other; None: all step together."""
        return None

    @abstractmethod
    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """`env_method` for everything but the masks."""

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return [False] * len(self.env_indices(indices))

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        return [None] * self.num_envs

    def env_indices(self, indices: VecEnvIndices) -> list[int]:
        """Env indices as a list, whatever form SB3 callers gave them in. `IndexError` if one is out of range."""
        if indices is None:
            return list(range(self.num_envs))
        chosen = [int(i) for i in indices] if isinstance(indices, Iterable) else [int(indices)]
        for index in chosen:
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"env index {index} is out of range: there are {self.num_envs} envs")
        return [index % self.num_envs for index in chosen]

    def _fill_infos(self, infos: list[dict[str, Any]]) -> None:
        elapsed_s = round(time.monotonic() - self._started_at, 6)
        for episode in self.slots.finished:
            infos[episode.env_index] = episode_info(episode, elapsed_s, self.keeps_records)


def slots_of(env: VecEnv) -> SlotSource:
    """The slots interface of `env`.

    Decided by the type of the outermost env: a `VecEnvWrapper` forwards unknown attributes to the env inside, so that
    `hasattr(env, "step_slots")` would be true for a wrapper and skip what it does.
    """
    return env if isinstance(env, SlotVecEnv) else SlotAdapter(env)


def close_envs(env: VecEnv) -> str:
    """Close; what an env's own `close()` raised, in words."""
    failed, inner = closed(env), env.unwrapped
    return failed or getattr(getattr(inner, "inner", inner), "close_failed", "")


def rests_of(env: VecEnv) -> tuple[BoolArray | None, BoolArray | None]:
    """`resets` and `rests` of the slots of `env`, whatever lies around it."""
    inner = env.unwrapped
    return (inner.slots.resets, inner.slots.rests) if isinstance(inner, SlotVecEnv) else (None, None)


class SlotAdapter(RunningEpisodes):
    """Steps `env` by its SB3 interface and lays the outcome into slots. `infos()` gives the env's own infos.

    The arrays in the slots are those the env returned: fresh ones each step with SB3's classes.
    """

    reuses_arrays = False

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self._masked: bool | None = None  # asked once, when first needed: it is a call into every worker
        self._flat_masks = FlatMasks(0)  # `legal` alone, which takes any width
        self._infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.slots = empty_slots(env.observation_space, env.action_space, self.num_envs)
        self.count_episodes(self.num_envs)

    @property
    def masked(self) -> bool:
        if self._masked is None:
            self._masked = self.env.has_attr(MASK_METHOD)
        return self._masked

    def reset(self) -> Observations:
        """Reset all envs and begin new episode records."""
        self.begin_episodes()
        self.slots.finished = []
        self.slots.observations = cast(Observations, self.env.reset())
        return self.slots.observations

    def read_masks(self) -> BoolArray | None:
        """Ask every env for its mask, once per call: at the moment of acting, as sb3-contrib does."""
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
        ended = np.flatnonzero(slots.terminations)
        slots.finished = [self._finish(index) for index in ended.tolist()]
        slots.resets, slots.rests = rests_of(self.env)

    def infos(self) -> list[dict[str, Any]]:
        return self._infos

    def _finish(self, index: int) -> FinishedEpisode:
        info = self._infos[index]
        truncated = truth(info.get("TimeLimit.truncated")) or False
        self.slots.truncations[index] = truncated
        self.slots.terminations[index] = not truncated
        record = record_of(info) or {}  # a Monitor below VecNormalize knows the raw return
        self._returns[index] = record.get("r", self._returns[index])
        self._lengths[index] = record.get("l", self._lengths[index])
        return self.end_episode(index, info.get("terminal_observation"), info)
