"""The env's side of a model: its slots, what is read off them and copied, and the clock over all of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.batch import BoolArray, FinishedEpisode, Float32Array
from fasttrain.buffers.prefetch import Direct, Sampler
from fasttrain.engines.heads import MaskCheck
from fasttrain.errors import EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import SlotAdapter, SlotSource, copy_observations, slots_of
from fasttrain.vec.groups import WorkerGroups
from fasttrain.vec.shared import SharedMemoryVecEnv


class Came(NamedTuple):
    """What a vector step of N envs brought, safe from the next one."""

    observations: Any  # (N, ...), or one array per key
    rewards: Float32Array  # (N,)
    dones: BoolArray  # (N,)
    infos: list[dict[str, Any]]


class Collector:
    """Never saved. The clock may be a run's, so that one clock covers training and everything around it."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.lends_observations = False  # callbacks see `new_obs` in the storage, for one rollout, not a copy to keep
        self.schedule = "lockstep"  # pipelined: one half steps while the policy acts for the other; or first_ready
        self.local_random_actions = False  # DQN's random actions of all envs in one draw
        self.sampler: Sampler = Direct()  # of replay batches
        self.source: SlotSource | None = None  # the env seen as slots
        self._env: VecEnv | None = None

    def source_of(self, env: VecEnv) -> SlotSource:
        """The slots of `env`, kept from rollout to rollout."""
        if self.source is None or self._env is not env:
            self._env, self.source = env, slots_of(env)
        return self.source

    def groups_of(self, source: SlotSource) -> WorkerGroups | None:
        """The workers in groups; None where all step together."""
        if not isinstance(source, SharedMemoryVecEnv):
            return None
        groups = {"pipelined": 2, "first_ready": source.num_workers}.get(self.schedule, 1)
        wanted = min(groups, source.num_workers)
        return WorkerGroups(source, wanted) if wanted > 1 else None

    def step(self, source: SlotSource, actions: NDArray[Any], place: Any = None) -> Came:
        """Step all envs. `place`: where the observations are to lie, so that storing them costs no copy."""
        self.clock.enter("env_step")
        source.step_slots(actions)
        self.clock.enter("buffer")
        slots = source.slots
        rewards = np.array(slots.rewards, np.float32)
        return Came(_kept(source, place), rewards, slots.terminations | slots.truncations, source.infos())


def read_masks(
    source: SlotSource, action_space: spaces.Space[Any], step: int, place: BoolArray | None = None
) -> BoolArray:
    """A checked copy of the masks (N, A), in `place` if given: the step that follows overwrites the slots."""
    masks = source.read_masks()
    if masks is None:
        raise EnvSpecError(f"the env had action masks when training began and has none at step {step}")
    MaskCheck(action_space)(masks, step)
    if place is None:
        return np.array(masks)
    np.copyto(place, masks)
    return place


def _kept(source: SlotSource, place: Any) -> Any:
    observations = source.slots.observations
    if not source.reuses_arrays:
        return observations
    if place is None:
        return copy_observations(observations)
    if isinstance(observations, dict):
        for key, part in observations.items():
            np.copyto(place[key], part)
    else:
        np.copyto(place, observations)
    return place


def clip_actions(model: OnPolicyAlgorithm, actions: NDArray[Any]) -> NDArray[Any]:
    """What the envs get: Box actions within bounds, all others as drawn."""
    space = model.action_space
    if not isinstance(space, spaces.Box):
        return actions
    if model.policy.squash_output:
        actions = model.policy.unscale_action(actions)
        return actions
    clipped: NDArray[Any] = np.clip(actions, space.low, space.high)
    return clipped


def bootstrap_truncated(
    engine: Any, gamma: float, finished: list[FinishedEpisode], rewards: Float32Array, values: Any
) -> None:
    """Add gamma × value of the last observation to the last reward of every episode that was cut.

    As SB3 does it, env by env, where every number is to be SB3's: one product of several rows rounds differently, by up
    to one unit in the last place. In one forward where kernels were asked for.

    An episode that a fault cut (`lost`) says nothing about its last action: the reward is set to what was expected,
    `values` (N,) or (N, 1), so that the advantage is zero.

    Args:
        rewards: (N,) of this step, changed in place.
    """
    for episode in finished:
        if episode.lost:
            rewards[episode.env_index] = float(values.reshape(-1)[episode.env_index])
    cut = [
        episode
        for episode in finished
        if episode.truncated and not episode.lost and episode.final_observation is not None
    ]
    if not cut:
        return
    for together in [cut] if engine.settings.kind == "kernels" else [[episode] for episode in cut]:
        last: Any = [episode.final_observation for episode in together]
        keyed = isinstance(last[0], dict)
        stacked = {key: np.stack([row[key] for row in last]) for key in last[0]} if keyed else np.stack(last)
        found = engine.values(stacked)
        rewards[[episode.env_index for episode in together]] += np.float32(gamma) * found


def note_episodes(model: BaseAlgorithm, source: SlotSource, infos: list[dict[str, Any]], dones: BoolArray) -> None:
    """SB3's running statistics of episodes. Slot envs put nothing in the infos of envs that did not end."""
    if isinstance(source, SlotAdapter):
        model._update_info_buffer(infos, dones)
    elif source.slots.finished:
        ended = [episode.env_index for episode in source.slots.finished]
        model._update_info_buffer([infos[index] for index in ended], dones[ended])
