"""Compares what an env returns with the spaces it declares.

Like Stable-Baselines3 it accepts: any number as a reward, no info from `reset`, and any last observation of an episode
that was terminated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers.utils import create_zero_array

from fasttrain.errors import EnvError

OLD_GYM = "env.wrappers=[fasttrain.envs.wrappers:OldGym] adapts the old gym interface"
MOST_REWARD = float(np.finfo(np.float32).max)  # algorithms store rewards as float32


class AnswerError(EnvError):
    """`step` or `reset` returned something wrong. `code`: the finding's code in the checkup."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


def as_reward(reward: Any) -> float:
    """Convert a reward to float: a NumPy number, an array with one entry, a Decimal, …

    Raises AnswerError: `reward` is not a number, or a finite number that float32 cannot hold. Text is refused even if
    `float` accepts it.
    """
    try:
        value = reward.item() if isinstance(reward, np.ndarray) else reward
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        what = f"step() returned the reward {reward!r:.60}, a {type(reward).__name__}; return a number"
        raise AnswerError("reward_not_scalar", what)
    if MOST_REWARD < abs(number) < math.inf:
        what = f"step() returned the reward {number:g}, which is too large for float32 (at most 3.4e38); scale it down"
        raise AnswerError("reward_not_finite", what)
    return number


def check_step(answer: object) -> None:
    """Raises AnswerError if `answer` is not what `step` must return."""
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        what = f"{len(answer)} values" if isinstance(answer, tuple | list) else type(answer).__name__
        raise AnswerError("step_answer", f"step() returned {what}, expected 5 values ({OLD_GYM})")
    if not isinstance(answer[4], Mapping):
        what = f"step() returned an info of type {type(answer[4]).__name__}, expected a dict"
        raise AnswerError("info_not_dict", what)


def as_ends(terminated: object, truncated: object) -> tuple[bool, bool]:
    """Both ends of a step as bools. Raises AnswerError: an array of several values has no truth value."""
    try:
        return bool(terminated), bool(truncated)
    except ValueError:
        what = f"step() returned terminated={terminated!r:.60} and truncated={truncated!r:.60}; return two bools"
        raise AnswerError("ends_not_bool", what) from None


def check_reset(answer: object) -> Mapping[str, Any]:
    """The info in the answer of `reset()`; {} if it is None. AnswerError if `answer` is not (observation, info)."""
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        info = {} if answer[1] is None else answer[1]
        if isinstance(info, Mapping):
            return info
    raise AnswerError(
        "reset_answer", f"reset() must return (observation, info), it returned {answer!r:.80} ({OLD_GYM})"
    )


def reset_inner(env: Any, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Any]:
    """Observation and info of `env.reset`, for a wrapper around `env`. Raises as `check_reset`, before unpacking."""
    answer = env.reset(seed=seed, options=options)
    info = check_reset(answer)
    return answer[0], info


def last_observation(space: spaces.Space[Any], observation: Any, terminated: bool, finite: bool = True) -> Any:
    """The last observation of an episode, in a form that a buffer can store.

    If the episode terminated, an observation that does not fit `space` is replaced by zeros, or by the value of the
    space that is nearest to zeros: no policy acts on this observation, and its value is not used.

    Args:
        finite: observations with NaN or infinity count as not fitting.

    Raises:
        EnvError: the observation does not fit and the episode was truncated, so that learning uses its value.
    """
    fast = type(observation) is np.ndarray and observation.shape == space.shape and observation.dtype.kind in "biuf"
    # this shortcut takes 1 µs; the full check below takes 3 µs
    if fast and (observation.dtype.kind != "f" or not finite or math.isfinite(np.vdot(observation, observation))):
        return observation
    fatal = {"wrong_shape", "odd_shape", *(["observation_not_finite"] if finite else [])}
    wrong = (misfit for misfit in misfits(space, observation, "the last observation") if misfit[0] in fatal)
    if (first := next(wrong, None)) is None:
        return observation
    if terminated:
        return create_zero_array(space)
    raise EnvError(
        f"{first[1]} of the episode {first[2]}; the episode was truncated, so that learning needs the value of that "
        "state: let the observation fit observation_space, or return terminated=True if the rules end the episode"
    )


Misfit = tuple[str, str, str, float]  # code of the finding, name of the part, text, size of the deviation


def misfits(space: spaces.Space[Any], value: object, where: str = "the observation") -> Iterator[Misfit]:
    """The differences between `value` and its declared `space`, part by part."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            yield "wrong_shape", where, f"is a {type(value).__name__}, declared {space}", 0
            return
        for key, part in space.spaces.items():
            if key in value:
                yield from misfits(part, value[key], f"{where}[{key!r}]")
            else:
                yield "wrong_shape", f"{where}[{key!r}]", "is declared and missing", 0
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
            yield "wrong_shape", where, f"is no tuple of {len(space.spaces)} parts, declared {space}", 0
            return
        for index, part in enumerate(space.spaces):
            yield from misfits(part, value[index], f"{where}[{index}]")
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield from _array_misfits(space, value, where)
    elif not space.contains(value):
        yield "wrong_shape", where, f"is not in {space}", 0


def _array_misfits(space: Any, value: object, where: str) -> Iterator[Misfit]:
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        yield "wrong_shape", where, f"is not an array ({error})", 0
        return
    if array.dtype.kind not in "biuf":
        yield "wrong_shape", where, f"holds {array.dtype}, declared {space}", 0
    elif array.shape != space.shape:
        code = "odd_shape" if _fits(array.shape, space.shape) else "wrong_shape"
        yield code, where, f"has shape {array.shape}, declared {space.shape}", 0
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        index = _first(~np.isfinite(array))
        yield "observation_not_finite", where, f"is not finite: it is {array[index]} at index {_plain(index)}", 0
    else:
        yield from _value_misfits(space, array, where)


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Whether NumPy can broadcast an array of this shape to the declared shape, as vectorized envs do."""
    extra = len(shape) - len(declared)
    shape = shape[extra:] if extra > 0 and set(shape[:extra]) == {1} else shape
    return len(shape) <= len(declared) and all(
        size in (1, wanted) for size, wanted in zip(shape[::-1], declared[::-1], strict=False)
    )


def _value_misfits(space: Any, array: np.ndarray[Any, Any], where: str) -> Iterator[Misfit]:
    low, high = _bounds(space)
    # Bounds are stored in the space's precision: 0.7 exceeds float32(0.7) by 1e-8.
    excess = np.maximum(np.subtract(low, array, dtype=np.float64), np.subtract(array, high, dtype=np.float64))
    excess = np.where(excess > 1e-6 * np.maximum(1.0, np.abs(array)), excess, 0.0)
    if excess.any():
        index = np.unravel_index(int(np.argmax(excess)), excess.shape)
        bound = f"{np.broadcast_to(low, array.shape)[index]:g} to {np.broadcast_to(high, array.shape)[index]:g}"
        text = f"is {array[index]:g} at index {_plain(index)}, declared {bound}"
        yield "out_of_bounds", where, text if array.ndim else f"is {array}, declared {bound}", float(excess.max())
    elif space.dtype.kind in "biu" and array.dtype.kind == "f" and (array != np.floor(array)).any():
        text = f"holds fractions ({array[_first(array != np.floor(array))]:g}), declared {space.dtype}"
        yield "wrong_dtype", where, text, 0


def _bounds(space: Any) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    last = space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
    return space.start, last


def _first(flags: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return np.unravel_index(int(np.argmax(flags)), flags.shape)


def _plain(index: tuple[Any, ...]) -> object:
    return int(index[0]) if len(index) == 1 else tuple(int(i) for i in index)
