"""Turns the `opponents` argument into cumulative weights, from which a kernel draws the bot of each seat."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fasttrain.errors import ConfigError
from fasttrain_games.skullking.bots import LEVEL_NAMES, SEAT_NAMES, SELF

OpponentMix = str | Sequence[str] | Mapping[str, float]

_PREFIX = "rule_based"
_BOTS = (*LEVEL_NAMES, _PREFIX, *(f"{_PREFIX}_{name}" for name in LEVEL_NAMES[1:]))


def level_of(name: str) -> int:
    """The bot level of a name. A prefix is allowed: `rule_based` is `medium`, `rule_based_hard` is `hard`, and so on.

    Raises:
        ConfigError: the name is unknown. The message has the choices and the nearest one.
    """
    return _level_among(name, _BOTS)


def _level_among(name: str, choices: tuple[str, ...]) -> int:
    if name in choices:
        short = name.removeprefix(_PREFIX).removeprefix("_")
        return SEAT_NAMES.index(short or "medium")
    near = difflib.get_close_matches(str(name), choices, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown opponent {name!r}{hint} Choices: {', '.join(choices)}")


def _seat_level(name: str) -> int:
    return _level_among(name, (*_BOTS, SEAT_NAMES[SELF]))


def cumulative_mix(opponents: OpponentMix, num_players: int) -> NDArray[np.float64]:
    """(num_players - 1, 5) float64: cumulative weights. A seat draws u and gets the first level with a weight above u.

    `opponents` is a name for all seats, a list with one name per seat from the learner's left on, or a mapping of name
    to weight, from which each seat draws at each game's start. "self" is no bot: the game stops for that seat's action.

    Raises:
        ConfigError: unknown name, a list of the wrong length, a wrong weight.
    """
    seats = num_players - 1
    weights = np.zeros((seats, len(SEAT_NAMES)))
    if isinstance(opponents, str):
        weights[:, _seat_level(opponents)] = 1.0
    elif isinstance(opponents, Mapping):
        for name, weight in opponents.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"opponents: the weight of {name!r} is {weight!r}, not a number >= 0")
            weights[:, _seat_level(name)] += weight
        if weights.sum() <= 0:
            raise ConfigError(f"opponents={dict(opponents)!r}: at least one weight must be above 0")
    elif isinstance(opponents, Sequence):
        if len(opponents) != seats:
            raise ConfigError(
                f"opponents={list(opponents)!r} names {len(opponents)} bots, but num_players={num_players} has {seats}"
                " other seats; give one name per seat, or a single name for all"
            )
        for seat, name in enumerate(opponents):
            weights[seat, _seat_level(name)] = 1.0
    else:
        raise ConfigError(f"opponents={opponents!r} is neither a name, nor a list of names, nor a mapping to weights")
    cumulative: NDArray[np.float64] = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    # A sum that is below 1 only by rounding becomes 1. Else a bot of weight 0, or none, could be drawn.
    cumulative[cumulative >= 1.0 - 1e-12] = 1.0
    return cumulative
