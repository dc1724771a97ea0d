"""The three ways an env can say which actions are legal, brought to one: a method `action_masks()`.

True means legal. A mask is flat: one entry per action of a Discrete space, the heads of a MultiDiscrete space one
after another, and for MultiBinary two entries (may be 0, may be 1) per bit, as sb3-contrib expects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import LAST_MASKS, BoolArray
from fasttrain.envs.user_code import blame, kept_random_state
from fasttrain.errors import EnvError, EnvSpecError

MaskConvention = Literal["method", "info", "observation"]
KEY = "action_mask"
MASKABLE_SPACES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
LOOKED_FOR = f"a method action_masks(), info[{KEY!r}], a key {KEY!r} in a Dict observation"


def find_mask_convention(env: gymnasium.Env[Any, Any]) -> MaskConvention | None:
    """Return how `env` offers masks, or None.

    Looks for the method first, then at the observation space, and resets the env once, without a seed, only if neither
    answers; the global random streams are put back.

    Raises:
        EnvSpecError: that reset raised or returned something other than (observation, info).
    """
    if env.has_wrapper_attr("action_masks"):
        return "method"
    if isinstance(env.observation_space, spaces.Dict) and KEY in env.observation_space.spaces:
        return "observation"
    with kept_random_state():
        try:
            answer = env.reset()
        except Exception as error:
            raise EnvSpecError(f"env {env.unwrapped}: its first reset() failed: {blame(error)}") from error
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise EnvSpecError(f"env {env.unwrapped}: reset() must return (observation, info), it returned {answer!r:.80}")
    info = answer[1]
    return "info" if isinstance(info, Mapping) and KEY in info else None


def mask_width(space: spaces.Space[Any]) -> int:
    """Return A, the number of mask entries that `space` needs.

    Raises:
        EnvSpecError: masks make no sense for this kind of space.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(np.sum(space.nvec))
    if isinstance(space, spaces.MultiBinary):
        return 2 * int(np.prod(space.shape))
    raise EnvSpecError(f"action masks need a Discrete, MultiDiscrete or MultiBinary action space, not {space}")


def flat_mask(mask: Any, width: int, heads: spaces.Dict | None = None) -> BoolArray:  # (A,) bool
    """Return a fresh flat boolean copy of `mask`: an array, a list of numbers, or a tuple, list or dict of heads.

    Heads given by name are laid in the order of the keys of `heads`, the env's own Dict action space; without it (no
    other order is known) in that of the mask.

    Raises:
        EnvError: wrong length, other names than the space's, or entries other than False/True and 0/1.
    """
    if isinstance(mask, Mapping):
        rows = list(mask.values()) if heads is None else _by_name(mask, heads)
    elif isinstance(mask, tuple | list) and len(mask) > 0 and np.ndim(mask[0]) > 0:
        rows = list(mask)
    else:
        rows = [mask]
    parts = [np.asarray(row).ravel() for row in rows]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.bool_)])
    if len(flat) != width:
        of_heads = f" ({' + '.join(str(len(part)) for part in parts)} per head)" if len(parts) > 1 else ""
        raise EnvError(f"the action mask has the wrong length: expected {width} entries, got {len(flat)}{of_heads}")
    # A mask to be added to logits (0 legal, -inf illegal) would be read upside down: anything but 0 and 1 is refused.
    if flat.dtype != np.bool_ and (flat.dtype.kind not in "iuf" or not np.all((flat == 0) | (flat == 1))):
        raise EnvError(f"the action mask must hold booleans or 0 and 1 (1 = legal), got {flat.dtype} {flat[:8]}")
    return flat.astype(np.bool_)


def _by_name(mask: Any, heads: spaces.Dict) -> list[Any]:
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

    Raises:
        EnvError: no action is legal, in a head if there are several.
    """
    if mask is None:
        return space.sample()
    drawn = [_draw(head, rng) for head in head_masks(space, mask)]
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start + drawn[0])
    return (np.reshape(drawn, space.shape or ()) + getattr(space, "start", 0)).astype(space.dtype)


def _draw(mask: BoolArray, rng: np.random.Generator) -> int:
    legal = np.flatnonzero(mask)
    if len(legal) == 0:
        raise EnvError(f"the action mask allows none of {len(mask)} actions")
    return int(legal[rng.integers(len(legal))])


class ActionMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an env of any convention a method `action_masks()` with a flat boolean answer for the present state.

    A mask that comes inside a Dict observation is taken out of it, so that the net does not see it twice. If one key
    remains, the observation becomes that key's bare value (`{"observation": x, "action_mask": m}` becomes `x`).
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], convention: MaskConvention, heads: spaces.Dict | None = None
    ) -> None:
        super().__init__(env)
        self._convention = convention
        self._heads = heads  # of an env with named heads: the order of a mask by name
        self._width = mask_width(env.action_space)
        self._latest: Any = None  # as the env gave it; made flat when asked for
        self._only_key: str | None = None
        if convention == "method":
            self._method = env.get_wrapper_attr("action_masks")
        elif convention == "observation":
            self.observation_space = self._space_without_mask()

    def action_masks(self) -> BoolArray:  # (A,) bool
        """Return which actions are legal now.

        Raises:
            EnvError: the env gave no mask for this state, or one of the wrong length or kind.
        """
        mask = self._method() if self._convention == "method" else self._latest
        if mask is None:
            place = "action_masks()" if self._convention == "method" else f"{self._convention}[{KEY!r}]"
            raise EnvError(f"env {self.unwrapped} gave no action mask in {place}; every reset and step must give one")
        try:
            return flat_mask(mask, self._width, self._heads)
        except EnvError as error:
            raise EnvError(f"env {self.unwrapped}: {error} (action space {self.action_space})") from None
        except ValueError as error:  # NumPy's, of lists that are ragged inside a head
            raise EnvError(f"env {self.unwrapped}: the action mask is not an array: {error}") from error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._take_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation = self._take_mask(observation, info)
        if truncated and not terminated and (mask := self._last_mask()) is not None:
            info = {**info, LAST_MASKS: mask}
        return observation, reward, terminated, truncated, info

    def _last_mask(self) -> BoolArray | None:
        """What is legal in the state a limit cut the episode in: DQN bootstraps from it. None if the env is silent."""
        try:
            return self.action_masks()
        except Exception:  # the episode is over: an env owes no answer any more
            return None

    def _take_mask(self, observation: Any, info: dict[str, Any]) -> Any:
        if self._convention == "info":
            self._latest = info.get(KEY)
        elif self._convention == "observation" and isinstance(observation, Mapping):  # else the last of an episode
            self._latest = observation.get(KEY)
            if self._only_key is not None:
                return observation.get(self._only_key)
            return {key: value for key, value in observation.items() if key != KEY}
        return observation

    def _space_without_mask(self) -> spaces.Space[Any]:
        space = self.env.observation_space
        if not isinstance(space, spaces.Dict):
            raise EnvSpecError(f"env {self.unwrapped}: {KEY!r} was looked for in a Dict observation, got {space}")
        rest = {key: value for key, value in space.spaces.items() if key != KEY}
        if not rest:
            raise EnvSpecError(f"env {self.unwrapped}: the observation holds {KEY!r} and nothing else")
        if len(rest) == 1:
            self._only_key = next(iter(rest))
            return rest[self._only_key]
        return spaces.Dict(rest)
