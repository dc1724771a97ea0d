"""The wrappers that `make_env` puts around an env, so that all envs look the same to the trainer."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.batch import BoolArray
from fasttrain.envs.answers import reset_inner
from fasttrain.envs.masks import MISSING, AdaptsOld, is_legal, property_of
from fasttrain.envs.user_code import attribute_of
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.spec.infos import enemy_turn_ms
from fasttrain.terminal import value_text


class Stagger(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates each episode that begins with a seed after 1 to `most` steps; the number is drawn from the seed.

    A training seeds the first reset of an env and no later reset. A resumed run seeds the env again only if its first
    episode has not ended.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], most: int) -> None:
        super().__init__(env)
        self._most, self._left = most, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._left = 0 if seed is None else int(np.random.default_rng([seed, self._most]).integers(self._most)) + 1
        return self.env.reset(seed=seed, options=options)

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._left -= 1
        return observation, reward, terminated, truncated or (self._left == 0 and not terminated), info


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action up to `times` times. Rewards are added up; observation and info are those of the last step.

    The repetition ends early if the episode ends, or if the mask of an inner `ActionMasks` forbids the action. The time
    `info["perf"]["enemy_turn_ms"]` is also added up. Episode lengths, `total_timesteps` and rollouts count decisions.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int, masked: bool) -> None:
        super().__init__(env)
        self._times = times
        self._masks: Callable[[], BoolArray] | None = env.get_wrapper_attr("action_masks") if masked else None

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reward: Any
        observation, reward, terminated, truncated, info = self.env.step(action)
        spent_ms = enemy_turn_ms(info)
        for _ in range(self._times - 1):
            if terminated or truncated or (self._masks and not is_legal(self.action_space, self._masks(), action)):
                break
            observation, more, terminated, truncated, info = self.env.step(action)
            reward = reward + more
            spent_ms += enemy_turn_ms(info)
        if spent_ms:
            perf = info.get("perf")
            info = {**info, "perf": {**(perf if isinstance(perf, Mapping) else {}), "enemy_turn_ms": spent_ms}}
        return observation, reward, terminated, truncated, info


class DictActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Turns a Dict action space of Discrete spaces into a MultiDiscrete one, in the order of the (sorted) keys.

    A Dict inside a Dict is flattened. The env receives a Dict, in which each value includes its space's `start`.
    An outer `ActionMasks` puts masks given by name into the same order; it reads the attribute `action_heads`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], action_heads: spaces.Dict) -> None:
        super().__init__(env)
        heads = list(_heads(action_heads, ""))
        if not heads:
            raise EnvSpecError(f"env {self.unwrapped}: the action space is a Dict without any Discrete space")
        self.action_heads = action_heads
        self.action_space = spaces.MultiDiscrete([int(head.n) for head in heads])

    def step(self, action: Iterable[int]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.env.step(_named(self.action_heads, iter(action)))


def _heads(space: spaces.Dict, where: str) -> Iterator[spaces.Discrete]:
    for key, part in space.spaces.items():
        if isinstance(part, spaces.Dict):
            yield from _heads(part, f"{where}{key}.")
        elif isinstance(part, spaces.Discrete):
            yield part
        else:
            raise EnvSpecError(
                f"the action space is a Dict whose head {where}{key} is {part}: one policy can only choose heads that "
                "are Discrete; make it Discrete (bins for a Box), or turn the actions into one space in a wrapper "
                "(env.wrappers)"
            )


def _named(space: spaces.Dict, values: Iterator[Any]) -> dict[str, Any]:
    return {
        key: _named(part, values) if isinstance(part, spaces.Dict) else np.int64(next(values) + part.start)  # type: ignore[attr-defined]
        for key, part in space.spaces.items()
    }


# `episode` has Monitor's return and length, `perf` the time of the opponents' turns.
ALWAYS_KEPT = ("episode", "perf")


class LeanInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Drops all info entries except `keys`, so that a worker pickles less. The last info of an episode is not changed.

    Observations, rewards and ends of episodes do not change, so learning is exactly the same. The wrapper must be
    outside of wrappers that read other entries, such as `ActionMasks`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], keys: Iterable[str] = ()) -> None:
        super().__init__(env)
        self._keys = tuple(dict.fromkeys((*keys, *ALWAYS_KEPT)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_inner(self.env, seed, options)
        return observation, self._select(info)

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            info = self._select(info)
        return observation, reward, terminated, truncated, info

    def _select(self, info: Any) -> dict[str, Any]:
        return {key: info[key] for key in self._keys if key in info} if info else info


class InfoOneHot(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Appends a one-hot of an info entry, such as the phase of a game, to the observation, a Box with one axis.

    Args:
        key: entry of the info of every reset and step; an integer from 0 to `count` - 1, or one of `values`.
        count: the number of values.
        values: the values, if they are not the integers from 0 to `count` - 1.

    Raises:
        EnvSpecError: the observation is not a Box with one axis, or the info has no such entry or value.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], key: str, count: int = 0, values: Iterable[Any] | None = None
    ) -> None:
        super().__init__(env)
        self.key, self.values = key, [*(range(count) if values is None else values)]
        if not self.values:
            raise EnvSpecError("InfoOneHot needs values, or their count")
        self.observation_space: Any = with_flags(env.observation_space, len(self.values), "InfoOneHot")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_inner(self.env, seed, options)
        return self._with_one_hot(observation, info), info

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_one_hot(observation, info), reward, terminated, truncated, info

    def _with_one_hot(self, observation: Any, info: Mapping[str, Any]) -> Any:
        if info.get(self.key) not in self.values:
            values = ", ".join(map(repr, self.values))
            raise EnvSpecError(
                f"info[{self.key!r}] is {info.get(self.key)!r}; after every reset and step it must be one of {values}"
            )
        flags = [value == info[self.key] for value in self.values]
        return np.concatenate([observation, flags], dtype=self.observation_space.dtype)


def with_flags(space: spaces.Space[Any], count: int, what: str) -> spaces.Box:
    """The space with `count` more columns from 0 to 1. Raises EnvSpecError: `space` is no Box with one axis."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise EnvSpecError(f"{what} appends to an observation that is a Box with one axis, this one is {space}")
    ones = np.ones(count, space.dtype)
    low, high = np.concatenate([space.low, 0 * ones]), np.concatenate([space.high, ones])
    return spaces.Box(low, high, dtype=space.dtype.type)


