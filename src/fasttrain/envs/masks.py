"""Action masks: finds out how an env offers them, and gives each env the method `action_masks()`.

True means legal. A mask is flat, as sb3-contrib expects it: one entry per action of a Discrete space, the sub-actions
of a MultiDiscrete space one after another, and two entries per bit of a MultiBinary space (whether 0 and whether 1 is
legal). A mask that allows nothing is not changed; algorithms handle it (`vec/base.EmptyMasks`).
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
from fasttrain.envs.answers import AnswerError, check_reset, reset_inner
from fasttrain.envs.user_code import attribute_of, blame, preserve_random_state
from fasttrain.errors import EnvError, EnvSpecError

MaskConvention = Literal["method", "info", "observation"]
METHOD = "action_masks"
KEYS = ("action_mask", METHOD)  # names of masks in an info or a Dict observation
KEY = KEYS[0]
MASKABLE_SPACES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
LOOKED_FOR = f"a method {METHOD}(), info[{KEY!r}], a key {KEY!r} in a Dict observation"
MISSING = object()
ADDED = -1e3  # in a mask of numbers that are added to logits, this number or less forbids the action
_SOUNDS_LIKE = re.compile(r"mask|(valid|legal|available|avail|possible|allowed|feasible)_?(action|move)", re.IGNORECASE)


class AdaptsOld:
    """Base of the adapter for old gym envs. Their `reset` returns no info, so masks in infos begin with the first step.

    Attributes:
        old: the env with the old interface.
    """

    old: Any


def layers(env: object) -> Iterator[Any]:
    """The env and all envs inside it, from the outermost wrapper on; at the end the old gym env of an adapter."""
    yield env
    while isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
        env = env.env
        yield env
    if isinstance(env, AdaptsOld):
        yield env.old


def property_of(env: object, name: str) -> Callable[[], Any] | None:
    """A function that reads this property of the first layer of `env` that has it; None if no layer has it."""
    owner = next((layer for layer in layers(env) if getattr(type(layer), name, None) is not None), None)
    return partial(getattr, owner, name) if isinstance(getattr(type(owner), name, None), property) else None


def mask_method(env: object, name: str = METHOD) -> Callable[[], Any] | None:
    """A function that returns the mask of the present state: the method, or a reader if `name` is a property.

    Raises EnvSpecError if the method needs arguments.
    """
    if (read := property_of(env, name)) is not None:  # `read` runs later: before a reset the property may not exist
        return read
    method = attribute_of(env, name, MISSING)
    if method is MISSING:
        return None
    if not callable(method):
        return partial(attribute_of, env, name)
    try:
        inspect.signature(method).bind()
    except TypeError:
        signature = f"{name}{inspect.signature(method)}"
        raise EnvSpecError(f"env {env}: {name} must be a method without arguments, it is {signature}") from None
    except ValueError:  # some compiled methods have no signature
        pass
    return method  # type: ignore[no-any-return]


def sounds_like_masks(env: object) -> list[str]:
    """Names of methods that may return the env's masks, as their names suggest."""
    names = {
        name
        for layer in layers(env)
        for name in dir(layer)
        if name[0] != "_" and _SOUNDS_LIKE.search(name) and callable(inspect.getattr_static(layer, name))
    }
    return sorted(names, key=lambda name: ("action" not in name, name))


def mask_key(space: spaces.Space[Any], keys: tuple[str, ...] = KEYS) -> str | None:
    return next((key for key in keys if key in space.spaces), None) if isinstance(space, spaces.Dict) else None


def find_mask_convention(env: gymnasium.Env[Any, Any], name: str | None = None) -> MaskConvention | None:
    """How `env` offers masks; None if it has no masks.

    Looks for the method first, then at the observation space. If neither has masks, it resets the env once, without a
    seed, and looks at the info. An env of the old gym is also stepped once. The global random state is restored.

    Args:
        name: name of the masks, if it is not `action_masks` or `action_mask`.

    Raises:
        EnvSpecError: the reset raised, it did not return (observation, info), or the method needs arguments.
    """
    keys = KEYS if name is None else (name,)
    if mask_method(env, name or METHOD) is not None:
        return "method"
    if mask_key(env.observation_space, keys) is not None:
        return "observation"
    with preserve_random_state():
        try:
            info = check_reset(env.reset())
        except AnswerError as error:
            raise EnvSpecError(f"env {env.unwrapped}: {error}") from None
        except Exception as error:
            raise EnvSpecError(f"env {env.unwrapped}: its first reset() failed: {blame(error)}") from error
        if isinstance(env.unwrapped, AdaptsOld):
            try:
                info = env.step(copy.deepcopy(env.action_space).sample())[4]
            except Exception as error:
                raise EnvSpecError(f"env {env.unwrapped}: its first step() failed: {blame(error)}") from error
    return "info" if isinstance(info, Mapping) and any(key in info for key in keys) else None


