"""GymVecEnv: a Gymnasium `VectorEnv`, which steps N envs in one call, behind the slots.

Such envs begin the next episode in three ways (their metadata's `autoreset_mode`). Same step: as SB3 has it. Disabled:
the envs that ended, and only they, are reset before the step returns. Next step: the step after an episode's end only
resets, whatever its action; the slots name these rows in `resets`, and whoever learns leaves them out. An env may name
rows whose next action is none in `infos["rests"]` (N,): an agent that is out of a game, or that waits for the others;
what such a row gains, and its end, belong to its decision before.
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
from fasttrain.envs.masks import KEYS, METHOD, FlatMasks, mask_key, mask_method, mask_width, told_mask, without_mask
from fasttrain.envs.user_code import blame
from fasttrain.errors import EnvError, EnvSpecError, FastTrainError
from fasttrain.vec.base import SlotVecEnv, copy_observations, empty_slots

NO_ROW: BoolArray = np.zeros(0, np.bool_)
Make = Callable[..., VectorEnv[Any, Any, Any]]  # called with num_envs=N


def registered(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None = None) -> Make:
    """What makes the `vector_entry_point` that a registered id has.

    Raises:
        EnvSpecError: there is no such id, or it has none.
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
    """N envs of one `VectorEnv`, whose one random generator serves all of them.

    Args:
        make: called with `num_envs`.
        what: the env as the user named it, for messages.
        use_masks: read action masks where the env has them: by a method `action_masks()` (N, A), in its infos, or as a
            part of its Dict observation.
        masks: what they are called, where that is not `action_masks` or `action_mask`.

    Raises:
        EnvSpecError: it cannot be made, or does not say how it resets.
    """

    def __init__(self, make: Make, num_envs: int, what: str, use_masks: bool = True, masks: str | None = None) -> None:
        self._what = what
        env = self._ask("the constructor", lambda: make(num_envs=num_envs), EnvSpecError)
        if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
            raise EnvSpecError(f"{what} made {env!r:.80}, expected a gymnasium.vector.VectorEnv of {num_envs} envs")
        self.venv: VectorEnv[Any, Any, Any] = env
        self.mode = _mode_of(env, what)
        space, action_space = env.single_observation_space, env.single_action_space
        observations, infos = self._ask("reset", env.reset)
        found = RowMasks(env, infos, masks) if use_masks else None
        self._masks = found if found is not None and found.there else None
        keys = KEYS if masks is None else (masks,)
        self._mask_key, self._only_key = mask_key(space, keys), None
        if self._mask_key:
            self._mask_key, self._only_key, space = without_mask(space, keys)
        self.slots = empty_slots(space, action_space, num_envs, mask_width(action_space) if self._masks else 0)
        super().__init__(num_envs, space, action_space)
        try:
            self._show(observations, infos)
        except EnvError as error:
            raise EnvSpecError(str(error)) from error

    @property
    def resets_late(self) -> bool:
        """Whether there are steps in which some rows only reset, or rest: stock SB3 would learn from them."""
        return self.mode is AutoresetMode.NEXT_STEP or bool(self.venv.metadata.get("rows_rest"))

    def reset(self) -> VecEnvObs:
        self._pending_actions = None
        seed = self._seeds[0]
        observations, infos = self._ask("reset", lambda: self.venv.reset(seed=seed))
        self._reset_seeds()
        self.clear_slots()
        self.slots.resets = None
        self._show(observations, infos)
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots = self.slots
        slots.actions[...] = actions
        observations, rewards, terminations, truncations, infos = self._ask(
            "step", lambda: self.venv.step(slots.actions)
        )
        slots.resets = slots.rests
        slots.rewards[:], slots.terminations[:], slots.truncations[:] = rewards, terminations, truncations
        if slots.resets is not None:
            self._lengths[slots.resets] -= 1
            if self.mode is AutoresetMode.NEXT_STEP:
                slots.rewards[slots.resets] = 0.0
                slots.terminations[slots.resets] = slots.truncations[slots.resets] = False
        ended = self.count_step()
        same = self.mode is AutoresetMode.SAME_STEP
        last = _last_observations(infos, self._what) if same and ended.size else observations
        told = infos.get("final_info", infos) if same else infos
        slots.finished = [self._finish(index, last, told) for index in ended.tolist()]
        over = slots.terminations | slots.truncations
        if self.mode is AutoresetMode.DISABLED and ended.size:
            if self._masks is not None and self._masks.in_infos:  # the reset tells of those that it resets
                self._read_masks(observations, infos, ~over)
            observations, infos = self._ask("reset", lambda: self.venv.reset(options={"reset_mask": over}))
        self._show(observations, infos, over)

    def _show(self, observations: object, infos: Mapping[str, Any], over: BoolArray = NO_ROW) -> None:
        """What the next actions act on."""
        slots = self.slots
        rests: BoolArray = over if self.mode is AutoresetMode.NEXT_STEP else infos.get("rests", NO_ROW)
        slots.rests = rests if rests.any() else None
        if self._masks is not None:
            split = self.mode is AutoresetMode.DISABLED and self._masks.in_infos and over.any()
            self._read_masks(observations, infos, over if split else ~rests if rests.size else None)
        each_array(np.copyto, slots.observations, self._seen(observations))

    def _read_masks(self, observations: object, infos: Mapping[str, Any], rows: BoolArray | None) -> None:
        """Of some rows; those of the others are not asked for, as of an episode that is over."""
        masks: Any = self.slots.action_masks
        if rows is None:
            rows = np.ones(self.num_envs, np.bool_)
        elif self.resets_late:
            masks[~rows] = True
        try:
            self._ask(METHOD, lambda: self._masks.read(observations, infos, rows, masks))  # type: ignore[union-attr]
        except EnvError as error:
            raise EnvError(f"{self._what}: {error}") from error

    def _seen(self, observations: Any) -> Any:
        """Without the mask."""
        if not self._mask_key:
            return observations
        if self._only_key is not None:
            return observations[self._only_key]
        return {key: part for key, part in observations.items() if key != self._mask_key}

    def _finish(self, index: int, last: object, infos: Mapping[str, Any]) -> FinishedEpisode:
        final = each_array(np.array, self._seen(select_rows(last, index)))
        here = {key: values for key, values in infos.items() if not str(key).startswith("_") and key != "rests"}
        told = {key: _plain(values, index) for key, values in here.items() if _told(infos, key, index)}
        return self.end_episode(index, final, told)

    def _ask(self, what: str, question: Callable[[], Any], kind: type[FastTrainError] = EnvError) -> Any:
        """What the env's own code raises is told in one line, with the place in it."""
        try:
            return question()
        except FastTrainError:
            raise
        except Exception as error:
            raise kind(f"{self._what}: {what} failed: {blame(error)}") from error

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        if options:
            raise EnvError(f"{self._what}: a VectorEnv takes reset options for all envs alike; give them as env.kwargs")
        super().set_options(options)

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """Call the VectorEnv's method once; an answer of N entries is one per env, any other is all envs'."""
        answer = self._ask(name, lambda: getattr(self.venv, name)(*args, **kwargs))
        return [_plain(answer, index) for index in self._all(indices, name)]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        default = [None] if attr_name == "render_mode" else []  # SB3's constructor asks every env for its render mode
        value = getattr(self.venv, attr_name, *default)
        return [_plain(value, index, self.num_envs) for index in self.env_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        self._all(indices, attr_name)
        setattr(self.venv.unwrapped, attr_name, value)

    def _all(self, indices: VecEnvIndices, name: str) -> list[int]:
        chosen = self.env_indices(indices)
        if len({*chosen}) != self.num_envs:
            raise EnvError(f"{self._what}: {name!r} is of all {self.num_envs} envs together, not of {chosen} alone")
        return chosen

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        frames: Any = self.venv.render() if self.venv.render_mode == "rgb_array" else None
        return super().get_images() if frames is None else list(frames)

    def close(self) -> None:
        self.venv.close()


class RowMasks:
    """The masks (N, A) of a VectorEnv: by a method, in its infos, or a part of its Dict observation.

    Args:
        infos: of a reset that was just made.
        named: as in `find_mask_convention`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], infos: Mapping[str, Any], named: str | None) -> None:
        self._keys, self._space = KEYS if named is None else (named,), env.single_action_space
        self._method = mask_method(env, named or METHOD)
        self._in_observations = mask_key(env.single_observation_space, self._keys) is not None
        self.in_infos = self._method is None and not self._in_observations
        self.there = not self.in_infos or told_mask(infos, self._keys) is not None
        self._flat = FlatMasks(mask_width(self._space) if self.there else 0)
        place = "infos" if self.in_infos else "observation"
        self._place = f"{self._keys[-1]}()" if self._method else f"{place}[{self._keys[0]!r}]"

    def read(self, observations: Any, infos: Mapping[str, Any], rows: BoolArray, into: BoolArray) -> None:
        """Write the masks of `rows` (N,) into their rows of `into` (N, A).

        Raises:
            EnvError: they have none, or one of the wrong length or kind.
        """
        places = infos if self.in_infos else observations
        given: Any = told_mask(places, self._keys) if self._method is None else self._method()
        if isinstance(given, Mapping):  # a mask of each head
            given = np.hstack([np.asarray(part) for name, part in given.items() if not str(name).startswith("_")])
        told = self._told(given, infos, len(rows))
        if (missing := rows & ~told).any():
            named = ", ".join(map(str, np.flatnonzero(missing)))
            raise EnvError(f"env {named} gave no action mask in {self._place}; every reset and step must give one")
        try:
            if isinstance(given, np.ndarray) and given.dtype != object and given.size == into.size:
                into[rows] = self._flat.legal(given.reshape(into.shape)[rows])
                return
            for row in np.flatnonzero(rows):
                into[row] = self._flat(given[row])
        except (EnvError, ValueError) as error:  # ValueError: NumPy's, of ragged lists
            raise EnvError(f"{self._place}: {error} (action space {self._space})") from error

    def _told(self, given: Any, infos: Mapping[str, Any], count: int) -> BoolArray:
        """Of which envs there is a mask: Gymnasium's infos say it beside each key."""
        if isinstance(given, np.ndarray) and given.dtype != object:
            told = np.arange(count) < len(given)
        else:
            told = np.array([given is not None and row < len(given) and given[row] is not None for row in range(count)])
        of = told_mask(infos, tuple(f"_{key}" for key in self._keys)) if self.in_infos else None
        return told if of is None else told & np.asarray(of, np.bool_)


def _mode_of(env: VectorEnv[Any, Any, Any], what: str) -> AutoresetMode:
    said = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(said)
    except ValueError as error:
        raise EnvSpecError(
            f"{what} does not say when it resets (metadata['autoreset_mode'] is {said!r}): name one of "
            "gymnasium.vector.AutoresetMode there; a wrong guess would be learnt from"
        ) from error


def _last_observations(infos: Mapping[str, Any], what: str) -> object:
    """The (N, ...) observations before the reset, of which only the ended rows count."""
    for key in ("final_obs", "final_observation"):
        if key in infos:
            return infos[key]
    raise EnvError(f"{what}: it resets in the same step and its infos have no final_obs, by which returns go on")


def _told(infos: Mapping[str, Any], key: str, index: int) -> bool:
    """Gymnasium's infos say beside each key which envs it is of."""
    of = infos.get(f"_{key}")
    return of is None or bool(np.asarray(of).reshape(-1)[index])


def _plain(values: object, index: int, count: int | None = None) -> Any:
    """One env's part of a value per env; what is no such value belongs to all."""
    if isinstance(values, Mapping):
        return {key: _plain(part, index) for key, part in values.items() if not str(key).startswith("_")}
    if not isinstance(values, (np.ndarray, list, tuple)) or len(values) <= index or count not in (None, len(values)):
        return values
    found = values[index]
    return found.item() if isinstance(found, np.generic) else found
