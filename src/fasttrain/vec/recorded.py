"""RecordedVecEnv: what some steps of another vector env brought, over and over, at no cost of its own.

With it an algorithm can collect as in training while its envs take no time: what remains is choosing and storing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.batch import BoolArray, FinishedEpisode, Float32Array, Observations, Slots
from fasttrain.vec.base import SlotSource, SlotVecEnv, copy_observations


class Frame(NamedTuple):
    """One vector step."""

    observations: Observations  # (N, ...) after the step
    action_masks: BoolArray | None  # (N, A)
    rewards: Float32Array  # (N,)
    terminations: BoolArray
    truncations: BoolArray
    finished: list[FinishedEpisode]
    infos: list[dict[str, Any]]

    @property
    def dones(self) -> BoolArray:
        """(N,) ended in this step, as SB3 says it."""
        return self.terminations | self.truncations


class RandomActions:
    """Random legal actions in no time: from a few tables of random numbers that are drawn once.

    Drawing afresh took 0.3 ms for 256 envs of 71 actions, thrice the envs' own step: their caches were cold and their
    threads asleep by then, and the step measured up to twice as slow as in training.
    """

    TABLES = 16

    def __init__(self, space: spaces.Space[Any], num_envs: int, seed: int) -> None:
        self.space, self._turn = space, 0
        rng = np.random.default_rng(seed)
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            dims = np.atleast_1d(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
            self._bounds: list[tuple[int, int]] = list(pairwise([0, *np.cumsum(dims).tolist()]))
            shape = (self.TABLES, num_envs, int(dims.sum()))
            self._keys = 1.0 - rng.random(shape, np.float32)  # above 0, which is what an illegal action gets
            self._free = [self._best(keys) for keys in self._keys]
        else:
            self._free = [np.stack([space.sample() for _ in range(num_envs)]) for _ in range(self.TABLES)]

    def draw(self, masks: BoolArray | None, rows: slice = slice(None)) -> NDArray[Any]:  # (n, ...)
        """Actions of the envs in `rows`; `masks` are theirs, (n, A), or None."""
        self._turn = (self._turn + 1) % self.TABLES
        if masks is None:
            return self._free[self._turn][rows]
        return self._best(self._keys[self._turn][rows] * masks)

    def _best(self, keys: NDArray[Any]) -> NDArray[Any]:
        parts = [keys[:, first:stop].argmax(axis=1) for first, stop in self._bounds]
        return np.stack(parts, axis=1).reshape(len(keys), *(self.space.shape or ()))


def record(
    source: SlotSource, draw: Callable[[BoolArray | None], NDArray[Any]], masked: bool, steps: int
) -> list[Frame]:
    """Step `source` with the actions that `draw` gives for its masks; copies of what came of it."""
    frames = []
    for _ in range(steps):
        source.step_slots(draw(source.read_masks() if masked else None))
        slots = source.slots
        masks = source.read_masks() if masked else None
        frames.append(
            Frame(
                copy_observations(slots.observations),
                None if masks is None else np.array(masks),
                np.array(slots.rewards, np.float32),
                np.array(slots.terminations),
                np.array(slots.truncations),
                list(slots.finished),
                list(source.infos()),
            )
        )
    return frames


class RecordedVecEnv(SlotVecEnv):
    """Plays `frames` in a circle, whatever the actions; `reuses_arrays` as the env they are of."""

    def __init__(
        self,
        frames: Sequence[Frame],
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        reuses_arrays: bool = True,
    ) -> None:
        num_envs = len(frames[0].rewards)
        self.frames, self.reuses_arrays, self._next = frames, reuses_arrays, 0
        self.num_envs = num_envs  # get_attr("render_mode") in SB3's constructor needs it
        self.slots = Slots(
            observations=frames[-1].observations,
            actions=np.zeros((num_envs, *(action_space.shape or ())), action_space.dtype),
            rewards=frames[-1].rewards,
            terminations=frames[-1].terminations,
            truncations=frames[-1].truncations,
            action_masks=frames[-1].action_masks,
        )
        super().__init__(num_envs, observation_space, action_space)

    def reset(self) -> VecEnvObs:
        self._next = 0
        self.slots.observations = self.frames[-1].observations
        self.slots.action_masks, self.slots.finished = self.frames[-1].action_masks, []
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        frame, slots = self.frames[self._next % len(self.frames)], self.slots
        self._next += 1
        slots.observations, slots.rewards, slots.action_masks = frame.observations, frame.rewards, frame.action_masks
        slots.terminations, slots.truncations, slots.finished = frame.terminations, frame.truncations, frame.finished

    def infos(self) -> list[dict[str, Any]]:
        return self.frames[(self._next - 1) % len(self.frames)].infos

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """There are no envs to call; every answer is None."""
        return [None] * len(self.env_indices(indices))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [None] * len(self.env_indices(indices))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        pass

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        return [False] * len(self.env_indices(indices))

    def close(self) -> None:
        pass
