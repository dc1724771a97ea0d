"""VectorEnv: a Gymnasium vector env whose envs run in worker processes, several per worker, in shared memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from fasttrain.batch import each_array
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain_vec.calls import LOST, InfoReader, call_envs, sent_numbers
from fasttrain_vec.crew import Crew, CrewOptions, EnvFn, OnEnvError
from fasttrain_vec.worker_envs import Record

Step = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """Envs in worker processes, in place of Gymnasium's `AsyncVectorEnv(env_fns, autoreset_mode="SameStep")`.

    Args:
        env_fns: one function per env. It is pickled by cloudpickle and called in a worker. All envs need the same
            spaces.
        num_workers: number of processes, at most one per env; None for one per usable core. Envs are split evenly.
        start_method: multiprocessing's start method; None for spawn, with which a script needs
            `if __name__ == "__main__":`.
        info_keys: info entries that arrive at every step. All other entries arrive only when an episode ends. None:
            all entries arrive at every step, as with Gymnasium's classes.
        on_env_error: what happens when an env raises, breaks its contract, or its worker dies. "raise": an `EnvError`.
            "restart": the env or the worker is built again, and unfinished episodes end as truncated. `final_info` of
            such an episode has only an entry `lost`, and `final_obs` is the last observation that was seen.
        step_timeout_s: a worker that needs longer for one request counts as hung.
        copy: False: observations are views of the shared memory, which later steps overwrite.
        start_timeout_s: a worker that needs longer to build its envs counts as hung.
        use_masks: read action masks, from a method `action_masks()`, an info entry or an observation's key
            `action_mask`. They are in `infos["action_masks"]`, (num_envs, A) bool, after each reset and step.
        check_finite: raise an error for NaN or infinity in observations and rewards.
        max_restarts: with more restarts within `restart_window_s` an error is raised even under "restart".

    Raises:
        EnvSpecError: an env cannot be built, the envs' spaces differ, or shared memory cannot hold them: it takes Box,
            Discrete, MultiDiscrete and MultiBinary, and as observations a Dict of them.

    The autoreset mode is SAME_STEP: an env whose episode ends is reset in the same step, by its worker. So each row of
    each step is a transition, none is only a reset. The last observation and info of the episode are in
    `infos["final_obs"]` and `infos["final_info"]`, everything else belongs to the new episode.

    Envs of one worker share the global random streams of Python and NumPy. A seeded reset seeds them per worker.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        num_workers: int | None = None,
        start_method: str | None = None,
        info_keys: Sequence[str] | None = None,
        on_env_error: OnEnvError = "raise",
        step_timeout_s: float = 300.0,
        *,
        copy: bool = True,
        start_timeout_s: float = 300.0,
        use_masks: bool = True,
        check_finite: bool = True,
        max_restarts: int = 10,
        restart_window_s: float = 600.0,
    ) -> None:
        if not env_fns:
            raise EnvSpecError("VectorEnv needs at least one env function")
        self.copy, self.num_envs = copy, len(env_fns)
        self._info_keys = tuple(dict.fromkeys(info_keys or ()))
        self._infos = InfoReader()
        options = CrewOptions(
            num_workers=num_workers,
            start_method=start_method,
            info_keys=None if info_keys is None else self._info_keys,
            on_env_error=on_env_error,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            use_masks=use_masks,
            check_finite=check_finite,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            reward_dtype="float64",
        )
        self._crew = Crew(env_fns, options)
        try:
            self.single_observation_space = self._crew.layout.observation_space
            self.single_action_space = self._crew.layout.action_space
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)
            self.render_mode = self._of_first("render_mode")
            self.metadata = {**(self._of_first("metadata") or {}), "autoreset_mode": AutoresetMode.SAME_STEP}
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        return self._crew.num_workers

    @property
    def restarts(self) -> int:
        """Number of envs and workers that were replaced."""
        return self._crew.replacements.count

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the envs' random generators."""
        return self.get_attr("np_random_seed")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs. An int as `seed` gives env i the seed `seed + i`. Each env gets the same `options`."""
        self._check_open()
        if options and "reset_mask" in options:
            raise ValueError(
                "options['reset_mask']: VectorEnv resets an env when its episode ends, or all envs at once"
            )
        seeds: list[int | None]
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + index for index in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} envs: give one for each, or one int")
        infos: dict[str, Any] = {}
        for index, packed in enumerate(self._crew.reset(seeds, [options or {}] * self.num_envs)):
            infos = self._add_info(infos, self._infos.unpack(packed.info, index), index)
            self._infos.warn_unsent(index, packed.unsent)
        return self._observations(), self._with_masks(infos)

    def step(self, actions: Any) -> Step:
        """Step all envs. The actions are converted to the dtype of the action space."""
        self._check_open()
        crew, arrays, actions = self._crew, self._crew.arrays, np.asarray(actions)
        if crew.stepping:
            raise RuntimeError("an exception has interrupted the last step: call reset() first")
        if actions.shape != arrays.actions.shape:
            raise ValueError(f"actions of shape {actions.shape}: expected {arrays.actions.shape}")
        if actions.dtype.kind not in "biu" and arrays.actions.dtype.kind != "f":
            raise TypeError(f"actions of {actions.dtype}: {self.single_action_space} needs integers")
        arrays.actions[...] = actions
        crew.post_step()
        infos = self._step_infos(crew.wait_step())
        rewards: NDArray[Any] = arrays.rewards.copy()
        return self._observations(), rewards, arrays.terminations.copy(), arrays.truncations.copy(), infos

    def _step_infos(self, records: list[Record]) -> dict[str, Any]:
        """The infos of the last step in Gymnasium's form, with `final_obs` and `final_info` of ended episodes."""
        arrays, infos = self._crew.arrays, dict[str, Any]()
        ended = arrays.terminations | arrays.truncations
        last: dict[int, dict[str, Any]] = {}
        for record in records:
            index = record.env_index
            self._infos.warn_unsent(index, record.unsent)
            info = self._infos.unpack(record.info, index)
            if ended[index]:
                last[index], info = info, self._infos.unpack(record.reset_info, index)
            infos = self._add_info(infos, info, index)
        for index in ended.nonzero()[0].tolist():  # flatnonzero takes 1 µs more
            final_obs = each_array(lambda part, row=index: part[row].copy(), arrays.final_observations)
            final_info = {"lost": LOST} if arrays.lost[index] else last.get(index, {})
            infos = self._add_info(infos, {"final_obs": final_obs, "final_info": final_info}, index)
        if self._info_keys:
            for index, key, value in sent_numbers(arrays, slice(0, self.num_envs), self._info_keys):
                if not ended[index]:
                    infos = self._add_info(infos, {key: value}, index)
        return self._with_masks(infos)

    def _with_masks(self, infos: dict[str, Any]) -> dict[str, Any]:
        if (masks := self._crew.arrays.action_masks) is not None:
            infos["action_masks"], infos["_action_masks"] = masks.copy(), np.ones(self.num_envs, np.bool_)
        return infos

    def _observations(self) -> Any:
        observations = self._crew.arrays.observations[self._crew.buffers[0]]
        return each_array(np.ndarray.copy, observations) if self.copy else observations

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the method `name` of each env, or read the attribute. Returns the results of all envs."""
        if name in ("reset", "step", "close"):
            raise ValueError(f"call({name!r}): call {name}() of the vector env instead")
        return self._call("value", (name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of each env."""
        return self._call("get", (name,))

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute in the wrapper that has it, or in the env. A list or tuple has a value for each env."""
        if not isinstance(values, (list, tuple)):
            self._call("set", (name, values))
            return
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values of {name!r} for {self.num_envs} envs: give one for each")
        for index, value in enumerate(values):
            self._call("set", (name, value), (index,))

    def render(self) -> tuple[Any, ...]:
        """What `render()` of each env returns."""
        return self._call("render", ())

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers, within seconds even if they hang. Called by `close`."""
        self._crew.close()
        if self._crew.close_failed:
            warnings.warn(f"close() of an env failed: {self._crew.close_failed}", stacklevel=3)

    def _call(self, name: str, arguments: tuple[Any, ...], envs: Sequence[int] | None = None) -> tuple[Any, ...]:
        self._check_open()
        return tuple(call_envs(self._crew, name, arguments, range(self.num_envs) if envs is None else envs))

    def _of_first(self, name: str) -> Any:
        """An attribute of the first env; None if it cannot be pickled."""
        try:
            return self._call("get", (name,), (0,))[0]
        except EnvError:
            return None

    def _check_open(self) -> None:
        if self.closed:
            raise EnvError("this VectorEnv is closed: build a new one")
