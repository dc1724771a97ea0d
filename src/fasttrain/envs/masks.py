"""The ways an env can say which actions are legal, brought to one: a method `action_masks()`.

True means legal. A mask is flat: one entry per action of a Discrete space, the heads of a MultiDiscrete space one
after another, and for MultiBinary two entries (may be 0, may be 1) per bit, as sb3-contrib expects them. A mask that
allows nothing stays as it is: what is made of it is the algorithm's affair (`vec/base.EmptyMasks`).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorWrapper
from numpy.typing import NDArray

from fasttrain.batch import LAST_MASKS, BoolArray
from fasttrain.envs.user_code import blame, kept_random_state
from fasttrain.errors import EnvError, EnvSpecError

MaskConvention = Literal["method", "info", "observation"]
METHOD = "action_masks"
KEYS = ("action_mask", METHOD)  # in an info, or of a Dict observation
KEY = KEYS[0]
MASKABLE_SPACES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
LOOKED_FOR = f"a method {METHOD}(), info[{KEY!r}], a key {KEY!r} in a Dict observation"
ADDED = -1e3  # to a logit: what is that low or lower forbids, as -inf does
_SOUNDS_LIKE = re.compile(r"mask|(valid|legal|available|avail|possible|allowed|feasible)_?(action|move)", re.IGNORECASE)


class AdaptsOld:
    """What an adapter of the old gym is: its reset returns the observation alone, so that masks come with steps."""

    old: Any


def layers(env: object) -> Iterator[Any]:
    """The env and what it wraps, from outside; at the end what is adapted."""
    yield env
    while isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
        env = env.env
        yield env
    if isinstance(env, AdaptsOld):
        yield env.old


def property_of(env: object, name: str) -> Callable[[], Any] | None:
    """What reads such a property of the env or of a layer of it, with whatever error is the property's own."""
    owner = next((layer for layer in layers(env) if getattr(type(layer), name, None) is not None), None)
    return partial(getattr, owner, name) if isinstance(getattr(type(owner), name, None), property) else None


def mask_method(env: object, name: str = METHOD) -> Callable[[], Any] | None:
    """What to call for the mask of the present state: a method of that name, or what reads such an attribute anew.

    Raises:
        EnvSpecError: it is a method that wants arguments.
    """
    get = env.get_wrapper_attr if isinstance(env, gymnasium.Env) else lambda one: getattr(env, one)
    if (read := property_of(env, name)) is not None:  # not asked now: it may be none before the first reset
        return read
    try:
        found = get(name)
    except AttributeError:
        return None
    if not callable(found):
        return lambda: get(name)
    try:
        inspect.signature(found).bind()
    except TypeError:
        given = f"{name}{inspect.signature(found)}"
        raise EnvSpecError(f"env {env}: {name} must be a method without arguments, it is {given}") from None
    except ValueError:  # some compiled ones have no signature to show
        pass
    return found  # type: ignore[no-any-return]


def sounds_like_masks(env: object) -> list[str]:
    """Methods of an env that may give its masks, going by their names."""
    names = {
        name
        for layer in layers(env)
        for name in dir(layer)
        if name[0] != "_" and _SOUNDS_LIKE.search(name) and callable(inspect.getattr_static(layer, name))
    }
    return sorted(names, key=lambda name: ("action" not in name, name))


def mask_key(space: spaces.Space[Any], keys: tuple[str, ...] = KEYS) -> str | None:
    """The key of a Dict observation that holds the mask."""
    return next((key for key in keys if key in space.spaces), None) if isinstance(space, spaces.Dict) else None


def find_mask_convention(env: gymnasium.Env[Any, Any], named: str | None = None) -> MaskConvention | None:
    """Return how `env` offers masks, or None.

    Looks for the method first, then at the observation space, and resets the env once, without a seed, only if neither
    answers; the global random streams are put back. An env of the old gym, whose reset tells nothing, is stepped once.

    Args:
        named: what the masks are called where that is not `action_masks` or `action_mask`.

    Raises:
        EnvSpecError: that reset raised or returned something other than (observation, info), or the method wants
            arguments.
    """
    keys = KEYS if named is None else (named,)
    if mask_method(env, named or METHOD) is not None:
        return "method"
    if mask_key(env.observation_space, keys) is not None:
        return "observation"
    with kept_random_state():
        try:
            answer = env.reset()
        except Exception as error:
            raise EnvSpecError(f"env {env.unwrapped}: its first reset() failed: {blame(error)}") from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvSpecError(
                f"env {env.unwrapped}: reset() must return (observation, info), it returned {answer!r:.80}"
            )
        info = answer[1]
        if isinstance(env.unwrapped, AdaptsOld):
            try:
                info = env.step(copy.deepcopy(env.action_space).sample())[4]
            except Exception as error:
                raise EnvSpecError(f"env {env.unwrapped}: its first step() failed: {blame(error)}") from error
    return "info" if isinstance(info, Mapping) and any(key in info for key in keys) else None


