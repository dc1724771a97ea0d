"""SlotAdapter: any SB3 `VecEnv` (stock classes, wrappers, third parties) behind the slots interface.

The algorithms therefore have one code path. What a wrapper does (normalise, stack frames) stays in force, because the
outermost env decides: `VecNormalize(NativeVecEnv(...))` is adapted like a stock env, never bypassed.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array, Observations, Slots
from fasttrain.errors import EnvError
from fasttrain.vec.base import MASK_METHOD, SlotSource, SlotVecEnv, empty_observations


def slots_of(env: VecEnv) -> SlotSource:
    """The slots interface of `env`.

    Decided by the type of the outermost env: a `VecEnvWrapper` forwards unknown attributes to the env inside, so that
    `hasattr(env, "step_slots")` would be true for a wrapper and skip what it does.
    """
    return env if isinstance(env, SlotVecEnv) else SlotAdapter(env)


class SlotAdapter:
    """Steps `env` by its SB3 interface and lays the outcome into slots. `infos()` gives the env's own infos.

    The arrays in the slots are those the env returned: fresh ones each step with SB3's classes.
    """

    reuses_arrays = False

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self._masked: bool | None = None  # asked once, when first needed: it is a call into every worker
        self._infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self._returns = np.zeros(self.num_envs, np.float64)
        self._lengths: Int64Array = np.zeros(self.num_envs, np.int64)
        self.slots = Slots(
            observations=empty_observations(env.observation_space, self.num_envs),
            actions=np.zeros((self.num_envs, *(env.action_space.shape or ())), env.action_space.dtype),
            rewards=np.zeros(self.num_envs, np.float32),
            terminations=np.zeros(self.num_envs, np.bool_),
            truncations=np.zeros(self.num_envs, np.bool_),
        )

    @property
    def masked(self) -> bool:
        if self._masked is None:
            self._masked = self.env.has_attr(MASK_METHOD)
        return self._masked

    def reset(self) -> Observations:
        """Reset all envs and begin new episode records."""
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self.slots.finished = []
        self.slots.observations = cast(Observations, self.env.reset())
        return self.slots.observations

    def begin_episodes(self, episode_starts: BoolArray) -> None:
        """Drop the unfinished records of envs that were reset from outside (SB3's `learn` resets the env itself)."""
        self._returns[episode_starts] = 0.0
        self._lengths[episode_starts] = 0

    def read_masks(self) -> BoolArray | None:
        """Ask every env for its mask, once per call: at the moment of acting, as sb3-contrib does."""
        if not self.masked:
            return None
        rows = self.env.env_method(MASK_METHOD)
        masks = np.stack([np.asarray(row).reshape(-1) for row in rows])
        self.slots.action_masks = masks if masks.dtype == np.bool_ else masks != 0  # int8 and float masks are common
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

    def infos(self) -> list[dict[str, Any]]:
        return self._infos

    def _finish(self, index: int) -> FinishedEpisode:
        info = self._infos[index]
        truncated = bool(info.get("TimeLimit.truncated", False))
        self.slots.truncations[index] = truncated
        self.slots.terminations[index] = not truncated
        record = info.get("episode", {})  # a Monitor below VecNormalize knows the raw return
        episode = FinishedEpisode(
            env_index=index,
            episode_return=float(record.get("r", self._returns[index])),
            length=int(record.get("l", self._lengths[index])),
            final_observation=info.get("terminal_observation"),
            truncated=truncated,
            info=info,
        )
        self._returns[index] = 0.0
        self._lengths[index] = 0
        return episode
