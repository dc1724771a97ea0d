"""Retrace: notes what led to the state of an env that nobody can look into, so that another process can go there too.

An env that is all Python has no state to read in general. But where its random numbers come from Gymnasium's generator
(`env.np_random`), its state follows from that generator when the episode began and from the actions since. An env with
random numbers of its own may have `get_state()` and `set_state(state)`, of plain values and arrays: then they are noted
too, at the beginning of each episode alone, because wrappers (a time limit, say) have a state besides.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, Protocol

import gymnasium
import numpy as np

from fasttrain.batch import each_array
from fasttrain.envs.answers import as_reward, last_observation
from fasttrain.envs.user_code import blame, process_settings
from fasttrain.spec.plain import from_dict, to_dict
from fasttrain.spec.plugins import OURS

MOST_ACTIONS = 100_000  # of one episode: beyond, noting them costs memory, and repeating them minutes
MOST_S = 60.0  # to repeat them in: each env is asked after the other
LIBRARIES = ("gymnasium.", "stable_baselines3.", *(f"{name}." for name in OURS))
MOST_PARTS, MOST_DEPTH = 20_000, 12  # of attributes that are looked at: some 10 ms
NOTED_ELSEWHERE = ("env", "spec", "_np_random", "_np_random_seed")
NO_DATA = (gymnasium.Space, property, staticmethod, classmethod, FunctionType, ModuleType, type)


class Notes(Protocol):
    """Who notes for a `Retrace` what it need not note itself: a vector env that steps many of them."""

    rows: list[Any]  # actions, those of all envs in one (N, ...)
    buf_infos: list[dict[str, Any]]  # of the last step, each env's own

    def seen(self, index: int) -> Any:
        """The present observation of an env."""

    def total(self, index: int) -> float:
        """The sum of the rewards of its running episode."""

    def put_back(self, before: dict[str, Any]) -> None:
        """Undo what an env has changed in this process since."""


class Retrace(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper. Costs 0.35 µs a step, or nothing where another notes (`noted_by`), and 1.1 µs an episode.

    What else concerns every env of a run, in whatever process, is done here too: the last observation of an episode is
    made one that learning can read, before the reset, and `close()` is called once and costs nothing but a line.

    Args:
        copies: the last observation is copied, so that an env which writes into the same array in its reset does not
            change it. SB3's loops do not copy.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], copies: bool = False) -> None:
        super().__init__(env)
        self._copies = copies
        self._info: dict[str, Any] = {}  # of the last step
        self._close_failed: str | None = None  # in words; None: it is open
        self._first_seed: int | None = None  # of the last seeded reset: what an env derives from it is not in np_random
        self._begin: dict[str, Any] | None = None  # the generator before the episode; None: its reset was seeded
        self._begun = False  # False: no episode, or one that cannot be repeated
        self._repeated: list[Any] = []  # the first actions, where another env made them and this one after it
        self._actions: Any = deque(maxlen=MOST_ACTIONS + 1)  # the others; or the rows in which they are
        self.begun_at = 0  # in these
        self._inner_step = env.step
        self._total = 0.0
        self._seen: object = None  # as the env handed it out; one that it changes since is as present as its state
        self._notes_of: tuple[Notes, int] | None = None

    def noted_by(self, notes: Notes, index: int) -> None:
        """Leave noting to another; a step is then the inner env's own."""
        self._notes_of = notes, index
        self._actions = notes.rows
        self.begun_at = len(notes.rows)
        self.step = self._first_step  # type: ignore[method-assign]

    def _first_step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Where another notes: NumPy would make a number of a text."""
        self.step = self._inner_step  # type: ignore[method-assign]
        answer = self._inner_step(action)
        as_reward(answer[1])
        return answer

    def _keep_last(self) -> None:
        """SB3's loops have put the last observation into the info of its step, and are about to reset."""
        info = self._info if self._notes_of is None else self._notes_of[0].buf_infos[self._notes_of[1]]
        if info and "terminal_observation" in info:
            cut = bool(info.get("TimeLimit.truncated", False))
            seen = last_observation(self.observation_space, info["terminal_observation"], not cut)
            info["terminal_observation"] = each_array(np.array, seen) if self._copies else seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._keep_last()
        if self._notes_of is None:
            self._actions.clear()
        self.begun_at, self._repeated = len(self._actions), []
        self._begun, self._total = not options and _is_known(self.env), 0.0
        if seed is None:
            self._begin = _state_of(self.env) if self._begun else None
        else:
            self._first_seed, self._begin = seed, None  # the seed says it all
        before = None if self._notes_of is None else process_settings()
        answer = self.env.reset(seed=seed, options=options)
        if self._notes_of is not None and before and process_settings() != before:
            self._notes_of[0].put_back(before)
        self._seen = answer[0]
        return answer

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(action.copy() if type(action) is np.ndarray else action)
        return self._step(action)

    def _step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        answer = self._inner_step(action)
        self._seen, self._info = answer[0], answer[4]
        self._total += answer[1] if type(answer[1]) is float else as_reward(answer[1])
        return answer

    def close(self) -> None:
        """Close the env, once."""
        self.end()

    def end(self) -> str:
        """The same; what its `close()` raised, in words."""
        if self._close_failed is None:
            self._close_failed = closed(self.env)
        return self._close_failed

    @property
    def steps_begun(self) -> int:
        """Of the running episode; one that raised counts."""
        return len(self._repeated) + len(self._actions) - self.begun_at

    def retrace_notes(self) -> dict[str, Any] | None:
        """How to come to where the env is now; None where nobody can. Plain values but for actions, observation."""
        if not self._begun or self.steps_begun > MOST_ACTIONS or not _is_known(self.env):
            return None
        try:
            return self._notes()
        except TypeError:  # a state of the env's own that is none of plain values
            return None

    def _notes(self) -> dict[str, Any]:
        since: Iterator[Any] = itertools.islice(self._actions, self.begun_at, None)
        seen, total = self._seen, self._total
        if self._notes_of is not None:
            notes, index = self._notes_of
            since = (row[index] for row in since)
            seen, total = notes.seen(index), notes.total(index)
        return {
            "seed": self._first_seed,
            "begin": None if self._begin is None else to_dict(self._begin),
            "now": to_dict(_state_of(self.env)),
            "total": float(total),
            "kept": kept_things(self.env),
            "actions": np.asarray([*self._repeated, *since]),
            "observation": seen,
        }

    def retrace(self, notes: Mapping[str, Any] | None, other_seed: int, most_s: float = MOST_S) -> dict[str, Any]:
        """Go where `notes` lead. If that is not where their observation was seen, begin an episode with `other_seed`.

        Args:
            most_s: of this time; an episode that takes longer is given up.

        Returns:
            same: whether it is; observation: the present one; mask: the present one of `action_masks()`, if there is;
            lost: names of what it kept beyond episodes and has not now.
        """
        same = False
        if notes is not None:
            try:
                found = self._repeat(notes, time.monotonic() + most_s)
                same = _equal(found, notes["observation"]) and to_dict(_state_of(self.env)) == notes["now"]
                same = same and float(self._total) == notes["total"]
            except Exception:  # whatever an env does with actions that do not fit it: it is not where it was
                same = False
        if not same:
            found = self.reset(seed=other_seed)[0]
        masks = self.env.get_wrapper_attr("action_masks")() if self.env.has_wrapper_attr("action_masks") else None
        kept, now = (notes or {}).get("kept", {}), kept_things(self.env) if notes is not None else {}
        lost = [name for name, digest in kept.items() if same and now.get(name) != digest]
        return {"same": same, "observation": found, "mask": masks, "lost": lost}

    def _repeat(self, notes: Mapping[str, Any], deadline: float) -> Any:
        if notes["seed"] is not None or notes["begin"] is None:
            observation = self.reset(seed=notes["seed"])[0]
        if notes["begin"] is not None:
            _load_state(self.env, notes["begin"])
            observation = self.reset()[0]
        for action in notes["actions"]:
            if time.monotonic() > deadline:
                raise TimeoutError("the episode is too long to repeat")
            observation, _, ended, cut, _ = self._step(action)
            if ended or cut:
                raise ValueError("the episode ended before")
        self._repeated = list(notes["actions"])
        return observation


