"""GymVecEnv: a Gymnasium `VectorEnv`, which steps N envs in one call, as an SB3 vector env with slots.

`metadata["autoreset_mode"]` of a VectorEnv says when the next episode begins. SAME_STEP is what SB3 does. With
DISABLED, GymVecEnv's step resets the envs that ended. With NEXT_STEP an env ignores its first action after an episode's
end and only resets: `slots.resets` marks the rows of these envs, and algorithms do not learn from them.

A row may also rest: its next action is ignored because its agent is out of the game or waits for other agents. The
VectorEnv marks such rows in `infos["rests"]`, (N,) bool. The reward and the end that a resting row receives belong to
its last decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.batch import BoolArray, FinishedEpisode, each_array, select_rows
from fasttrain.envs.masks import KEYS, METHOD, FlatMasks, mask_entry, mask_key, mask_method, mask_width, without_mask
from fasttrain.envs.retrace import close_env
from fasttrain.envs.user_code import blame
from fasttrain.errors import EnvError, EnvSpecError, FastTrainError
from fasttrain.vec.base import SlotVecEnv, copy_observations, empty_slots

NO_ROW: BoolArray = np.zeros(0, np.bool_)
Make = Callable[..., VectorEnv[Any, Any, Any]]  # called with num_envs=N


def registered(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None = None) -> Make:
    """A function that makes the VectorEnv registered as `vector_entry_point` of an env id.

    Raises EnvSpecError if the id is not registered, or has no vector_entry_point.
    """
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise EnvSpecError(f"env.id={env_id}: {error}") from error
    if spec.vector_entry_point is None:
        raise EnvSpecError(
            f"env.id={env_id} has no vector_entry_point: use env.backend=gymnasium, or env.entry_point=module:Class "
            "of a gymnasium.vector.VectorEnv"
        )
    options = dict(kwargs) if max_episode_steps is None else {**kwargs, "max_episode_steps": max_episode_steps}
    return lambda num_envs: gymnasium.make_vec(env_id, num_envs, "vector_entry_point", **options)


class GymVecEnv(SlotVecEnv):
    """N envs of one `VectorEnv`. All of them share one random generator.

    Args:
        make: called with `num_envs`.
        what: the env as the user named it, for messages.
        use_masks: read action masks (N, A) if the env has them: from its method `action_masks()`, its infos, or its
            Dict observation.
        masks: name of the masks, if it is not `action_masks` or `action_mask`.

    Raises:
        EnvSpecError: the env cannot be made, or has no valid `autoreset_mode`.
    """

    def __init__(self, make: Make, num_envs: int, what: str, use_masks: bool = True, masks: str | None = None) -> None:
        self._what = what
        env = self._call_env("the constructor", lambda: make(num_envs=num_envs), EnvSpecError)
        if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
            raise EnvSpecError(f"{what} made {env!r:.80}, expected a gymnasium.vector.VectorEnv of {num_envs} envs")
        self.venv: VectorEnv[Any, Any, Any] = env
        self.mode = _mode_of(env, what)
        space, action_space = env.single_observation_space, env.single_action_space
        observations, infos = self._call_env("reset", lambda: self._check_reset(env.reset()))
        row_masks = RowMasks(env, infos, masks) if use_masks else None
        self._masks = row_masks if row_masks is not None and row_masks.exist else None
        keys = KEYS if masks is None else (masks,)
        self._mask_key, self._only_key = mask_key(space, keys), None
        if self._mask_key:
            self._mask_key, self._only_key, space = without_mask(space, keys)
        self.slots = empty_slots(space, action_space, num_envs, mask_width(action_space) if self._masks else 0)
        super().__init__(num_envs, space, action_space)
        try:
            self._store_state(observations, infos)
        except EnvError as error:
            raise EnvSpecError(str(error)) from error

    @property
    def resets_late(self) -> bool:
        """Whether rows ignore their action in some steps (`slots.resets`). Stock SB3 would learn from such rows."""
        return self.mode is AutoresetMode.NEXT_STEP or bool(self.venv.metadata.get("rows_rest"))

    def reset(self) -> VecEnvObs:
        self._pending_actions = None
        seed = self._seeds[0]
        observations, infos = self._call_env("reset", lambda: self._check_reset(self.venv.reset(seed=seed)))
        self._reset_seeds()
        self.clear_slots()
        self.slots.resets = None
        self._store_state(observations, infos)
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots = self.slots
        slots.actions[...] = actions
        observations, rewards, terminations, truncations, infos = self._call_env(
            "step", lambda: self._check_step(self.venv.step(slots.actions))
        )
        slots.resets = slots.rests
        slots.rewards[:], slots.terminations[:], slots.truncations[:] = rewards, terminations, truncations
        if slots.resets is not None:
            self._lengths[slots.resets] -= 1
            if self.mode is AutoresetMode.NEXT_STEP:
                slots.rewards[slots.resets] = 0.0
                slots.terminations[slots.resets] = slots.truncations[slots.resets] = False
        ended = self.count_step()
        same_step = self.mode is AutoresetMode.SAME_STEP
        last = _last_observations(infos, self._what) if same_step and ended.size else observations
        last_infos = infos.get("final_info", infos) if same_step else infos
        slots.finished = [self._finish(index, last, last_infos) for index in ended.tolist()]
        over = slots.terminations | slots.truncations
        if self.mode is AutoresetMode.DISABLED and ended.size:
            if self._masks is not None and self._masks.in_infos:  # in a reset's infos only reset rows have entries
                self._read_masks(observations, infos, ~over)
            options = {"reset_mask": over}
            observations, infos = self._call_env("reset", lambda: self._check_reset(self.venv.reset(options=options)))
        self._store_state(observations, infos, over)

    def _store_state(self, observations: object, infos: Mapping[str, Any], over: BoolArray = NO_ROW) -> None:
        """Write into the slots the state before the next actions. `over`: (N,) rows whose episode ended."""
        slots = self.slots
        rests: BoolArray = over if self.mode is AutoresetMode.NEXT_STEP else infos.get("rests", NO_ROW)
        slots.rests = rests if rests.any() else None
        if self._masks is not None:
            only_reset = self.mode is AutoresetMode.DISABLED and self._masks.in_infos and over.any()
            self._read_masks(observations, infos, over if only_reset else ~rests if rests.size else None)
        rows = self._without_mask(observations)
        self._call_env("reading the observations", lambda: each_array(_copy_rows, slots.observations, rows))

    def _check_step(self, answer: object) -> tuple[Any, ...]:
        """The answer of `step`. Raises EnvError unless it has one value per env: NumPy would repeat a single value."""
        if not isinstance(answer, tuple) or len(answer) != 5 or not isinstance(answer[4], Mapping):
            expected = "(observations, rewards, terminations, truncations, infos), the infos a dict"
            raise EnvError(f"{self._what}: step() returned {_type_names(answer)}, expected {expected}")
        for name, values in zip(("rewards", "terminations", "truncations"), answer[1:4], strict=True):
            if np.shape(values) != (self.num_envs,):
                shape = f"{name} of shape {np.shape(values)}, expected ({self.num_envs},): one per env"
                raise EnvError(f"{self._what}: step() returned {shape}")
        return answer

    def _check_reset(self, answer: object) -> tuple[Any, ...]:
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
            expected = "(observations, infos), the infos a dict"
            raise EnvError(f"{self._what}: reset() returned {_type_names(answer)}, expected {expected}")
        return answer

    def _read_masks(self, observations: object, infos: Mapping[str, Any], rows: BoolArray | None) -> None:
        """Read the masks of these rows (N,) bool; None: all rows. Rows that ignore their next action have no mask."""
        masks: Any = self.slots.action_masks
        if rows is None:
            rows = np.ones(self.num_envs, np.bool_)
        elif self.resets_late:
            masks[~rows] = True
        try:
            self._call_env(METHOD, lambda: self._masks.read(observations, infos, rows, masks))  # type: ignore[union-attr]
        except EnvError as error:
            raise EnvError(f"{self._what}: {error}") from error

    def _without_mask(self, observations: Any) -> Any:
        if not self._mask_key:
            return observations
        if self._only_key is not None:
            return observations[self._only_key]
        return {key: part for key, part in observations.items() if key != self._mask_key}

    def _finish(self, index: int, last: object, infos: Mapping[str, Any]) -> FinishedEpisode:
        final = each_array(np.array, self._without_mask(select_rows(last, index)))
        entries = {key: values for key, values in infos.items() if not str(key).startswith("_") and key != "rests"}
        info = {key: _of_env(values, index) for key, values in entries.items() if _has_entry(infos, key, index)}
        return self.end_episode(index, final, info)

    def _call_env(self, what: str, call: Callable[[], Any], kind: type[FastTrainError] = EnvError) -> Any:
        try:
            return call()
        except FastTrainError:
            raise
        except Exception as error:  # the user's code raised it
            raise kind(f"{self._what}: {what} failed: {blame(error)}") from error

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        if options:
            raise EnvError(f"{self._what}: a VectorEnv takes reset options for all envs alike; give them as env.kwargs")
        super().set_options(options)

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """Call the VectorEnv's method once. Each env gets its entry of a list or array; other answers are repeated."""
        answer = self._call_env(name, lambda: getattr(self.venv, name)(*args, **kwargs))
        return [_of_env(answer, index) for index in self._require_all(indices, name)]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        default = [None] if attr_name == "render_mode" else []  # SB3's constructor asks every env for its render mode
        value = getattr(self.venv, attr_name, *default)
        return [_of_env(value, index, self.num_envs) for index in self.env_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        self._require_all(indices, attr_name)
        setattr(self.venv.unwrapped, attr_name, value)

    def _require_all(self, indices: VecEnvIndices, name: str) -> list[int]:
        chosen = self.env_indices(indices)
        if len({*chosen}) != self.num_envs:
            raise EnvError(
                f"{self._what}: a VectorEnv has one {name!r} for all {self.num_envs} envs; indices={chosen} names only "
                "some of them"
            )
        return chosen

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        frames: Any = self.venv.render() if self.venv.render_mode == "rgb_array" else None
        return super().get_images() if frames is None else list(frames)

    def close(self) -> None:
        self.close_failed = close_env(self.venv)


class RowMasks:
    """Reads the masks (N, A) of a VectorEnv from its method, its infos, or its Dict observation.

    Args:
        infos: the infos of a reset that was just made.
        name: name of the masks, as in `find_mask_convention`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], infos: Mapping[str, Any], name: str | None) -> None:
        self._keys, self._space = KEYS if name is None else (name,), env.single_action_space
        self._method = mask_method(env, name or METHOD)
        in_observations = mask_key(env.single_observation_space, self._keys) is not None
        self.in_infos = self._method is None and not in_observations
        self.exist = not self.in_infos or mask_entry(infos, self._keys) is not None
        self._flat = FlatMasks(mask_width(self._space) if self.exist else 0)
        place = "infos" if self.in_infos else "observation"
        self._place = f"{self._keys[-1]}()" if self._method else f"{place}[{self._keys[0]!r}]"

    def read(self, observations: Any, infos: Mapping[str, Any], rows: BoolArray, into: BoolArray) -> None:
        """Write the masks of `rows`, (N,) bool, into their rows of `into` (N, A).

        Raises EnvError if a row has no mask, or one of the wrong length or type.
        """
        source = infos if self.in_infos else observations
        masks: Any = mask_entry(source, self._keys) if self._method is None else self._method()
        if isinstance(masks, Mapping):  # a mapping with one mask per sub-action
            masks = np.hstack([np.asarray(part) for name, part in masks.items() if not str(name).startswith("_")])
        if (missing := rows & ~self._present(masks, infos, len(rows))).any():
            indices = ", ".join(map(str, np.flatnonzero(missing)))
            raise EnvError(f"env {indices} gave no action mask in {self._place}; every reset and step must give one")
        try:
            if isinstance(masks, np.ndarray) and masks.dtype != object and masks.size == into.size:
                into[rows] = self._flat.legal(masks.reshape(into.shape)[rows])
                return
            for row in np.flatnonzero(rows):
                into[row] = self._flat(masks[row])
        except (EnvError, ValueError) as error:  # NumPy raises ValueError for ragged lists
            raise EnvError(f"{self._place}: {error} (action space {self._space})") from error

    def _present(self, masks: Any, infos: Mapping[str, Any], count: int) -> BoolArray:
        """(count,) whether each env has a mask. In infos, Gymnasium marks this under `_` + the mask's key."""
        if isinstance(masks, np.ndarray) and masks.dtype != object:
            present = np.arange(count) < len(masks)
        else:
            present = np.array([masks is not None and i < len(masks) and masks[i] is not None for i in range(count)])
        marks = mask_entry(infos, tuple(f"_{key}" for key in self._keys)) if self.in_infos else None
        return present if marks is None else present & np.asarray(marks, np.bool_)


def _type_names(answer: object) -> str:
    names = ", ".join(type(part).__name__ for part in answer) if isinstance(answer, tuple) else ""
    return f"({names})" if names else type(answer).__name__


def _copy_rows(into: NDArray[Any], values: NDArray[Any]) -> None:
    if np.shape(values) != into.shape:
        raise ValueError(f"shape {np.shape(values)}, expected {into.shape}: one row per env")
    np.copyto(into, values)


def _mode_of(env: VectorEnv[Any, Any, Any], what: str) -> AutoresetMode:
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise EnvSpecError(
            f"{what} does not say when it resets (metadata['autoreset_mode'] is {mode!r}): set it to a member of "
            "gymnasium.vector.AutoresetMode. With a wrong mode an algorithm would learn from wrong transitions"
        ) from error


def _last_observations(infos: Mapping[str, Any], what: str) -> object:
    """The observations (N, ...) before the reset; only rows whose episode ended are valid."""
    for key in ("final_obs", "final_observation"):
        if key in infos:
            return infos[key]
    raise EnvError(
        f"{what}: its autoreset mode is SAME_STEP, but its infos have no final_obs; the value of a truncated episode "
        "needs it"
    )


def _has_entry(infos: Mapping[str, Any], key: str, index: int) -> bool:
    """Whether the entry `key` is valid for this env. Gymnasium stores this under `_` + `key`."""
    marks = infos.get(f"_{key}")
    return marks is None or bool(np.asarray(marks).reshape(-1)[index])


def _of_env(values: object, index: int, count: int | None = None) -> Any:
    """One env's entry of an array, list or tuple; any other value is returned as it is."""
    if isinstance(values, Mapping):
        return {key: _of_env(part, index) for key, part in values.items() if not str(key).startswith("_")}
    if not isinstance(values, (np.ndarray, list, tuple)) or len(values) <= index or count not in (None, len(values)):
        return values
    value = values[index]
    return value.item() if isinstance(value, np.generic) else value
