"""NativeVecEnv: a `NativeGame` (N games in one process, stepped by compiled code) as an SB3 vector env."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array
from fasttrain.envs.masks import mask_width
from fasttrain.envs.protocol import NativeGame
from fasttrain.envs.tasks import with_task
from fasttrain.envs.user_code import blame
from fasttrain.errors import EnvError, EnvSpecError, FastTrainError
from fasttrain.vec.base import SlotVecEnv, copy_observations, empty_slots


def check_game(game: Any) -> None:
    """Check that `game` has the members of a `NativeGame`. Raises EnvSpecError: one is missing or does not fit."""
    name, needed = type(game).__name__, ("num_envs", "observation_space", "action_space", "final_observations", "bind",
                                         "reset", "step", "episode_info", "opponents_ns")  # fmt: skip
    if missing := [member for member in needed if not hasattr(game, member)]:
        raise EnvSpecError(f"the native game {name} lacks {', '.join(missing)}: see fasttrain.envs.protocol.NativeGame")
    if not isinstance(game.observation_space, spaces.Box) or isinstance(game.action_space, spaces.Box):
        raise EnvSpecError(f"the native game {name}: observations must be a Box, actions Discrete or MultiDiscrete")
    shape, expected = np.shape(game.final_observations), (game.num_envs, *game.observation_space.shape)
    if shape != expected:
        raise EnvSpecError(f"the native game {name}: final_observations has shape {shape}, expected {expected}")


class NativeVecEnv(SlotVecEnv):
    """N games of one `NativeGame`, which writes its steps into `slots`.

    Args:
        game: the games. `env_method` and `get_attr` reach its other public methods and attributes.
        seed: at the next reset env i gets the seed `seed + i`, as after `VecEnv.seed(seed)`.
        tasks: reset options by name, for a game with a method `set_options`; `set_tasks` chooses one for each env.
    """

    def __init__(
        self, game: NativeGame, seed: int | None = None, tasks: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        check_game(game)
        self.game = game
        self._task_names, self._task_options = ["", *(tasks or {})], [{}, *(tasks or {}).values()]
        self.tasks: Int64Array = np.zeros((2, game.num_envs), np.int64)  # task numbers (2, N): present, next episode
        width = mask_width(game.action_space)
        self.slots = empty_slots(game.observation_space, game.action_space, game.num_envs, width)
        super().__init__(game.num_envs, game.observation_space, game.action_space)
        self._ask("bind", self.slots)
        if seed is not None:
            self.seed(seed)

    def reset(self) -> VecEnvObs:
        self._pending_actions = None
        self._ask("reset", np.arange(self.num_envs, dtype=np.int64), self._seeds)
        self._reset_seeds()
        self.clear_slots()
        self.tasks[0] = self.tasks[1]
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        self.slots.actions[...] = actions
        self._ask("step")
        ended = self.count_step()
        self.slots.finished = [self._finish(index) for index in ended.tolist()] if ended.size else []

    def _ask(self, method: str, *arguments: object) -> None:
        try:
            getattr(self.game, method)(*arguments)
        except FastTrainError:
            raise
        except Exception as error:  # the user's code raised it
            raise EnvError(f"{type(self.game).__name__}.{method} failed: {blame(error)}") from error

    @property
    def opponents_turn(self) -> BoolArray:
        """(N,) True where the next decision is the opponent's; only for games that stop at both sides' decisions."""
        turn: BoolArray = self.game.opponents_turn  # type: ignore[attr-defined]
        return turn

    def step_listed(self, indices: Int64Array, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """Make one decision in these envs (M,) only, of a game that stops at both sides' decisions.

        Returns the episodes that ended. Writes only the slots of these envs, and does not count returns and lengths:
        only the caller knows which side acted.
        """
        slots = self.slots
        slots.actions[indices] = actions
        self.game.step_listed(indices)  # type: ignore[attr-defined]
        ended = indices[slots.terminations[indices] | slots.truncations[indices]]
        return [self._finish(index) for index in ended.tolist()]

    def _finish(self, index: int) -> FinishedEpisode:
        info = self.game.episode_info(index)
        if task := self.tasks[0, index]:
            info = with_task(info, self._task_names[task])
        self.tasks[0, index] = self.tasks[1, index]
        return self.end_episode(index, self.game.final_observations[index].copy(), info)

    def set_tasks(self, numbers: Int64Array, envs: Int64Array | slice) -> None:
        """Choose the tasks of the next games of these envs. Number 0: no task; k: the k-th of `tasks`."""
        rows = np.arange(self.num_envs, dtype=np.int64)[envs]
        self.tasks[1, rows] = numbers
        for number in np.unique(numbers):
            self._ask("set_options", self._task_options[number], rows[self.tasks[1, rows] == number])

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        if options:
            raise EnvError("a native game takes no reset options: use env_method or set_attr to change its settings")
        super().set_options(options)

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """Call a method of the game once.

        A method with an `indices` parameter receives the list of env indices (None for all). It may return a list with
        one entry per index; any other value is repeated. A method without this parameter acts on all envs: calling it
        for some envs only is an error.
        """
        method = getattr(self.game, name)
        chosen = self.env_indices(indices)
        if "indices" not in inspect.signature(method).parameters:
            self._only_all(chosen, f"the method {name!r} of {type(self.game).__name__}")
            return [method(*args, **kwargs)] * len(chosen)
        result = method(*args, indices=None if indices is None else chosen, **kwargs)
        return result if isinstance(result, list) and len(result) == len(chosen) else [result] * len(chosen)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The game's attribute, one value per env: the rows of an (N, ...) array, or the same value repeated."""
        default = [None] if attr_name == "render_mode" else []  # SB3's constructor asks every env for its render mode
        value = getattr(self.game, attr_name, *default)
        chosen = self.env_indices(indices)
        if self._is_per_env(value):
            return list(value[chosen])
        return [value] * len(chosen)

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Set the game's attribute: in the rows of an (N, ...) array, or a plain attribute for all envs at once."""
        chosen = self.env_indices(indices)
        current = getattr(self.game, attr_name, None)
        if self._is_per_env(current):
            current[chosen] = value
            return
        self._only_all(chosen, f"the attribute {attr_name!r} of {type(self.game).__name__}")
        setattr(self.game, attr_name, value)

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """One frame per env, from the game's `render(index)`."""
        if not hasattr(self.game, "render"):
            return super().get_images()
        return [self.game.render(index) for index in range(self.num_envs)]

    def close(self) -> None:
        if hasattr(self.game, "close"):
            self.game.close()

    def _is_per_env(self, value: object) -> TypeGuard[NDArray[Any]]:
        return isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == self.num_envs

    def _only_all(self, chosen: list[int], what: str) -> None:
        if len(set(chosen)) != self.num_envs:
            raise EnvError(
                f"{what} is shared by all {self.num_envs} envs and cannot be used for envs {chosen} alone: "
                "give it an `indices` parameter in the game, or call it for all envs"
            )
