"""SharedMemoryVecEnv: envs in worker processes, several per worker, that write each step into shared memory.

Replaces SB3's `SubprocVecEnv`, and also offers slots. A step costs two semaphore operations per worker. Action masks
arrive with the step. A worker that dies, hangs or raises is named in the error, or replaced (`on_env_error`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from fasttrain.batch import FinishedEpisode, Int64Array, Slots, select_rows
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.base import SlotVecEnv, copy_observations
from fasttrain.vec.groups import WorkerGroups
from fasttrain_vec.calls import LOST, InfoReader, call_envs, sent_numbers
from fasttrain_vec.crew import Crew, CrewOptions, EnvFn, OnEnvError
from fasttrain_vec.process import Scout
from fasttrain_vec.replacing import Replacements
from fasttrain_vec.worker_envs import Record
from fasttrain_vec.worker_memory import BUSY_NS, OPPONENTS_NS, STEP_NS


class SharedMemoryVecEnv(SlotVecEnv):
    """Envs in worker processes that share memory with the trainer.

    Args:
        env_fns: one function per env. It is pickled by cloudpickle and called in a worker. All envs need the same
            spaces.
        num_workers: number of processes, at most one per env; None for one per usable core. Envs are split evenly.
        start_method: multiprocessing's start method; None for spawn.
        info_keys: info entries that arrive at every step. All other entries arrive only when an episode ends. None:
            all entries arrive at every step, as with SB3's classes.
        on_env_error: what happens when an env raises, breaks its contract, or its worker dies. "raise": an `EnvError`.
            "restart": the env or the worker is built again, and unfinished episodes end as truncated and `lost`.
        step_timeout_s: a worker that needs longer for one request counts as hung.
        start_timeout_s: a worker that needs longer to build its envs counts as hung.
        use_masks: read action masks, from a method, the info or the observation, together with each step.
        check_finite: raise an error for NaN or infinity in observations and rewards.
        max_restarts: with more restarts within `restart_window_s` an error is raised even under "restart".
        scout: a process that has already tried such an env. It becomes the first worker and sets the start method.
        restart_hint: how errors name the value "restart" of `on_env_error`.

    Raises:
        EnvSpecError: an env cannot be built, the envs' spaces differ, or shared memory cannot hold them.

    Envs of one worker share the global random streams of Python and NumPy. A seeded reset seeds them per worker.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        num_workers: int | None = None,
        start_method: str | None = None,
        info_keys: Sequence[str] | None = (),
        on_env_error: OnEnvError = "raise",
        step_timeout_s: float = 300.0,
        *,
        start_timeout_s: float = 300.0,
        use_masks: bool = True,
        check_finite: bool = True,
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
        scout: Scout | None = None,
        restart_hint: str = 'on_env_error="restart"',
    ) -> None:
        if not env_fns:
            raise EnvSpecError("SharedMemoryVecEnv needs at least one env function")
        self._info_keys = None if info_keys is None else tuple(dict.fromkeys(info_keys))
        self._records: list[Record] = []  # records of the last step
        self._info_reader = InfoReader()
        self._closed = False
        self.lost_steps = 0  # env steps of episodes that a failure ended
        self.wait_ns = self.slowest_ns = 0  # sums over steps: trainer's waiting time, slowest worker's time
        options = CrewOptions(
            num_workers=num_workers,
            start_method=start_method,
            info_keys=self._info_keys,
            on_env_error=on_env_error,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            use_masks=use_masks,
            check_finite=check_finite,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            restart_hint=restart_hint,
        )
        self.crew = Crew(env_fns, options, scout)
        arrays = self.crew.arrays
        self.slots = Slots(
            observations=arrays.observations[0],
            actions=arrays.actions,
            rewards=arrays.rewards,
            terminations=arrays.terminations,
            truncations=arrays.truncations,
            action_masks=arrays.action_masks,
        )
        try:
            super().__init__(len(env_fns), self.crew.layout.observation_space, self.crew.layout.action_space)
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        return self.crew.num_workers

    @property
    def replacements(self) -> Replacements:
        """Envs and workers that were replaced, by cause."""
        return self.crew.replacements

    @property
    def restarts(self) -> int:
        """Number of envs and workers that were replaced."""
        return self.crew.replacements.count

    def reset(self) -> VecEnvObs:
        self._check_open()
        infos = self.crew.reset(self._seeds, self._options)
        self.reset_infos = [self._info_reader.unpack(packed.info, index) for index, packed in enumerate(infos)]
        for index, packed in enumerate(infos):
            self._info_reader.warn_unsent(index, packed.unsent)
        self._reset_seeds()
        self._reset_options()
        self.begin_episodes()
        self._records = []
        self.slots.finished = []
        self.slots.observations = self.crew.arrays.observations[self.crew.buffers[0]]
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        self.step_async(actions)
        self._finish_step()

    def step_async(self, actions: NDArray[Any]) -> None:
        self._check_open()
        if self._stepping:
            raise RuntimeError("step_async() while a step is pending: call step_wait() first")
        if np.size(actions) != self.slots.actions.size:  # NumPy would broadcast one action to all envs
            raise ValueError(
                f"actions of shape {np.shape(actions)} for {self.num_envs} envs: expected {self.slots.actions.shape}"
            )
        self.slots.actions[...] = np.reshape(actions, self.slots.actions.shape)
        self.crew.post_step()

    def step_wait(self) -> VecEnvStepReturn:
        self._check_open()
        if not self._stepping:
            raise RuntimeError("step_wait() without step_async(): call step(actions), or step_async(actions) first")
        self._finish_step()
        slots = self.slots
        dones = slots.terminations | slots.truncations
        return copy_observations(slots.observations), slots.rewards.copy(), dones, self.infos()

    @property
    def _stepping(self) -> bool:
        return bool(self.crew.stepping)

    def _finish_step(self) -> None:
        crew = self.crew
        began = time.perf_counter_ns()
        self._records = crew.wait_step()
        self.wait_ns += time.perf_counter_ns() - began
        self.slowest_ns += max(crew.control[:, STEP_NS].tolist())
        self.slots.observations = crew.arrays.observations[crew.buffers[0]]
        self.slots.finished = self.close_episodes(slice(0, self.num_envs), self._records)

    def close_episodes(self, rows: slice, records: list[Record]) -> list[FinishedEpisode]:
        """Count the last step of the envs in `rows`. Returns the episodes that ended in this step."""
        slots = self.slots
        self._returns[rows] += slots.rewards[rows]
        self._lengths[rows] += 1
        ended = rows.start + (slots.terminations[rows] | slots.truncations[rows]).nonzero()[0]
        if not ended.size:
            return []
        by_env = {record.env_index: record for record in records}
        return [self._finish(index, by_env.get(index, Record(index))) for index in ended.tolist()]

    def _finish(self, index: int, record: Record) -> FinishedEpisode:
        info = self._info_reader.unpack(record.info, index)
        self.reset_infos[index] = self._info_reader.unpack(record.reset_info, index)
        self._info_reader.warn_unsent(index, record.unsent)
        lost = bool(self.crew.arrays.lost[index])
        if lost:
            self.lost_steps += int(self._lengths[index])
            info = {"lost": LOST}
        final = copy_observations(select_rows(self.crew.arrays.final_observations, index))
        return self.end_episode(index, final, info, lost)

    def infos(self) -> list[dict[str, Any]]:
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.fill_infos(infos, slice(0, self.num_envs), self._records, self.slots.finished)
        return infos

    def fill_infos(
        self, infos: list[dict[str, Any]], rows: slice, records: list[Record], finished: list[FinishedEpisode]
    ) -> None:
        """Write the last step's infos of the envs in `rows` into `infos`, the list of all envs."""
        ended = {episode.env_index for episode in finished}
        for record in records:
            if record.info and record.env_index not in ended:
                infos[record.env_index].update(self._info_reader.unpack(record.info, record.env_index))
                self._info_reader.warn_unsent(record.env_index, record.unsent)
        if self._info_keys:
            for index, key, value in sent_numbers(self.crew.arrays, rows, self._info_keys):
                if index not in ended:
                    infos[index][key] = value
        if self._info_keys is None:  # SB3's classes set TimeLimit.truncated at every step
            for index in range(rows.start, rows.stop):
                infos[index]["TimeLimit.truncated"] = False
        self.fill_ends(infos, finished)

    def set_tasks(self, numbers: Int64Array, envs: Int64Array | slice) -> None:
        """Choose the tasks of the next episodes of these envs, allowed at any time; see `envs/tasks.py`."""
        self.crew.arrays.tasks[envs] = numbers

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        return self._call("method", (name, args, kwargs), indices)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self._call("get", (attr_name,), indices)

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Set the attribute in the wrapper that has it, or in the env. Raises EnvError if the value then differs."""
        self._call("set", (attr_name, value), indices)

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return self._call("wrapped", (wrapper_class.__module__, wrapper_class.__qualname__), indices)

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        if self.render_mode != "rgb_array":
            warnings.warn(f"the render mode is {self.render_mode}: images need render_mode='rgb_array'", stacklevel=2)
            return [None] * self.num_envs
        return self._call("render", (), None)

    @property
    def envs(self) -> NoReturn:
        raise AttributeError(
            "SharedMemoryVecEnv has no .envs: they live in worker processes. Use env_method(name, …), get_attr(name) "
            "and set_attr(name, value), each with indices=[…] if need be"
        )

    def _call(self, name: str, arguments: tuple[Any, ...], indices: VecEnvIndices) -> list[Any]:
        self._check_open()
        return call_envs(self.crew, name, arguments, self.env_indices(indices))

    def groups(self) -> WorkerGroups:
        return WorkerGroups(self)

    def times_ns(self) -> dict[str, int]:
        """Nanoseconds so far: steps of all workers, of each step's slowest worker, waiting for workers, opponents."""
        control = self.crew.control
        return {
            "envs": int(control[:, BUSY_NS].sum()),
            "slowest": self.slowest_ns,
            "waiting": self.wait_ns,
            "opponents": int(control[:, OPPONENTS_NS].sum()),
        }

    def close(self) -> None:
        """End the workers, within seconds even if they hang. The slots can still be read."""
        self._closed = True
        self.crew.close()
        self.close_failed = self.crew.close_failed

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError("this SharedMemoryVecEnv is closed: build a new one")