def lost_mask(env: object) -> str:
    """Which wrapper hides the mask that an env's Dict observation has; empty if there is no such."""
    for outer, inner in itertools.pairwise(layers(env)):
        seen, space = getattr(inner, "observation_space", None), outer.observation_space
        key = mask_key(seen) if isinstance(seen, spaces.Dict) else None
        if key is None or seen is None or mask_key(space) is not None:
            continue
        whole = spaces.utils.flatdim(space) == spaces.utils.flatdim(seen)
        what = (
            f"put the mask {key!r} into the observation" if whole else f"took the mask {key!r} out of the observation"
        )
        return (
            f"the wrapper {type(outer).__name__} {what}, where nobody finds it; let it keep that key, or use an "
            "algorithm that reads no masks (algo=ppo, or dqn with algo.use_masking=false)"
        )
    return ""


def head_sizes(space: spaces.Space[Any]) -> list[int]:
    """How many choices each sub-action has; their sum A is the number of mask entries that `space` needs.

    Raises:
        EnvSpecError: masks make no sense for this kind of space.
    """
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.ravel()]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    raise EnvSpecError(f"action masks need a Discrete, MultiDiscrete or MultiBinary action space, not {space}")


def mask_width(space: spaces.Space[Any]) -> int:
    """Return A, the number of mask entries that `space` needs; as `head_sizes`."""
    return sum(head_sizes(space))


class FlatMasks:
    """Makes the masks of one env, or of envs of one kind, flat and boolean.

    Remembers whether they are to be added to logits (0 legal, -inf or the like not): of such a one that holds 0 alone
    everything is legal, where elsewhere nothing is.
    """

    def __init__(self, width: int, heads: spaces.Dict | None = None) -> None:
        """`heads`: the env's own Dict action space, whose order heads by name are laid in; None: the mask's."""
        self.width, self.heads = width, heads
        self.is_added: bool | None = None  # not known yet

    def __call__(self, mask: object) -> BoolArray:  # (A,) bool
        """A fresh flat boolean copy of `mask`: an array, a list of numbers, or a tuple, list or dict of heads. Raises
        EnvError: wrong length, other names than the space's, or entries that are no mask's.
        """
        if isinstance(mask, Mapping):
            rows = list(mask.values()) if self.heads is None else _by_name(mask, self.heads)
        elif isinstance(mask, tuple | list) and len(mask) > 0 and np.ndim(mask[0]) > 0:
            rows = list(mask)
        else:
            rows = [mask]
        parts = [np.asarray(row).ravel() for row in rows]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.bool_)])
        if len(flat) != self.width:
            of_heads = f" ({' + '.join(str(len(part)) for part in parts)} per head)" if len(parts) > 1 else ""
            raise EnvError(
                f"the action mask has the wrong length: expected {self.width} entries, got {len(flat)}{of_heads}"
            )
        return self.legal(flat)

    def legal(self, given: NDArray[Any]) -> BoolArray:
        """A boolean copy of masks of any shape. Raises EnvError: their entries are no mask's."""
        if given.dtype.kind == "O":
            given = np.array(given.tolist())
        if given.dtype.kind == "b":
            return given.astype(np.bool_)
        if given.dtype.kind in "iuf":
            zero: BoolArray = given == 0
            if zero.all():
                unsure = self.is_added is None and given.dtype.kind == "f"
                return zero if self.is_added or unsure else ~zero
            if np.all(zero | (given == 1)):
                self.is_added = False
                return ~zero
            if np.all(zero | (given <= ADDED)):
                self.is_added = True
                return zero
        raise EnvError(
            f"the action mask must hold booleans or 0 and 1 (1 = legal), or 0 and -inf as what is added to logits; got "
            f"{given.dtype} {given.ravel()[:8]}"
        )


def _by_name(mask: object, heads: spaces.Dict) -> list[Any]:
    """The masks of the heads in the order of the space's keys. Swapped heads would pass a check of the sum alone."""
    if not isinstance(mask, Mapping) or set(mask) != set(heads.spaces):
        names = ", ".join(map(str, mask)) if isinstance(mask, Mapping) else "none"
        raise EnvError(f"the action mask names the heads {names}; the action space has {', '.join(heads)}")
    rows: list[Any] = []
    for name, space in heads.spaces.items():
        if isinstance(space, spaces.Dict):
            rows += _by_name(mask[name], space)
        elif np.size(mask[name]) != mask_width(space):
            raise EnvError(
                f"the action mask of head {name!r} has the wrong length: expected {mask_width(space)} entries, got "
                f"{np.size(mask[name])}"
            )
        else:
            rows.append(mask[name])
    return rows


def head_masks(space: spaces.Space[Any], mask: BoolArray) -> list[BoolArray]:
    """The parts of a flat mask: of a Discrete space itself, else one per head, or of two entries per bit."""
    if isinstance(space, spaces.Discrete):
        return [mask]
    if isinstance(space, spaces.MultiDiscrete):
        return np.split(mask, np.cumsum(space.nvec.ravel())[:-1])
    return list(mask.reshape(-1, 2))


