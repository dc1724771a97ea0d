"""Tasks of a curriculum: each episode is reset with the options of the task that the trainer chose for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from fasttrain.batch import Int64Array
from fasttrain.errors import EnvSpecError
from fasttrain.spec.setting import did_you_mean

TASK = "task"  # entry of an episode's last info with the name of the task
MOST_NAMED = 8


class _WatchedOptions(dict[Any, Any]):
    """Reset options that record which keys were read. Iterating over the options counts as reading all options."""

    def __init__(self, options: Mapping[Any, Any]) -> None:
        super().__init__(options)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().setdefault(key, default)

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __iter__(self) -> Iterator[Any]:
        self.read |= super().keys()
        return super().__iter__()

    def keys(self) -> Any:
        self.read |= super().keys()
        return super().keys()

    def items(self) -> Any:
        self.read |= super().keys()
        return super().items()

    def values(self) -> Any:
        self.read |= super().keys()
        return super().values()


class TaskOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the options of the chosen task to every `reset`, and names the task in the last info of the episode.

    The first `reset` with a task raises EnvSpecError if the environment does not read one of its options.

    Args:
        tasks: reset options by the name of the task.

    Attributes:
        choice: int64 array (1,), the number of the next episode's task. 0: no options, k: those of the k-th task. The
            array may be a view of memory that the trainer writes.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], tasks: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(env)
        self.choice: Int64Array = np.zeros(1, np.int64)
        self._names, self._options = [*tasks], [*tasks.values()]
        self._task = 0
        self._checked: set[int] = set()  # numbers of tasks whose options have been checked

    def set_task(self, number: int) -> None:
        """Choose the task of the next episode, for an environment without shared memory."""
        self.choice[0] = number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._task = int(self.choice[0])
        if not self._task:
            return self.env.reset(seed=seed, options=options)
        own = self._options[self._task - 1]
        if self._task in self._checked:
            return self.env.reset(seed=seed, options={**(options or {}), **own})
        self._checked.add(self._task)
        watched = _WatchedOptions({**(options or {}), **own})
        answer = self.env.reset(seed=seed, options=watched)
        if unread := [key for key in own if key not in watched.read]:
            others = sorted(map(str, watched.read - {*own})) if len(watched.read) <= MOST_NAMED else []
            raise EnvSpecError(
                f"curriculum.tasks.{self._names[self._task - 1]}: reset(options=…) of this environment did not read "
                f"{', '.join(map(str, unread))}, so the task changes nothing. "
                + (f"It looked for {', '.join(others)}" if others else "Read the entries of `options` in reset()")
                + did_you_mean(str(unread[0]), others)
            )
        return answer

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._task and (terminated or truncated):
            info = with_task(info, self._names[self._task - 1])
        return observation, reward, terminated, truncated, info


def with_task(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of `info` with the task's name under the key TASK. Raises EnvSpecError if the env itself uses this key."""
    if TASK in info:
        raise EnvSpecError(
            f"the last info of an episode has its own entry {TASK!r}, where curriculum.tasks writes the task's name; "
            "give the entry another name, for example in a wrapper (env.wrappers)"
        )
    return {**info, TASK: name}


def task_options_of(env: gymnasium.Env[Any, Any]) -> TaskOptions | None:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TaskOptions):
            return env
        env = env.env
    return None
