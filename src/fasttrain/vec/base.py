"""SlotVecEnv: an SB3 `VecEnv` whose steps land in preallocated slots; SB3's copies and infos are built only on demand.

`SlotSource` is all that an algorithm sees of its envs. A slot env is one by itself, any other SB3 `VecEnv` through
`fasttrain.vec.adapter`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvStepReturn

from fasttrain.batch import BoolArray, FinishedEpisode, Observations, Slots

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
        return {key: np.array(value) for key, value in observations.items()}
    return np.array(observations)


def empty_observations(space: spaces.Space[Any], num_envs: int) -> Observations:
    """Zeros (N, ...) in the space's dtype, or one such array per key of a Dict space."""
    if isinstance(space, spaces.Dict):
        return {key: np.zeros((num_envs, *(sub.shape or ())), sub.dtype) for key, sub in space.spaces.items()}
    return np.zeros((num_envs, *(space.shape or ())), space.dtype)


def episode_info(episode: FinishedEpisode, elapsed_s: float) -> dict[str, Any]:
    """The info SB3 expects in the step in which an episode ended; an `episode` record of the env's own is kept."""
    info = dict(episode.info)
    if not episode.lost:
        info.setdefault("episode", {"r": round(episode.episode_return, 6), "l": episode.length, "t": elapsed_s})
    info["terminal_observation"] = episode.final_observation
    info["TimeLimit.truncated"] = episode.truncated
    return info


class SlotVecEnv(VecEnv):
    """Base of the vector envs that write slots. A subclass allocates `slots`, then calls this constructor.

    `step_slots` serves fast readers. `step`, `reset` and the masks behind `env_method` serve any SB3 code: they hand
    out copies, as SB3's own vector envs do.
    """

    slots: Slots
    reuses_arrays = True

    def __init__(self, num_envs: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
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
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the envs. `action_masks` is read from the slots: no env is called, one copy is made."""
        masks = self.slots.action_masks
        if method_name == MASK_METHOD and masks is not None:
            return list(masks.copy() if indices is None else masks[self.env_indices(indices)])
        return self.call_envs(method_name, method_args, method_kwargs, indices)

    @abstractmethod
    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """`env_method` for everything but the masks."""

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
        if self.slots.finished:
            elapsed_s = round(time.monotonic() - self._started_at, 6)
            for episode in self.slots.finished:
                infos[episode.env_index] = episode_info(episode, elapsed_s)
