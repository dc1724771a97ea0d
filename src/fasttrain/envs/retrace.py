"""Retrace: a wrapper that records how an env came to its present state, so that a resumed run can restore it.

The state of a Python env cannot be read in general. If its random numbers come from Gymnasium's generator
(`env.np_random`), the state follows from the generator's state at the start of the episode and the actions since then.
An env with other random numbers may offer `get_state()` and `set_state(state)`, with plain values and arrays. This
state is recorded too, but only at the start of each episode: in the middle of an episode, wrappers such as a time limit
have states of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, Protocol

import gymnasium
import numpy as np

from fasttrain.batch import each_array
from fasttrain.envs.answers import as_reward, check_reset, check_step, last_observation
from fasttrain.envs.user_code import attribute_of, blame, process_settings
from fasttrain.spec.plain import from_dict, to_dict
from fasttrain.spec.plugins import OURS

MOST_ACTIONS = 100_000  # most actions of an episode; more would take much memory, and minutes to repeat
MOST_S = 60.0  # most seconds to repeat the actions of one env; this is done for one env after the other
LIBRARIES = ("gymnasium.", "stable_baselines3.", *(f"{name}." for name in OURS))
MOST_PARTS, MOST_DEPTH = 20_000, 12  # limits for reading an env's attributes, so that it takes about 10 ms
SKIPPED = ("env", "spec", "_np_random", "_np_random_seed")
NO_DATA = (gymnasium.Space, property, staticmethod, classmethod, FunctionType, ModuleType, type)


class ActionLog(Protocol):
    """A vector env that records the actions of many `Retrace` envs (`vec.stock.ActionLogVecEnv`)."""

    rows: list[Any]  # actions (N, ...) of all envs, per step
    buf_infos: list[dict[str, Any]]  # infos of the last step, one per env

    def observation_of(self, index: int) -> Any: ...

    def return_of(self, index: int) -> float: ...

    def restore_settings(self, before: dict[str, Any]) -> None: ...


class Retrace(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The outermost wrapper of an env. It records actions, checks last observations and closes the env.

    Recording costs 0.35 µs per step and 1.1 µs per episode. After `log_actions_in` a step costs nothing. The last
    observation of an episode is made to fit its space before the reset. `close()` is called on the env only once, and
    its error does not end the run.

    Args:
        copies: copy the last observation, for envs that reuse its array in `reset`. SB3's loops do not copy.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], copies: bool = False) -> None:
        super().__init__(env)
        self._copies = copies
        self._info: dict[str, Any] = {}  # the info of the last step
        self._close_failed: str | None = None  # the error of close(), as text; None: the env is open
        self._first_seed: int | None = None  # seed of the last seeded reset; an env may use it for more than np_random
        self._begin: dict[str, Any] | None = None  # `_state_of` the env before the episode; None: the reset was seeded
        self._begun = False  # False: there is no episode, or it cannot be repeated
        self._repeated: list[Any] = []  # the actions of this episode that `retrace` has repeated
        self._actions: Any = deque(maxlen=MOST_ACTIONS + 1)  # the actions after `_repeated`; or `rows` of an ActionLog
        self.first_row = 0  # where the running episode begins in `_actions`
        self._inner_step = env.step
        self._total = 0.0
        self._observation: object = None  # not copied, because an env that writes into this array keeps its state there
        self._log: tuple[ActionLog, int] | None = None

    def log_actions_in(self, log: ActionLog, index: int) -> None:
        """Let a vector env record the actions. Then `step` is the inner env's own `step`."""
        self._log = log, index
        self._actions = log.rows
        self.first_row = len(log.rows)
        self.step = self._inner_step  # type: ignore[method-assign]

    def _check_last_observation(self) -> None:
        """Fit the episode's last observation, which SB3's loops have put into the info, to the observation space."""
        info = self._info if self._log is None else self._log[0].buf_infos[self._log[1]]
        if info and "terminal_observation" in info:
            truncated = bool(info.get("TimeLimit.truncated", False))
            last = last_observation(self.observation_space, info["terminal_observation"], not truncated)
            info["terminal_observation"] = each_array(np.array, last) if self._copies else last

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._check_last_observation()
        if self._log is None:
            self._actions.clear()
        self.first_row, self._repeated = len(self._actions), []
        self._begun, self._total = not options and _has_known_generator(self.env), 0.0
        if seed is None:
            self._begin = _state_of(self.env) if self._begun else None
        else:
            self._first_seed, self._begin = seed, None  # the seed is enough to repeat the reset
        before = None if self._log is None else process_settings()
        answer = self.env.reset(seed=seed, options=options)
        if self._log is not None and before and process_settings() != before:
            self._log[0].restore_settings(before)
        check_reset(answer)
        self._observation = answer[0]
        return answer

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(action.copy() if type(action) is np.ndarray else action)
        return self._step(action)

    def _step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        answer = self._inner_step(action)
        try:
            self._observation, self._info = answer[0], answer[4]
        except (LookupError, TypeError):
            check_step(answer)
            raise
        self._total += answer[1] if type(answer[1]) is float else as_reward(answer[1])
        return answer

    def get_wrapper_attr(self, name: str) -> Any:
        """As Gymnasium's. An env whose `__getattr__` raises another error than AttributeError lacks the attribute."""
        try:
            return super().get_wrapper_attr(name)
        except AttributeError:
            raise
        except Exception as error:
            raise AttributeError(f"{name}: {blame(error)}") from error

    def close(self) -> None:
        self.end()

    def end(self) -> str:
        """Close the env, once. Returns the error of its `close()` as text, or an empty string."""
        if self._close_failed is None:
            self._close_failed = close_env(self.env)
        return self._close_failed

    @property
    def steps_begun(self) -> int:
        """Number of steps of the running episode, including one that raised."""
        return len(self._repeated) + len(self._actions) - self.first_row

    def retrace_notes(self) -> dict[str, Any] | None:
        """All that `retrace` needs to bring another env into the present state; None if that is impossible.

        Plain values, except for the actions and the observation.
        """
        if not self._begun or self.steps_begun > MOST_ACTIONS or not _has_known_generator(self.env):
            return None
        try:
            return self._notes()
        except TypeError:  # the env's own state has values that are not plain
            return None

    def _notes(self) -> dict[str, Any]:
        since: Iterator[Any] = itertools.islice(self._actions, self.first_row, None)
        observation, total = self._observation, self._total
        if self._log is not None:
            log, index = self._log
            since = (row[index] for row in since)
            observation, total = log.observation_of(index), log.return_of(index)  # Python 3.12's sum() is more exact
        return {
            "seed": self._first_seed,
            "begin": None if self._begin is None else to_dict(self._begin),
            "now": to_dict(_state_of(self.env)),
            "total": float(total),
            "kept": attribute_digests(self.env),
            "actions": np.asarray([*self._repeated, *since]),
            "observation": observation,
        }

    def retrace(self, notes: Mapping[str, Any] | None, other_seed: int, most_s: float = MOST_S) -> dict[str, Any]:
        """Bring the env into the state that `notes` describe. If that fails, begin an episode with `other_seed`.

        Args:
            notes: from `retrace_notes`; with None an episode with `other_seed` begins at once.
            most_s: give up after this time.

        Returns:
            same: whether the env is in that state; observation: the present observation; mask: from `action_masks()`,
            or None; lost: names of attributes whose values could not be brought back.
        """
        same = False
        if notes is not None:
            try:
                observation = self._repeat(notes, time.monotonic() + most_s)
                same = _equal(observation, notes["observation"]) and to_dict(_state_of(self.env)) == notes["now"]
                same = same and math.isclose(self._total, notes["total"], abs_tol=1e-9)  # sums may round differently
            except Exception:  # an env may raise anything if actions do not fit its state
                same = False
        if not same:
            observation = self.reset(seed=other_seed)[0]
        mask = attribute_of(self.env, "action_masks", lambda: None)()
        lost: list[str] = []
        if notes is not None and same:
            now = attribute_digests(self.env)
            lost = [name for name, digest in notes.get("kept", {}).items() if now.get(name) != digest]
        return {"same": same, "observation": observation, "mask": mask, "lost": lost}

    def _repeat(self, notes: Mapping[str, Any], deadline: float) -> Any:
        if notes["seed"] is not None or notes["begin"] is None:
            observation = self.reset(seed=notes["seed"])[0]
        if notes["begin"] is not None:
            inner: Any = self.env.unwrapped
            if notes["begin"]["np_random"] is not None:
                inner.np_random.bit_generator.state = from_dict(notes["begin"]["np_random"])
            if "own" in notes["begin"]:
                inner.set_state(from_dict(notes["begin"]["own"]))
            observation = self.reset()[0]
        for action in notes["actions"]:
            if time.monotonic() > deadline:
                raise TimeoutError("the episode is too long to repeat")
            observation, _, terminated, truncated, _ = self._step(action)
            if terminated or truncated:
                raise ValueError("the episode ended too early")
        self._repeated = list(notes["actions"])
        return observation