class MemoryInputs(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the last action and the last reward to the observation; zeros at the start of an episode.

    They are appended to a Box with one axis, the action first, or become the keys `last_action` and `last_reward` of a
    Dict. The action is flattened as by Gymnasium: a Discrete action becomes one-hot. A model that was trained this way
    needs an env in the same wrapper when it is deployed: `MemoryInputs(env, ("action", "reward"))`. The wrapper must be
    outside of wrappers that change actions or rewards.

    Args:
        inputs: "action", "reward", or both.

    Raises:
        EnvSpecError: the observation is neither a Dict nor a Box with one axis, or the Dict has such a key already.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], inputs: Iterable[str]) -> None:
        super().__init__(env)
        space, what = env.observation_space, f"algo.memory_inputs={value_text([*inputs])}: env {env.unwrapped}"
        shapes = {"action": (spaces.flatdim(env.action_space),), "reward": (1,)}
        parts = {f"last_{name}": spaces.Box(-np.inf, np.inf, shapes[name]) for name in inputs}
        self._zeros = {name: np.zeros(part.shape, np.float32) for name, part in parts.items()}
        if isinstance(space, spaces.Dict):
            if taken := {*space.spaces} & {*parts}:
                raise EnvSpecError(f"{what} observes {min(taken)} already; rename that key in a wrapper (env.wrappers)")
            self.observation_space = spaces.Dict({**space.spaces, **parts})
        elif isinstance(space, spaces.Box) and len(space.shape) == 1:
            boxes, dtype = [space, *parts.values()], np.result_type(space.dtype, np.float32)
            low, high = (np.concatenate([getattr(box, side) for box in boxes]) for side in ("low", "high"))
            self.observation_space = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
        else:
            raise EnvSpecError(
                f"{what} observes {space}; numbers are added to a Box with one axis or to a Dict: put images into a "
                "Dict, or gymnasium.wrappers:FlattenObservation into env.wrappers"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_inner(self.env, seed, options)
        return self._with({name: np.zeros_like(part) for name, part in self._zeros.items()}, observation), info

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        last: dict[str, Any] = {"last_action": spaces.flatten(self.env.action_space, action), "last_reward": [reward]}
        parts = {name: np.asarray(last[name], np.float32) for name in self._zeros}
        return self._with(parts, observation), reward, terminated, truncated, info

    def _with(self, parts: dict[str, Any], observation: object) -> object:
        if isinstance(observation, dict):
            return {**observation, **parts}
        return np.concatenate([observation, *parts.values()]).astype(self.observation_space.dtype, copy=False)


def reset_takes(env: Any) -> set[str]:
    """Those of the arguments `seed` and `options` that `reset` of the innermost env accepts."""
    parameters = inspect.signature(attribute_of(env, "unwrapped", env).reset).parameters
    both = {"seed", "options"}
    return both if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else both & {*parameters}


def _reset(env: Any, takes: set[str], seed: int | None, options: dict[str, Any] | None) -> Any:
    arguments = {"seed": seed, "options": options}
    if seed is not None and "seed" not in takes:
        if callable(attribute_of(env, "seed")):
            env.seed(seed)
        elif isinstance(env, gymnasium.Env):
            gymnasium.Env.reset(env, seed=seed)
    return env.reset(**{name: arguments[name] for name in takes if arguments[name] is not None})


def has_running_statistics(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether this layer normalizes by running means and variances, as Gymnasium's NormalizeObservation does."""
    parts = ([attribute_of(part, name) for name in ("var", "count", "mean")] for part in vars(env).values())
    return any(not (callable(part[2]) or any(each is None for each in part)) for part in parts)


class PlainReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes `reset` accept `seed` and `options` for an env whose `reset` does not. The seed seeds `np_random`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._takes = reset_takes(env)
        self.step = env.step  # type: ignore[method-assign]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return _reset(self.env, self._takes, seed, options)  # type: ignore[no-any-return]


class OldGym(AdaptsOld, gymnasium.Env[Any, Any]):
    """Adapts an env of the old gym interface, up to gym 0.26. Its other attributes and methods can be used as before.

    A `done` is a truncation if `info["TimeLimit.truncated"]` is true, as in gym's own TimeLimit.
    """

    def __init__(self, old: Any) -> None:
        self.old = old
        self.observation_space = converted(old.observation_space, "observation_space")
        self.action_space = converted(old.action_space, "action_space")
        self.metadata = attribute_of(old, "metadata") or {}
        self.render_mode = attribute_of(old, "render_mode")
        self._reset_takes = reset_takes(old)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        answer = _reset(self.old, self._reset_takes, seed, options)
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
            return answer
        return answer, {}

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        answer = self.old.step(action)
        if len(answer) == 5:
            return answer  # type: ignore[no-any-return]
        if len(answer) != 4:
            raise EnvError(
                f"env {self.old}: step() returned {len(answer)} values; the old gym interface has (observation, "
                "reward, done, info)"
            )
        observation, reward, done, info = answer
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        return self.old.render()

    def close(self) -> None:
        if close := attribute_of(self.old, "close"):
            close()

    def set_wrapper_attr(self, name: str, value: object, *, force: bool = True) -> bool:
        """Set the attribute on the old env, so that `VecEnv.set_attr` reaches the game and not this adapter."""
        if attribute_of(self.old, name, MISSING) is MISSING and not force:
            return False
        setattr(self.old, name, value)
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "old":  # while unpickling, `self.old` does not exist yet
            raise AttributeError(name)
        return getattr(self.old, name)

    def __str__(self) -> str:
        return str(self.old)


def converted(space: spaces.Space[Any], what: str) -> spaces.Space[Any]:
    """Convert a space of the old gym, recognized by its class name, to Gymnasium. Gymnasium's spaces are not changed.

    Raises EnvSpecError: `space` is another kind of object.
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
        # OrderedDict: Gymnasium would sort the keys of a dict, but their order is the order of the action's heads.
        "Dict": lambda: spaces.Dict(OrderedDict((key, converted(part, what)) for key, part in space.spaces.items())),
    }
    if kind not in makers:
        name = "nothing" if space is None else f"{type(space).__module__}.{kind}"
        raise EnvSpecError(f"{what} must be a space of gym or gymnasium ({', '.join(makers)}), found {name}")
    return makers[kind]()


class TwoSided(gymnasium.Wrapper[Any, Any, Any, Any]):
    """For self-play: puts `opponents_turn` into every info, and does not step the env at a negative action.

    The entry is 0 if the learner acts next, else the number of the opponent that acts: the env's `seat_to_decide`, or
    1. A negative action lets a vector env step some envs while the others wait. This wrapper is the outermost one.

    Raises:
        EnvSpecError: the env has no property `opponents_turn`, or its actions may be negative.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        turn = property_of(env, TURN)
        if turn is None and attribute_of(env, TURN) is None:
            raise EnvSpecError(
                f"env {env.unwrapped} does not support self-play: it has no property {TURN} (True if the next step is "
                "the opponent's decision)"
            )
        if not isinstance(env.action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise EnvSpecError(f"env {env.unwrapped}: self-play needs discrete actions, the env has {env.action_space}")
        self._turn = turn or partial(env.get_wrapper_attr, TURN)
        self._last: object = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._last, info = reset_inner(self.env, seed, options)
        return self._last, self._with_turn(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if np.min(action) < 0:
            return self._last, 0.0, False, False, self._with_turn({})
        self._last, reward, terminated, truncated, info = self.env.step(action)
        return self._last, reward, terminated, truncated, self._with_turn(info)

    def _with_turn(self, info: dict[str, Any]) -> dict[str, Any]:
        turn = int(self._turn())
        if turn and (seat := attribute_of(self.env, "seat_to_decide")) is not None:
            turn = max(1, int(seat))
        return {**(info or {}), TURN: turn}
