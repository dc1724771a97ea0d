"""A GRU layer, and the scan of a minGRU, through sequences of different lengths, with gradients: as `kernels/lstm.py`.

Rows lie as there. Gates stand side by side as torch has them: reset, update (the share that is kept), new.
"""

from __future__ import annotations

import numpy as np

from fasttrain.batch import Float32Array, Int64Array
from fasttrain.jit import njit_bare, njit_inner
from fasttrain.kernels.dense import TANH, activate, add_product, set_product
from fasttrain.kernels.simd import TILE_ROWS


@njit_inner
def gru_gates(gates: Float32Array, sums: Float32Array) -> None:  # (3H,), (3H,)
    """Gates of one row from inputs' sums, in place, and those of its hidden state; sigmoids as in `lstm.squash`."""
    units, half = len(gates) // 3, gates.dtype.type(0.5)
    for c in range(2 * units):
        gates[c] = half * (gates[c] + sums[c])
    activate(gates[: 2 * units], TANH)
    for c in range(2 * units):
        gates[c] = gates[c] * half + half
    for c in range(units):
        gates[2 * units + c] += gates[c] * sums[2 * units + c]
    activate(gates[2 * units :], TANH)


@njit_bare
def gru_forward(
    gates: Float32Array,  # (B, 3H) in: inputs' products and both biases, without the hidden one of new; out: the gates
    w: Float32Array,  # (H, 3H)
    bias: Float32Array,  # (H,) of the hidden state's part of new
    h0: Float32Array,  # (S, H)
    sizes: Int64Array,  # (T,) sequences that have such a step; never more than in the step before
    befores: Float32Array,  # (B, H) out: hidden states before each row's step
    recalled: Float32Array,  # (B, H) out: the hidden state's part of new, before it is reset
    hidden: Float32Array,  # (B, H) out
    rows: Float32Array,  # (working rows, H), zeros
    sums: Float32Array,  # (working rows, 3H), zeros
) -> None:
    """The hidden states of all rows."""
    units, first = w.shape[0], 0
    for r in range(len(h0)):
        for c in range(units):
            rows[r, c] = h0[r, c]
    for t in range(len(sizes)):
        count = sizes[t]
        for r in range(count):
            for c in range(units):
                befores[first + r, c] = rows[r, c]
                sums[r, c] = sums[r, units + c] = 0
            for c in range(units):
                sums[r, 2 * units + c] = bias[c]
        add_product(rows, w, -(-count // TILE_ROWS) * TILE_ROWS, sums)
        for r in range(count):
            i = first + r
            gru_gates(gates[i], sums[r])
            for c in range(units):
                recalled[i, c] = sums[r, 2 * units + c]
            for c in range(units):
                new = gates[i, 2 * units + c]
                rows[r, c] = hidden[i, c] = new + gates[i, units + c] * (befores[i, c] - new)
        first += count


@njit_inner
def gru_gate_gradients(
    d_hidden: Float32Array,  # (H,)
    gates: Float32Array,  # (3H,)
    before: Float32Array,  # (H,) hidden state before the step
    recalled: Float32Array,  # (H,)
    d_gates: Float32Array,  # (3H,) out: of the inputs' sums
    sums: Float32Array,  # (3H,) out: of the hidden state's
) -> None:
    """The gradient of the sums that one row's gates come of."""
    units, one = len(before), before.dtype.type(1)
    for c in range(units):
        new = gates[2 * units + c]
        d_gates[2 * units + c] = d_hidden[c] * (one - gates[units + c]) * (one - new * new)
    for c in range(units):
        kept = gates[units + c]
        d_gates[units + c] = d_hidden[c] * (before[c] - gates[2 * units + c]) * kept * (one - kept)
    for c in range(units):
        reset = gates[c]
        d_gates[c] = d_gates[2 * units + c] * recalled[c] * reset * (one - reset)
    for c in range(2 * units):
        sums[c] = d_gates[c]
    for c in range(units):
        sums[2 * units + c] = d_gates[2 * units + c] * gates[c]


@njit_bare
def gru_backward(
    d_hidden: Float32Array,  # (B, H) in: of the outputs; out: with what the steps after add
    gates: Float32Array,  # (B, 3H)
    w: Float32Array,  # (3H, H)
    sizes: Int64Array,  # (T,)
    befores: Float32Array,  # (B, H)
    recalled: Float32Array,  # (B, H)
    d_gates: Float32Array,  # (B, 3H) out: of the inputs' sums; the hidden state's part of new has it times the reset
    d_rows: Float32Array,  # (working rows, H), zeros
    sums: Float32Array,  # (working rows, 3H), zeros
    nothing: Float32Array,  # (H,) zeros
) -> None:
    """The gradient of the gates' sums, from the last step to the first."""
    units, first = w.shape[1], len(gates)
    for t in range(len(sizes) - 1, -1, -1):
        count = sizes[t]
        first -= count
        padded = -(-count // TILE_ROWS) * TILE_ROWS
        for r in range(count):
            i = first + r
            for c in range(units):
                d_hidden[i, c] += d_rows[r, c]
            gru_gate_gradients(d_hidden[i], gates[i], befores[i], recalled[i], d_gates[i], sums[r])
        for r in range(count, padded):  # sequences that end before this step hear nothing of it
            for c in range(3 * units):
                sums[r, c] = np.float32(0)
        set_product(sums, w, nothing, padded, d_rows)
        for r in range(count):
            for c in range(units):
                d_rows[r, c] += d_hidden[first + r, c] * gates[first + r, units + c]


@njit_bare
def scan_forward(
    kept: Float32Array,  # (B, H)
    h0: Float32Array,  # (S, H)
    sizes: Int64Array,  # (T,)
    befores: Float32Array,  # (B, H) out: hidden states before each row's step
    hidden: Float32Array,  # (B, H) in: what each step adds; out: kept × h before + that
) -> None:
    """The hidden states of all rows."""
    first, last = 0, 0
    for t in range(len(sizes)):
        for r in range(sizes[t]):
            i, before = first + r, h0[r] if t == 0 else hidden[last + r]
            for c in range(len(before)):
                befores[i, c] = before[c]
            for c in range(len(before)):
                hidden[i, c] += kept[i, c] * befores[i, c]
        last, first = first, first + sizes[t]


@njit_bare
def scan_backward(d_hidden: Float32Array, kept: Float32Array, sizes: Int64Array) -> None:
    """Add to the gradient of each row's hidden state, in place, what the steps after it add; (B, H) each."""
    first = len(kept)
    for t in range(len(sizes) - 1, 0, -1):
        first -= sizes[t]
        last = first - sizes[t - 1]
        for r in range(sizes[t]):
            for c in range(kept.shape[1]):
                d_hidden[last + r, c] += d_hidden[first + r, c] * kept[first + r, c]