class Retraced:
    """What `factory` builds, in a `Retrace`. Picklable, if the factory is."""

    def __init__(self, factory: Callable[[], gymnasium.Env[Any, Any]], copies: bool = False) -> None:
        self.factory, self.copies = factory, copies

    def __call__(self) -> Retrace:
        return Retrace(self.factory(), self.copies)

    def around(self, core: gymnasium.Env[Any, Any]) -> Retrace:
        """The same, from a `core_env` that was built before; the factory must be one of ours."""
        return Retrace(self.factory.around(core), self.copies)  # type: ignore[attr-defined]


def closed(env: Any) -> str:
    """Close `env`; what that raised, in words. A viewer that was never opened must not cost a run."""
    if isinstance(env, Retrace):
        return env.end()
    try:
        env.close()
    except (Exception, SystemExit) as error:
        return blame(error)
    return ""


def _is_known(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether its `np_random` is Gymnasium's kind of generator, or there is none yet."""
    generator = getattr(env.unwrapped, "_np_random", None)
    return generator is None or isinstance(generator, np.random.Generator)


def _state_of(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """Of the env's generator, if it has one yet, and its own, if it tells."""
    inner: Any = env.unwrapped
    generator = getattr(inner, "_np_random", None)
    state = {"np_random": None if generator is None else generator.bit_generator.state}
    if callable(getattr(inner, "get_state", None)) and callable(getattr(inner, "set_state", None)):
        with suppress(Exception):  # a method of that name with another meaning
            state["own"] = inner.get_state()
    return state


def _load_state(env: gymnasium.Env[Any, Any], state: Mapping[str, Any]) -> None:
    inner: Any = env.unwrapped
    if state["np_random"] is not None:
        inner.np_random.bit_generator.state = from_dict(state["np_random"])
    if "own" in state:
        inner.set_state(from_dict(state["own"]))


def _equal(found: object, wanted: object) -> bool:
    """Of observations; `wanted` may have gone through the arrays of a vector env, which have the space's own type."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return set(found) == set(wanted) and all(_equal(found[key], value) for key, value in wanted.items())
    wanted = np.asarray(wanted)
    return np.array_equal(np.asarray(found).astype(wanted.dtype), wanted, equal_nan=wanted.dtype.kind == "f")


# --- what an env keeps beyond its episodes (curricula, statistics): no repetition brings that back, so resume says so


def kept_things(env: gymnasium.Env[Any, Any]) -> dict[str, str]:
    """A digest of each attribute of the user's env, its class and the user's wrappers, by name.

    Of what is no number, text, array, generator, or made of them, its type counts alone.
    """
    found: dict[str, str] = {}
    layer: Any = env
    while layer is not None:
        inner = layer.env if isinstance(layer, gymnasium.Wrapper) else None
        if not type(layer).__module__.startswith(LIBRARIES):
            whose = "" if inner is None else f"{type(layer).__name__}."
            for name, value in {**_data(vars(type(layer))), **_data(vars(layer))}.items():
                digest = hashlib.sha256()
                with suppress(Exception):  # what cannot be read stays unsaid
                    _take(value, digest, itertools.count())
                found[whose + name] = digest.hexdigest()[:12]
        layer = inner
    return found


def _data(named: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {name for name in named if name in NOTED_ELSEWHERE or name.startswith("__")}
    return {name: one for name, one in named.items() if name not in hidden and not isinstance(one, NO_DATA)}


def _take(value: object, digest: hashlib._Hash, parts: Iterator[int], depth: int = 0) -> None:
    if next(parts) > MOST_PARTS or depth > MOST_DEPTH:
        return
    digest.update(type(value).__name__.encode())
    inside: Iterable[object] = ()
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        digest.update(repr(value).encode("utf-8", "replace"))
    elif isinstance(value, np.memmap):  # its file outlives the process
        return
    elif isinstance(value, np.ndarray):
        seen = value.flat[:: 1 + value.size // MOST_PARTS]  # of a data set a sample: checkpoints must not wait for it
        digest.update(repr((value.shape, value.dtype)).encode() + (b"" if value.dtype.hasobject else seen.tobytes()))
    elif isinstance(value, np.random.Generator):
        inside = [value.bit_generator.state]
    elif isinstance(value, Mapping):
        inside = itertools.chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple, deque)):
        inside = value
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(LIBRARIES):
        inside = [_data(vars(value))]
    for item in inside:
        _take(item, digest, parts, depth + 1)
