"""What an env may answer where Stable-Baselines3 is patient: any number as a reward, no info from a reset, anything as
the last observation of an episode that its own rules ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain.errors import EnvError


def as_reward(reward: Any) -> float:
    """`reward` as a float: a number of NumPy's, an array of one entry, a Decimal, …

    Raises:
        EnvError: it is no number; a text is none, though `float` takes it.
    """
    try:
        number = reward.item() if isinstance(reward, np.ndarray) else reward
        if not isinstance(number, (str, bytes)):
            return float(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise EnvError(f"step() returned the reward {reward!r:.60}, a {type(reward).__name__}; return a number")


def first_info(answer: Any) -> Mapping[str, Any] | None:
    """The info of what `reset()` answered, empty where it gave None; None: the answer is not (observation, info)."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return None
    info = {} if answer[1] is None else answer[1]
    return info if isinstance(info, Mapping) else None


def last_observation(space: spaces.Space[Any], seen: Any, terminated: bool, finite: bool = True) -> Any:
    """What an episode ended with, as learning may read it.

    Zeros stand for what does not fit `space` where the env's own rules ended the episode: no policy acts there, and its
    value counts nothing.

    Args:
        finite: NaN and infinity do not fit.

    Raises:
        EnvError: it does not fit and a limit cut the episode, so that the value of its last state is learned from.
    """
    fast = type(seen) is np.ndarray and seen.shape == space.shape and seen.dtype.kind in "biuf"
    if fast and (seen.dtype.kind != "f" or not finite or math.isfinite(np.vdot(seen, seen))):  # as guard._surely_finite
        return seen
    if not (why := _misfit(space, seen, finite)):
        return seen
    if terminated:
        return _zeros(space)
    raise EnvError(
        f"{why}; the episode was truncated, so that learning needs the value of that state: let the observation fit "
        "observation_space, or return terminated=True where the rules end the episode"
    )


def _misfit(space: spaces.Space[Any], seen: Any, finite: bool, name: str = "") -> str:
    what = f"the last observation{name} of the episode"
    if isinstance(space, spaces.Dict):
        if not isinstance(seen, Mapping):
            return f"{what} is a {type(seen).__name__}, its space says {space}"
        parts = (_misfit(part, seen.get(key), finite, f" {key!r}") for key, part in space.spaces.items())
        return next(filter(None, parts), "")
    try:
        array = np.asarray(seen)
    except ValueError:  # ragged lists
        return f"{what} is no array"
    if array.dtype.kind not in "biuf":
        return f"{what} is a {type(seen).__name__}, its space says {space}"
    if array.shape != space.shape:
        return f"{what} has shape {array.shape}, its space says {space.shape}"
    bad = finite and array.dtype.kind == "f" and not np.isfinite(array).all()
    return f"{what} is not finite (NaN or infinite)" if bad else ""


def _zeros(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _zeros(part) for key, part in space.spaces.items()}
    return np.zeros(space.shape or (), space.dtype)