def is_legal(space: spaces.Space[Any], mask: BoolArray, action: Any) -> bool:
    """Whether the flat `mask` allows `action`, in every head if there are several."""
    if isinstance(space, spaces.Discrete):
        return bool(mask[int(action) - int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        chosen = np.asarray(action).ravel() - space.start.ravel()
        begins = np.cumsum(space.nvec.ravel()) - space.nvec.ravel()
        return bool(mask[begins + chosen].all())
    bits = np.asarray(action).ravel().astype(np.int64)
    return bool(mask.reshape(-1, 2)[np.arange(len(bits)), bits].all())


def random_legal_action(space: spaces.Space[Any], mask: BoolArray | None, rng: np.random.Generator) -> Any:
    """Draw uniformly among the legal actions; without a mask from the whole space (its own, seeded, stream).

    Where none is legal, in a head if there are several, all are.
    """
    if mask is None:
        return space.sample()
    drawn = [_draw(head, rng) for head in head_masks(space, mask)]
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start + drawn[0])
    return (np.reshape(drawn, space.shape or ()) + getattr(space, "start", 0)).astype(space.dtype)


def _draw(mask: BoolArray, rng: np.random.Generator) -> int:
    legal = np.flatnonzero(mask if mask.any() else ~mask)
    return int(legal[rng.integers(len(legal))])


class ActionMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an env of any convention a method `action_masks()` with a flat boolean answer for the present state.

    A mask that comes inside a Dict observation is taken out of it, so that the net does not see it twice. If one key
    remains, the observation becomes that key's bare value (`{"observation": x, "action_mask": m}` becomes `x`).
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        convention: MaskConvention,
        heads: spaces.Dict | None = None,
        named: str | None = None,
    ) -> None:
        """`heads` of an env with named heads: the order of a mask by name; `named` as in `find_mask_convention`."""
        super().__init__(env)
        self._convention = convention
        self._keys = KEYS if named is None else (named,)
        self._flat = FlatMasks(mask_width(env.action_space), heads)
        self._latest: object = None  # as the env gave it; made flat when asked for
        self._tells_late = isinstance(env.unwrapped, AdaptsOld)
        self._method = mask_method(env, named or METHOD) if convention == "method" else None
        self._key = self._keys[0]
        if convention == "observation":
            self._key, self._only_key, self.observation_space = without_mask(env.observation_space, self._keys)

    def action_masks(self) -> BoolArray:  # (A,) bool
        """Return which actions are legal now.

        Raises:
            EnvError: the env gave no mask for this state, or one of the wrong length or kind.
        """
        mask = self._latest if self._method is None else self._method()
        if mask is None:
            place = f"{self._convention}[{self._key!r}]" if self._method is None else f"{self._keys[-1]}()"
            raise EnvError(f"env {self.unwrapped} gave no action mask in {place}; every reset and step must give one")
        try:
            return self._flat(mask)
        except EnvError as error:
            raise EnvError(f"env {self.unwrapped}: {error} (action space {self.action_space})") from None
        except ValueError as error:  # NumPy's, of lists that are ragged inside a head
            raise EnvError(f"env {self.unwrapped}: the action mask is not an array: {error}") from error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        observation = self._take_mask(observation, info)
        if self._latest is None and self._tells_late:
            self._latest = np.ones(self._flat.width, np.bool_)
        return observation, info

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation = self._take_mask(observation, info)
        if truncated and not terminated:  # DQN bootstraps from what is legal there
            with suppress(Exception):  # the episode is over: an env owes no answer any more
                info = {**info, LAST_MASKS: self.action_masks()}
        return observation, reward, terminated, truncated, info

    def _take_mask(self, observation: object, info: dict[str, Any]) -> object:
        if self._convention == "info":
            self._latest = told_mask(info, self._keys)
        elif self._convention == "observation" and isinstance(observation, Mapping):  # else the last of an episode
            self._latest = observation.get(self._key)
            if self._only_key is not None:
                return observation.get(self._only_key)
            return {key: value for key, value in observation.items() if key != self._key}
        return observation


def told_mask(told: Mapping[str, Any], keys: tuple[str, ...] = KEYS) -> Any:
    """What an info or a Dict observation holds under the first of `keys` that it has; None without."""
    return next((told[key] for key in keys if key in told), None) if told else None


def without_mask(space: spaces.Space[Any], keys: tuple[str, ...] = KEYS) -> tuple[str, str | None, spaces.Space[Any]]:
    """The key of a Dict space that holds the mask, the only other key if there is but one, and the space without it.

    Raises:
        EnvSpecError: there is no such key, or nothing else.
    """
    found = mask_key(space, keys)
    if found is None or not isinstance(space, spaces.Dict):
        raise EnvSpecError(f"{keys[0]!r} was looked for in a Dict observation, got {space}")
    rest = {key: value for key, value in space.spaces.items() if key != found}
    if not rest:
        raise EnvSpecError(f"the observation holds {found!r} and nothing else")
    only = next(iter(rest)) if len(rest) == 1 else None
    return found, only, spaces.Dict(rest) if only is None else rest[only]
