"""Heads of a Q-network in compiled kernels: values of each sub-action, the greedy choice, and its gradient.

An action has K sub-actions (1 of a Discrete action) with `dims` (K,) choices each, side by side in the columns of a row
of Q-values (A,), A their sum; padding may follow.
"""

from __future__ import annotations

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain.jit import njit_inner


@njit_inner
def join(outputs: Float32Array, dims: Int64Array) -> None:
    """Advantages (A,) and, behind them, the value → Q-values, in place: of each sub-action v + a - mean(a).

    Wang et al. 2016, eq. 9; several sub-actions share the value (Tavakoli et al. 2018, eq. 1).
    """
    value, begin = outputs[dims.sum()], 0
    for choices in dims:
        total = np.float32(0)
        for a in range(begin, begin + choices):
            total += outputs[a]
        shift = value - total / np.float32(choices)
        for a in range(begin, begin + choices):
            outputs[a] += shift
        begin += choices


@njit_inner
def greedy_of(q_values: Float32Array, mask: BoolArray, begin: int, choices: int) -> int:
    """Of a sub-action's columns, from `begin`, the first legal one with the highest value, -1 if none is legal.

    mask (A,), or (0,) for all legal: that is what every row is of an array of masks without columns.

    NaN compares as false: where the first legal value is NaN it stays the choice, and the caller sees it.
    """
    best = -1
    for a in range(choices):
        legal = len(mask) == 0 or mask[begin + a]
        if legal and (best < 0 or q_values[begin + a] > q_values[begin + best]):
            best = a
    return best


@njit_inner
def greedy_row(q_values: Float32Array, mask: BoolArray, dims: Int64Array, chosen: Int64Array) -> None:  # …, (K,) out
    """`greedy_of` every sub-action."""
    begin = 0
    for k in range(len(dims)):
        chosen[k] = greedy_of(q_values, mask, begin, dims[k])
        begin += dims[k]


@njit_inner
def value_of(q_values: Float32Array, chosen: Int64Array, dims: Int64Array) -> float:
    """Mean of the values of the chosen sub-actions; 0 for one without a legal choice: nothing comes after it."""
    total, begin = np.float32(0), 0
    for k in range(len(dims)):
        if chosen[k] >= 0:
            total += q_values[begin + chosen[k]]
        begin += dims[k]
    mean: float = total / np.float32(len(dims))
    return mean


@njit_inner
def add_slope(
    slope: float, action: int, begin: int, choices: int, dueling: bool, delta: Float32Array, value: int
) -> None:
    """Gradient of one row's loss in the head's outputs, from its slope in the value of the sub-action taken.

    `begin`: the sub-action's first column; `value`: that of the dueling value.
    """
    if dueling:
        for a in range(begin, begin + choices):
            delta[a] -= slope / np.float32(choices)
        delta[value] += slope
    delta[begin + action] += slope
