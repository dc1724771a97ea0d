"""An LSTM layer for sequences of different lengths, and its gradient: step by step, without padding.

Rows are ordered by step, and in each step the longest sequences come first. So the n sequences of a step are the
first n sequences of the previous step. The caller computes products with inputs, and gradients of weights, in one
product over all rows. Gates are side by side as in torch: input, forget, cell, output.

Legend: B rows, S sequences, T steps, H units, a multiple of `simd.PAD`. W is S rounded up to TILE_ROWS.
"""

from __future__ import annotations

import numpy as np

from fasttrain.batch import Float32Array, Int64Array
from fasttrain_kernels.dense import TANH, activate, add_product, set_product
from fasttrain_kernels.jit import njit_inner
from fasttrain_kernels.simd import TILE_ROWS


@njit_inner
def squash(row: Float32Array, units: int) -> None:  # (4H,)
    """Apply the gates' sigmoid and tanh to a row of sums. sigmoid(x) is computed from tanh(x / 2), which is fast."""
    half = row.dtype.type(0.5)
    for c in range(2 * units):
        row[c] *= half
    for c in range(3 * units, 4 * units):
        row[c] *= half
    activate(row, TANH)
    for c in range(2 * units):
        row[c] = row[c] * half + half
    for c in range(3 * units, 4 * units):
        row[c] = row[c] * half + half


@njit_inner
def next_cells(gates: Float32Array, before: Float32Array, cells: Float32Array, squashed: Float32Array) -> None:
    """cells = f × before + i × g for one row; squashed = tanh(cells)."""
    units = len(cells)
    for c in range(units):
        cells[c] = gates[units + c] * before[c] + gates[c] * gates[2 * units + c]
    for c in range(units):
        squashed[c] = cells[c]
    activate(squashed, TANH)


@njit_inner
def lstm_forward(
    gates: Float32Array,  # (B, 4H) in: products with inputs, plus biases; out: the gates
    w: Float32Array,  # (H, 4H)
    h0: Float32Array,  # (S, H)
    c0: Float32Array,  # (S, H)
    sizes: Int64Array,  # (T,) number of sequences longer than t, for each step t; never increases
    befores: Float32Array,  # (B, H) out: each row's hidden state before the step
    cells: Float32Array,  # (B, H) out
    squashed: Float32Array,  # (B, H) out: tanh of the cells
    hidden: Float32Array,  # (B, H) out
    rows: Float32Array,  # (W, H), the caller fills it with zeros
    sums: Float32Array,  # (W, 4H), the caller fills it with zeros
) -> None:
    """Compute the hidden states of all rows."""
    units, first, last = w.shape[0], 0, 0
    for r in range(len(h0)):
        for c in range(units):
            rows[r, c] = h0[r, c]
    for t in range(len(sizes)):
        count = sizes[t]
        for r in range(count):
            for c in range(4 * units):
                sums[r, c] = gates[first + r, c]
            for c in range(units):
                befores[first + r, c] = rows[r, c]
        add_product(rows, w, -(-count // TILE_ROWS) * TILE_ROWS, sums)
        for r in range(count):
            i = first + r
            squash(sums[r], units)
            next_cells(sums[r], c0[r] if t == 0 else cells[last + r], cells[i], squashed[i])
            for c in range(units):
                rows[r, c] = hidden[i, c] = sums[r, 3 * units + c] * squashed[i, c]
            for c in range(4 * units):
                gates[i, c] = sums[r, c]
        last, first = first, first + count


@njit_inner
def gate_gradients(
    d_hidden: Float32Array,  # (H,) gradients from later steps and from the next layer
    d_cells: Float32Array,  # (H,) in: gradients from the next step; out: those for the previous step
    gates: Float32Array,  # (4H,)
    before: Float32Array,  # (H,) cells before the step
    squashed: Float32Array,  # (H,)
    sums: Float32Array,  # (4H,) out
) -> None:
    """The gradient of one row's gate sums, which are the inputs of tanh and sigmoid.

    Each loop uses few arrays. With more arrays LLVM cannot prove that arrays do not overlap, and does not vectorize.
    """
    units, one = len(before), before.dtype.type(1)
    for c in range(units):
        o = gates[3 * units + c]
        sums[3 * units + c] = d_hidden[c] * squashed[c] * o * (one - o)
    for c in range(units):
        d_cells[c] += d_hidden[c] * gates[3 * units + c] * (one - squashed[c] * squashed[c])
    for c in range(units):
        i = gates[c]
        sums[c] = d_cells[c] * gates[2 * units + c] * i * (one - i)
    for c in range(units):
        g = gates[2 * units + c]
        sums[2 * units + c] = d_cells[c] * gates[c] * (one - g * g)
    for c in range(units):
        d_cells[c] *= gates[units + c]
    for c in range(units):
        sums[units + c] = d_cells[c] * before[c] * (one - gates[units + c])


@njit_inner
def lstm_backward(
    d_hidden: Float32Array,  # (B, H) in: gradients from the next layer; out: plus gradients from later steps
    gates: Float32Array,  # (B, 4H)
    w: Float32Array,  # (4H, H)
    c0: Float32Array,  # (S, H)
    sizes: Int64Array,  # (T,)
    cells: Float32Array,  # (B, H)
    squashed: Float32Array,  # (B, H)
    d_gates: Float32Array,  # (B, 4H) out
    d_rows: Float32Array,  # (W, H), the caller fills it with zeros
    d_cells: Float32Array,  # (W, H), the caller fills it with zeros
    sums: Float32Array,  # (W, 4H), the caller fills it with zeros
    nothing: Float32Array,  # (H,) zeros
) -> None:
    """Compute the gradient of the gates' sums, from the last step to the first."""
    units, first = w.shape[1], len(gates)
    for t in range(len(sizes) - 1, -1, -1):
        count = sizes[t]
        first -= count
        padded = -(-count // TILE_ROWS) * TILE_ROWS
        last = first - (sizes[t - 1] if t > 0 else 0)
        for r in range(count):
            i = first + r
            for c in range(units):
                d_hidden[i, c] += d_rows[r, c]
            before = c0[r] if t == 0 else cells[last + r]
            gate_gradients(d_hidden[i], d_cells[r], gates[i], before, squashed[i], sums[r])
            for c in range(4 * units):
                d_gates[i, c] = sums[r, c]
        for r in range(count, padded):  # no gradient for padding rows
            for c in range(4 * units):
                sums[r, c] = np.float32(0)
        if t > 0:
            set_product(sums, w, nothing, padded, d_rows)
