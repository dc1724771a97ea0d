"""OldGym: an env of the old gym interface (a step of four values, `seed()`) as a Gymnasium env.

shimmy's `GymV21CompatibilityV0` does this for envs of the old `gym` package, and only where that package, unmaintained
and at odds with NumPy 2, is installed. Classes that follow the interface without it are common; nothing here imports
it, spaces are told apart by the names of their classes.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces

from fasttrain.errors import EnvError, EnvSpecError


class OldGym(gymnasium.Env[Any, Any]):
    """Adapts `old`, whose other attributes and methods stay reachable; envs of gym 0.22 to 0.26 work too.

    A `done` is a truncation where `info["TimeLimit.truncated"]` says so, as gym's own TimeLimit did.
    """

    def __init__(self, old: Any) -> None:
        self.old = old
        self.observation_space = converted(old.observation_space, "observation_space")
        self.action_space = converted(old.action_space, "action_space")
        self.metadata = getattr(old, "metadata", None) or {}
        self.render_mode = getattr(old, "render_mode", None)
        self._reset_takes = {"seed", "options"} & set(inspect.signature(old.reset).parameters)  # from gym 0.22 on

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        given = {"seed": seed, "options": options}
        arguments = {name: given[name] for name in self._reset_takes if given[name] is not None}
        if seed is not None and "seed" not in arguments and hasattr(self.old, "seed"):
            self.old.seed(seed)
        answer = self.old.reset(**arguments)
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
            return answer
        return answer, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        answer = self.old.step(action)
        if len(answer) == 5:
            return answer  # type: ignore[no-any-return]
        if len(answer) != 4:
            raise EnvError(
                f"env {self.old}: step() returned {len(answer)} values; env.api=gym means (observation, reward, done, "
                "info)"
            )
        observation, reward, done, info = answer
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        return self.old.render()

    def close(self) -> None:
        if hasattr(self.old, "close"):
            self.old.close()

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set on the old env what is its own, so that `VecEnv.set_attr` reaches the game and not this adapter."""
        if not (hasattr(self.old, name) or force):
            return False
        setattr(self.old, name, value)
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "old":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.old, name)

    def __str__(self) -> str:
        return str(self.old)


def converted(space: Any, what: str) -> spaces.Space[Any]:
    """The Gymnasium space of a space of the old gym, recognised by the name of its class; Gymnasium's stay.

    Raises:
        EnvSpecError: it is of another kind.
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    makers: dict[str, Callable[[], spaces.Space[Any]]] = {
        "Discrete": lambda: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
        "Box": lambda: spaces.Box(space.low, space.high, space.shape, space.dtype),
        "MultiDiscrete": lambda: spaces.MultiDiscrete(space.nvec),
        "MultiBinary": lambda: spaces.MultiBinary(space.n),
        "Tuple": lambda: spaces.Tuple(tuple(converted(part, what) for part in space.spaces)),
        # OrderedDict: Gymnasium would sort the keys of a dict, and the order is that of the action's heads.
        "Dict": lambda: spaces.Dict(OrderedDict((key, converted(part, what)) for key, part in space.spaces.items())),
    }
    if kind not in makers:
        found = "nothing" if space is None else f"{type(space).__module__}.{kind}"
        raise EnvSpecError(f"{what} must be a space of gym or gymnasium ({', '.join(makers)}), found {found}")
    return makers[kind]()
