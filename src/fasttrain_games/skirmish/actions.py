"""Action spaces of Skirmish. An action of each space becomes a row of integers with one value per head."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray, Int64Array
from fasttrain_games.skirmish.options import Options


def action_space(options: Options) -> spaces.Discrete | spaces.MultiDiscrete:
    """`Discrete` with action_mode="units", else `MultiDiscrete` with one entry per head."""
    sizes = options.head_sizes
    return spaces.Discrete(sizes[0]) if options.action_mode == "units" else spaces.MultiDiscrete(np.array(sizes))


def named_heads(options: Options) -> spaces.Dict:
    """A Dict space of the heads by name, in the order of the `MultiDiscrete`. (Gymnasium sorts a plain dict's keys.)"""
    units = range(len(options.rosters[0]))
    names = [*(f"move_{u}" for u in units), *(f"target_{u}" for u in units), "stratagem", "stratagem_unit"]
    sizes = zip(names, options.head_sizes, strict=True)
    return spaces.Dict(OrderedDict((name, spaces.Discrete(size)) for name, size in sizes))


def head_values(options: Options, action: Any) -> Int64Array:
    """(heads,) int64: one value per head, from an action that is an int, an array or a dict by name."""
    if isinstance(action, dict):
        action = [action[name] for name in named_heads(options)]
    return np.array(action, np.int64).reshape(len(options.head_sizes))  # a copy: illegal values get replaced in it


def replace_illegal(options: Options, mask: BoolArray, values: Int64Array) -> bool:
    """Replace every illegal value by the lowest legal one, in place. Returns whether there was an illegal value."""
    start, found = 0, False
    for head, size in enumerate(options.head_sizes):
        legal = mask[start : start + size]
        if not (0 <= values[head] < size and legal[values[head]]):
            values[head], found = int(legal.argmax()), True
        start += size
    return found


def illegal_head(options: Options, mask: BoolArray, values: Int64Array) -> tuple[int, list[int]] | None:
    """The first head with an illegal value, and the legal values of that head; None if all are legal."""
    start = 0
    for head, size in enumerate(options.head_sizes):
        legal = mask[start : start + size]
        if not (0 <= values[head] < size and legal[values[head]]):
            return head, np.flatnonzero(legal).tolist()
        start += size
    return None