def hidden_mask_error(env: object) -> str:
    """The message about a wrapper that hides the mask in a Dict observation; empty if no wrapper does."""
    for outer, inner in itertools.pairwise(layers(env)):
        inner_space, space = attribute_of(inner, "observation_space"), outer.observation_space
        key = mask_key(inner_space) if isinstance(inner_space, spaces.Dict) else None
        if key is None or inner_space is None or mask_key(space) is not None:
            continue
        if spaces.utils.flatdim(space) == spaces.utils.flatdim(inner_space):
            what = f"merged the mask {key!r} into the observation"
        else:
            what = f"took the mask {key!r} out of the observation"
        return (
            f"the wrapper {type(outer).__name__} {what}, so that it cannot be found; let the wrapper keep that key, or "
            "use an algorithm without masks (algo=ppo, or dqn with algo.use_masking=false)"
        )
    return ""


def head_sizes(space: spaces.Space[Any]) -> list[int]:
    """The number of choices of each sub-action. Their sum A is the number of mask entries that `space` needs.

    Raises EnvSpecError: this kind of space cannot have masks.
    """
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.ravel()]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    raise EnvSpecError(f"action masks need a Discrete, MultiDiscrete or MultiBinary action space, not {space}")


def mask_width(space: spaces.Space[Any]) -> int:
    """A, the number of mask entries that `space` needs. Raises as `head_sizes`."""
    return sum(head_sizes(space))


class FlatMasks:
    """Converts the masks of one env, or of several envs of one kind, to flat boolean arrays.

    It remembers whether the masks are numbers to add to logits (0 legal, -inf illegal). If so, a mask of zeros allows
    everything. If not, a mask of zeros allows nothing.

    Args:
        width: A, the number of entries.
        heads: the env's Dict action space. Masks by name are put into the order of its keys. None: the order of the
            mask itself.
    """

    def __init__(self, width: int, heads: spaces.Dict | None = None) -> None:
        self.width, self.heads = width, heads
        self.is_added: bool | None = None  # whether masks are added to logits; None: not known yet

    def __call__(self, mask: object) -> BoolArray:  # (A,) bool
        """A flat boolean copy of `mask`: an array, a list of numbers, or a tuple, list or dict with one mask per head.

        Raises EnvError: the length is wrong, the names are not those of the space, or the entries are no mask.
        """
        if type(mask) is np.ndarray and mask.dtype == np.bool_ and mask.shape == (self.width,):
            return np.array(mask)  # the usual mask; what follows takes 4 µs more
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

    def legal(self, masks: NDArray[Any]) -> BoolArray:
        """A boolean copy of masks of any shape. Raises EnvError: their entries are no mask."""
        if masks.dtype.kind == "O":
            masks = np.array(masks.tolist())
        if masks.dtype.kind == "b":
            return masks.astype(np.bool_)
        if masks.dtype.kind in "iuf":
            zero: BoolArray = masks == 0
            if zero.all():
                unknown = self.is_added is None and masks.dtype.kind == "f"
                return zero if self.is_added or unknown else ~zero
            if np.all(zero | (masks == 1)):
                self.is_added = False
                return ~zero
            if np.all(zero | (masks <= ADDED)):
                self.is_added = True
                return zero
        raise EnvError(
            f"the action mask must hold booleans, 0 and 1 (1 = legal), or numbers to add to logits (0 = legal, -inf = "
            f"illegal); got {masks.dtype} {masks.ravel()[:8]}"
        )


def _by_name(mask: object, heads: spaces.Dict) -> list[Any]:
    """The masks of the heads in the order of the space's keys. Checks each length, as the user may swap two heads."""
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
    """Split a flat mask into one mask per sub-action."""
    if isinstance(space, spaces.Discrete):
        return [mask]
    if isinstance(space, spaces.MultiDiscrete):
        return np.split(mask, np.cumsum(space.nvec.ravel())[:-1])
    return list(mask.reshape(-1, 2))


