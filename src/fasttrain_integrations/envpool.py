"""EnvPoolVecEnv: EnvPool's C++ envs (Atari, classic control, Box2D, MuJoCo, …) as a `SlotVecEnv`.

EnvPool resets an ended env in the next step and ignores that step's action. SB3 needs the reset in the same step.
Therefore each step ends with a second call of EnvPool, which resets only the ended envs.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from fasttrain.batch import FinishedEpisode
from fasttrain.envs.names import arguments
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.machine import usable_cores
from fasttrain.spec.backends import Backend
from fasttrain.spec.config import Config, EnvConfig
from fasttrain.spec.reading import env_kwargs
from fasttrain.spec.setting import did_you_mean
from fasttrain.vec.base import SlotVecEnv, copy_observations, empty_slots

# Options of EnvPool that are set here → the setting that a user must use instead.
_OURS = {
    "num_envs": "num_envs",
    "batch_size": "num_envs",
    "seed": "seed",
    "env_seed": "seed",
    "max_episode_steps": "env.max_episode_steps",
    "gym_reset_return_info": "nothing",
}
_MAX_INT32 = 2**31 - 1
_TURNS, _TURN_S = 3, 0.03  # of stepping with each number of threads, before the first choice
_MOST_TRIED = 256  # envs; three pools of more would take long to build, and much memory


class _EnvPool(Backend):
    name, vec_env, why = "envpool", "native", "EnvPool steps all envs in its own threads"
    what, refuses, masked = "EnvPool's envs are C++", ("entry_point",), False

    def option(self, env: EnvConfig) -> str:
        return f"env.id={env.id} of EnvPool"

    def build(self, config: Config, num_envs: int, folder: Path | None) -> EnvPoolVecEnv:
        env, kwargs = config.env, arguments(env_kwargs(config), "env.kwargs.")
        return EnvPoolVecEnv(str(env.id), num_envs, env.max_episode_steps, kwargs)


BACKEND = _EnvPool()


class EnvPoolVecEnv(SlotVecEnv):
    """N envs of one EnvPool task, stepped by EnvPool's threads. Raises EnvSpecError if it cannot be built.

    The first `reset`, and each reset after `seed()`, builds a new pool, because a pool gets its seeds when it is built.
    This class counts steps itself: in the step of the limit EnvPool reports a truncation even if the env terminates.

    Args:
        env_id: one of `envpool.list_all_envs()`.
        max_episode_steps: number of steps after which an episode is truncated, in place of the task's own limit.
        options: arguments of `envpool.make`, such as `{"frame_skip": 2}`. Without `num_threads` the first `reset`
            steps pools with one thread, with the usable cores and with EnvPool's own number for 0.3 s, and takes the
            fastest; more than 256 envs take the usable cores. Results do not depend on the number of threads.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        max_episode_steps: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._what = f"env.id={env_id} of EnvPool"
        self.elsewhere = f"{self._what}: its envs are C++ (with env.backend=gymnasium they are Python)"
        self._envpool = _package()
        self._env_id = env_id
        self._pool_options = dict(options or {})
        spec = self._spec()
        self._limit = max_episode_steps or getattr(spec.config, "max_episode_steps", None)
        if self._limit is not None:
            # EnvPool's limit is one step more, so that only this class truncates. But with `episodic_life` EnvPool must
            # truncate, because it counts steps across lives, as Gymnasium does.
            room = 0 if self._pool_options.get("episodic_life") else 1
            self._pool_options["max_episode_steps"] = min(self._limit + room, _MAX_INT32)
            self._limit = self._limit if room else None
        observation_space, action_space = self._spaces(spec)
        self.slots = empty_slots(observation_space, action_space, num_envs)
        self._observations: Any = self.slots.observations
        self._pool: Any = None
        super().__init__(num_envs, observation_space, action_space)

    def _spec(self) -> Any:
        known = self._envpool.list_all_envs()
        if self._env_id not in known:
            raise EnvSpecError(
                f"{self._what}: no such task{did_you_mean(self._env_id, known) or '; envpool.list_all_envs() has all'}"
            )
        for name, instead in _OURS.items():
            if name in self._pool_options:
                raise EnvSpecError(f"{self._what}: env.kwargs.{name} is set by fasttrain; use {instead} instead")
        try:
            return self._envpool.make_spec(self._env_id, **self._pool_options)
        except Exception as error:
            accepted = sorted(set(self._envpool.make_spec(self._env_id).config._fields) - set(_OURS))
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            why = f"EnvPool does not accept env.kwargs={self._pool_options}: {said}"
            for unknown in [name for name in self._pool_options if name not in accepted][:1]:
                hint = did_you_mean(unknown, accepted)
                why = f"unknown env.kwargs.{unknown}{hint}; EnvPool accepts: {', '.join(accepted)}"
            raise EnvSpecError(f"{self._what}: {why}") from error

    def _spaces(self, spec: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        observation, action = _without_warnings(lambda: (spec.gymnasium_observation_space, spec.gymnasium_action_space))
        players = getattr(spec.config, "max_num_players", 1)
        supported = (spaces.Box, spaces.Discrete)
        if not (isinstance(observation, supported) and isinstance(action, supported) and players == 1):
            raise EnvSpecError(
                f"{self._what} has observations {observation}, actions {action}, players {players}: only Box and "
                "Discrete spaces and one player are supported"
            )
        return _open_bounds(observation), action

    def reset(self) -> VecEnvObs:
        self._pending_actions = None
        if self._pool is None or any(seed is not None for seed in self._seeds):
            self._pool = self._make_pool()
        self._reset_seeds()
        self._observations[...] = self._pool.reset()[0]
        self.clear_slots()
        return copy_observations(self._observations)

    def _make_pool(self) -> Any:
        entropy = np.random.SeedSequence().generate_state(self.num_envs)
        chosen = [drawn if seed is None else seed for seed, drawn in zip(self._seeds, entropy.tolist(), strict=True)]
        seeds = [seed % (_MAX_INT32 + 1) for seed in chosen]
        if "num_threads" not in self._pool_options:
            self._pool_options["num_threads"] = self._fastest_threads()
        return self._build(seeds, self._pool_options)

    def _build(self, seeds: list[int], options: Mapping[str, Any]) -> Any:
        try:
            pool = self._envpool.make_gymnasium(self._env_id, num_envs=len(seeds), seed=seeds, **options)
        except Exception as error:
            raise EnvSpecError(f"{self._what} could not be built: {type(error).__name__}: {error}") from error
        _without_warnings(lambda: pool.observation_space)  # steps read it too; only the first read warns
        return pool

    def _fastest_threads(self) -> int:
        """The `num_threads` with the shortest step of this task; 0 is EnvPool's own number."""
        most = min(self.num_envs, usable_cores())
        if most == 1 or self.num_envs > _MOST_TRIED:
            return most

        def stepping(count: int) -> Callable[[], object]:
            pool = self._build(list(range(self.num_envs)), {**self._pool_options, "num_threads": count})
            pool.reset()
            return lambda: pool.step(self.slots.actions)

        return fastest({count: stepping(count) for count in (1, most, 0)})

    def step_slots(self, actions: NDArray[Any]) -> None:
        if self._pool is None:
            raise RuntimeError("step before the first reset(): call reset() first")
        slots = self.slots
        slots.actions[...] = actions
        observations, rewards, terminations, truncations, info = self._pool.step(slots.actions)
        slots.rewards[:] = rewards
        slots.terminations[:] = terminations
        slots.truncations[:] = truncations
        if self._limit is not None:
            slots.truncations |= self._lengths + 1 >= self._limit
        ended = self.count_step()
        slots.finished = [self._finish(index, observations, info) for index in ended.tolist()] if ended.size else []
        self._observations[...] = observations
        if ended.size:
            if self._limit is None:  # EnvPool resets these envs in a second step, and ignores the actions
                first, *_, info = self._pool.step(slots.actions[ended], ended)
            else:  # EnvPool does not know that these envs were truncated here
                first, info = self._pool.reset(ended.astype(np.int32))
            self._observations[info["env_id"]] = first

    def _finish(self, index: int, observations: NDArray[Any], info: Mapping[str, Any]) -> FinishedEpisode:
        last = {name: _plain(values[index]) for name, values in info.items() if name not in ("env_id", "players")}
        return self.end_episode(index, observations[index].copy(), last)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        if options:
            raise EnvError("EnvPool takes no reset options: give its options as env.kwargs")
        super().set_options(options)

    def close(self) -> None:
        self._pool = None  # this ends the pool's threads


def fastest(steps: Mapping[int, Callable[[], object]], clock: Callable[[], float] = time.perf_counter) -> int:
    """The key whose function takes the least time, by the median of turns that alternate. `clock` gives seconds."""
    spent: dict[int, list[float]] = {key: [] for key in steps}
    for key in [*steps] * _TURNS:
        begun, calls = clock(), 0
        while calls == 0 or clock() - begun < _TURN_S:
            steps[key]()
            calls += 1
        spent[key].append((clock() - begun) / calls)
    return min(spent, key=lambda key: statistics.median(spent[key]))


def _package() -> ModuleType:
    try:
        return import_module("envpool")
    except ImportError as error:
        raise EnvSpecError(
            f"env.backend=envpool needs the package EnvPool ({error}), which exists for Python 3.11 and newer: "
            'pip install "fasttrain[envpool]"'
        ) from error


def _without_warnings(read: Callable[[], Any]) -> Any:
    """The EnvPool space that `read` returns, without Gymnasium's warning that its float64 bounds are converted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        return read()


def _open_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space with -inf and inf as bounds where EnvPool has C++'s smallest positive and largest number."""
    if not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype)


def _plain(value: Any) -> Any:
    return value.item() if np.ndim(value) == 0 else np.array(value)