class RetraceFactory:
    """Builds the env of `factory` inside a `Retrace`."""

    def __init__(self, factory: Callable[[], gymnasium.Env[Any, Any]], copies: bool = False) -> None:
        self.factory, self.copies = factory, copies

    def __call__(self) -> Retrace:
        return Retrace(self.factory(), self.copies)

    def around(self, core: gymnasium.Env[Any, Any]) -> Retrace:
        """Put the wrappers around a `core_env` that already exists. The factory must be an `EnvFactory`."""
        return Retrace(self.factory.around(core), self.copies)  # type: ignore[attr-defined]


def close_env(env: Any) -> str:
    """Close `env`. Returns an error of `close()` as text, because it must not end a run."""
    if isinstance(env, Retrace):
        return env.end()
    try:
        env.close()
    except (Exception, SystemExit) as error:
        return blame(error)
    return ""


def _has_known_generator(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether `np_random` is a NumPy Generator, as in Gymnasium, or does not exist yet."""
    generator = attribute_of(env.unwrapped, "_np_random")
    return generator is None or isinstance(generator, np.random.Generator)


def _state_of(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """The state of the env's generator, and what the env's `get_state` returns."""
    inner: Any = env.unwrapped
    generator = attribute_of(inner, "_np_random")
    state = {"np_random": None if generator is None else generator.bit_generator.state}
    if callable(attribute_of(inner, "get_state")) and callable(attribute_of(inner, "set_state")):
        with suppress(Exception):  # the user's `get_state` may have another purpose, and raise anything
            state["own"] = inner.get_state()
    return state


def _equal(observation: object, expected: object) -> bool:
    """Compare observations. `expected` may have the dtype of the space, in which a vector env stores it."""
    if isinstance(expected, Mapping) and isinstance(observation, Mapping):
        return set(observation) == set(expected) and all(_equal(observation[key], expected[key]) for key in expected)
    expected = np.asarray(expected)
    return np.array_equal(
        np.asarray(observation).astype(expected.dtype), expected, equal_nan=expected.dtype.kind == "f"
    )


# --- Attributes that live longer than an episode, such as curricula and statistics. Repeating actions does not bring
# them back, so a resumed run compares their digests and warns.


def attribute_digests(env: gymnasium.Env[Any, Any]) -> dict[str, str]:
    """A digest of each attribute of the user's env, its class and the user's wrappers, by name.

    It covers numbers, text, arrays, generators and containers of these. Of any other value it covers the type only.
    """
    digests: dict[str, str] = {}
    layer: Any = env
    while layer is not None:
        inner = layer.env if isinstance(layer, gymnasium.Wrapper) else None
        if not type(layer).__module__.startswith(LIBRARIES):
            owner = "" if inner is None else f"{type(layer).__name__}."
            for name, value in {**_data(vars(type(layer))), **_data(vars(layer))}.items():
                digest = hashlib.sha256()
                with suppress(Exception):  # some values cannot be read
                    _update_digest(value, digest, itertools.count())
                digests[owner + name] = digest.hexdigest()[:12]
        layer = inner
    return digests


def _data(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if name not in SKIPPED and not name.startswith("__") and not isinstance(value, NO_DATA)
    }


def _update_digest(value: object, digest: hashlib._Hash, parts: Iterator[int], depth: int = 0) -> None:
    if next(parts) > MOST_PARTS or depth > MOST_DEPTH:
        return
    digest.update(type(value).__name__.encode())
    parts_inside: Iterable[object] = ()
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        digest.update(repr(value).encode("utf-8", "replace"))
    elif isinstance(value, np.memmap):  # not compared: its values are in a file, which a checkpoint need not store
        return
    elif isinstance(value, np.ndarray):
        sample = value.flat[:: 1 + value.size // MOST_PARTS]  # not all, so that large arrays do not delay a checkpoint
        digest.update(repr((value.shape, value.dtype)).encode() + (b"" if value.dtype.hasobject else sample.tobytes()))
    elif isinstance(value, np.random.Generator):
        parts_inside = [value.bit_generator.state]
    elif isinstance(value, Mapping):
        parts_inside = itertools.chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple, deque)):
        parts_inside = value
    elif attribute_of(value, "__dict__") is not None and not type(value).__module__.startswith(LIBRARIES):
        parts_inside = [_data(vars(value))]
    for item in parts_inside:
        _update_digest(item, digest, parts, depth + 1)