def is_legal(space: spaces.Space[Any], mask: BoolArray, action: Any) -> bool:
    """Whether the flat `mask` allows every sub-action of `action`."""
    if isinstance(space, spaces.Discrete):
        return bool(mask[int(action) - int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        chosen = np.asarray(action).ravel() - space.start.ravel()
        begins = np.cumsum(space.nvec.ravel()) - space.nvec.ravel()
        return bool(mask[begins + chosen].all())
    bits = np.asarray(action).ravel().astype(np.int64)
    return bool(mask.reshape(-1, 2)[np.arange(len(bits)), bits].all())


def random_legal_action(space: spaces.Space[Any], mask: BoolArray | None, rng: np.random.Generator) -> Any:
    """Draw uniformly among the legal actions. Without a mask, `space` draws with its own generator.

    If a sub-action has no legal choice, all its choices are legal.
    """
    if mask is None:
        return space.sample()
    choices = [_draw(head, rng) for head in head_masks(space, mask)]
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start + choices[0])
    return (np.reshape(choices, space.shape or ()) + getattr(space, "start", 0)).astype(space.dtype)


def _draw(mask: BoolArray, rng: np.random.Generator) -> int:
    legal = np.flatnonzero(mask if mask.any() else ~mask)
    return int(legal[rng.integers(len(legal))])


class ActionMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an env of any convention a method `action_masks()`: the flat boolean mask of the present state.

    A mask inside a Dict observation is removed from it, because a policy needs no mask as input. If only one other key
    remains, the observation becomes the value of that key: `{"observation": x, "action_mask": m}` becomes `x`.

    Args:
        heads: as in `FlatMasks`.
        name: as in `find_mask_convention`.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        convention: MaskConvention,
        heads: spaces.Dict | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(env)
        self._convention = convention
        self._keys = KEYS if name is None else (name,)
        self._flat = FlatMasks(mask_width(env.action_space), heads)
        self._latest: object = None  # the last mask, as the env returned it
        self._no_reset_info = isinstance(env.unwrapped, AdaptsOld)
        self._method = mask_method(env, name or METHOD) if convention == "method" else None
        self._key = self._keys[0]
        if convention == "observation":
            self._key, self._only_key, self.observation_space = without_mask(env.observation_space, self._keys)

    def action_masks(self) -> BoolArray:  # (A,) bool
        """The mask of the present state.

        Raises EnvError: the env gave no mask for this state, or a mask of the wrong length or type.
        """
        mask = self._latest if self._method is None else self._method()
        if mask is None:
            place = f"{self._convention}[{self._key!r}]" if self._method is None else f"{self._keys[-1]}()"
            raise EnvError(f"env {self.unwrapped} gave no action mask in {place}; every reset and step must give one")
        try:
            return self._flat(mask)
        except EnvError as error:
            raise EnvError(f"env {self.unwrapped}: {error} (action space {self.action_space})") from None
        except ValueError as error:  # NumPy raises it for ragged lists
            raise EnvError(f"env {self.unwrapped}: the action mask is not an array: {error}") from error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_inner(self.env, seed, options)
        observation = self._take_mask(observation, info)
        if self._latest is None and self._no_reset_info:
            self._latest = np.ones(self._flat.width, np.bool_)
        return observation, info

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation = self._take_mask(observation, info)
        if truncated and not terminated:  # here DQN needs the mask of the last state, from which it bootstraps
            with suppress(Exception):  # after the end of an episode an env need not have a mask
                info = {**info, LAST_MASKS: self.action_masks()}
        return observation, reward, terminated, truncated, info

    def _take_mask(self, observation: object, info: dict[str, Any]) -> object:
        if self._convention == "info":
            self._latest = mask_entry(info, self._keys)
        elif self._convention == "observation" and isinstance(observation, Mapping):
            self._latest = observation.get(self._key)  # not reached if an episode's last observation is no Mapping
            if self._only_key is not None:
                return observation.get(self._only_key)
            return {key: value for key, value in observation.items() if key != self._key}
        return observation


def mask_entry(source: Mapping[str, Any], keys: tuple[str, ...] = KEYS) -> Any:
    """The mask in an info or a Dict observation: the value of the first of `keys` in it; None if none is in it."""
    return next((source[key] for key in keys if key in source), None) if source else None


def without_mask(space: spaces.Space[Any], keys: tuple[str, ...] = KEYS) -> tuple[str, str | None, spaces.Space[Any]]:
    """The key of the mask in a Dict space, the other key (None: several), and the space without the mask.

    Raises EnvSpecError: there is no such key, or no other key.
    """
    mask = mask_key(space, keys)
    if mask is None or not isinstance(space, spaces.Dict):
        raise EnvSpecError(f"expected a Dict observation with the key {keys[0]!r}, got {space}")
    others = {key: value for key, value in space.spaces.items() if key != mask}
    if not others:
        raise EnvSpecError(f"the observation holds {mask!r} and nothing else")
    only = next(iter(others)) if len(others) == 1 else None
    return mask, only, spaces.Dict(others) if only is None else others[only]
