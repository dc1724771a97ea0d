"""A policy with LSTMs in compiled kernels: its part of the calls of `actor_critic.py`, as `ppo.py` has an MLP's.

An LSTM stands in the place of the first layer. Only inputs that are not zero enter its gates; sequences go through it
step by step without padding (`lstm.py`), and its hidden states on through the nets a block of rows at a time. A
thread's part of a minibatch is whole sequences, so that it needs nothing of another part's.

Legend: C LSTMs, the policy's and the value net's or one for both; H units; B rows of a minibatch; M of the rollout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain.jit import njit_inline, njit_inner
from fasttrain.kernels.dense import add_product, sparse_backward, sparse_forward, sum_rows
from fasttrain.kernels.lstm import lstm_backward, lstm_forward, next_cells, squash
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    Constants,
    Layout,
    Lists,
    Rows,
    backward_hidden,
    forward_hidden,
    last_of_net,
    padded_rows,
)
from fasttrain.kernels.ppo import LossSettings, Scratch, policy_block, value_block

# Rows of `Cells.places`. Of each sequence: its first place in the minibatch, its length. Of each step: how many
# sequences have it, the rank of the next sequence that ends with it, the first of its rows.
FIRSTS, LENGTHS, SIZES, NEXT, BEGINS = range(5)


class Lstms(NamedTuple):
    """Where the LSTMs lie in the flat vector. `Layout` has the nets behind, its first columns for their outputs."""

    units: int  # H
    inputs: Int64Array  # (C,) offsets of (inputs, 4H)
    hidden: Int64Array  # (C,) offsets of (H, 4H)
    biases: Int64Array  # (C, 2) offsets of (4H,), of inputs and of hidden states


class Cells(NamedTuple):
    """Working memory of the LSTMs, for each part of a minibatch."""

    order: Int64Array  # (parts, B) rows step by step, the longest sequence first
    places: Int64Array  # (parts, 5, B + 2) where `lay_out` puts the sequences and their steps
    begun: Float32Array  # (parts, C, 2, B, H) hidden states and cells with which sequences begin
    gates: Float32Array  # (parts, C, B, 4H) later the gradients of their sums
    outputs: Float32Array  # (parts, C, 5, B, H) hidden states before the steps; cells; their tanh; hidden states after
    # the steps; the gradients of those
    rows: Float32Array  # (parts, 3, B rounded up, H) of one step: hidden states, cells, tanh of cells; or gradients
    sums: Float32Array  # (parts, B rounded up, 4H) of one step, what becomes its gates
    bias: Float32Array  # (parts, 4H) sum of both biases


class Past(NamedTuple):
    """What was remembered before each row's step: hidden and cells of the policy's LSTM, then of the value net's."""

    states: tuple[Float32Array, Float32Array, Float32Array, Float32Array]  # (M, H)
    starts: Float32Array  # (M,) 1 where an episode begins: nothing is remembered there


class Remembered(NamedTuple):
    """What the LSTMs read and write in a step of N envs."""

    lstms: Lstms
    past: Past  # of the N envs
    after: tuple[Float32Array, Float32Array, Float32Array, Float32Array]  # (N, H) out: the states then
    cells: Cells


class Sequences(NamedTuple):
    """What the LSTMs read and write in an epoch."""

    begins: BoolArray  # (M,) which of the rows, in their order, begin a sequence, besides the first of a minibatch
    lstms: Lstms
    past: Past  # of the M rows
    cells: Cells


@njit_inline
def weights_of(cell: int, flat: Float32Array, layout: Layout, lstms: Lstms) -> tuple[Any, Any, Any, Any]:
    """Views in a flat vector (P,): weights (inputs, 4H) and (H, 4H), and both biases (4H,)."""
    units, inputs, width = lstms.units, layout.inputs, 4 * lstms.units
    at, to, first, second = lstms.inputs[cell], lstms.hidden[cell], lstms.biases[cell, 0], lstms.biases[cell, 1]
    w, u = (
        flat[at : at + inputs * width].reshape((inputs, width)),
        flat[to : to + units * width].reshape((units, width)),
    )
    return w, u, flat[first : first + width], flat[second : second + width]


@njit_inner
def lay_out(
    begins: BoolArray,  # (B,) rows of a minibatch that begin a sequence, besides the first
    begin: int,
    end: int,
    batch: Int64Array,  # (B,) rows
    places: Int64Array,  # (5, ≥B + 2) out
    laid: Int64Array,  # (≥B,) out
) -> tuple[int, int, int]:
    """The sequences that begin between two places of a minibatch, step by step, the longest first.

    Returns:
        how many they are, how long the longest is, and how many rows they have.
    """
    count, longest, total, i = 0, 0, 0, begin
    while i < end and i > 0 and not begins[i]:  # of a sequence that began before
        i += 1
    while i < end:
        after = i + 1
        while after < len(batch) and not begins[after]:
            after += 1
        places[FIRSTS, count], places[LENGTHS, count] = i, after - i
        longest, total, count = max(longest, after - i), total + after - i, count + 1
        i = after
    for t in range(longest + 1):
        places[SIZES, t] = 0
    for s in range(count):
        places[SIZES, places[LENGTHS, s] - 1] += 1
    for t in range(longest - 2, -1, -1):  # sequences of exactly t + 1 steps → sequences that have a step t
        places[SIZES, t] += places[SIZES, t + 1]
    row = 0
    for t in range(longest):
        places[BEGINS, t] = row
        places[NEXT, t] = places[SIZES, t + 1]  # sequences that end with this step come after all longer ones
        row += places[SIZES, t]
    for s in range(count):
        length = places[LENGTHS, s]
        rank = places[NEXT, length - 1]
        places[NEXT, length - 1] += 1
        for t in range(length):
            laid[places[BEGINS, t] + rank] = batch[places[FIRSTS, s] + t]
    return count, longest, total


@njit_inner
def enter(block: int, columns: int, hidden: Float32Array, count: int, activations: Float32Array) -> None:
    """Hidden states (B, H) of `count` rows from `block` on, as the nets' inputs, from column `columns` on.

    Rows of padding get zeros: weights' gradients are products with all rows, and what an earlier block left may be NaN.
    """
    units = hidden.shape[1]
    for r in range(padded_rows(count)):
        for c in range(units):
            activations[r, columns + c] = hidden[block + r, c] if r < count else np.float32(0)


@njit_inner
def step_cells(
    block: Int64Array,  # rows of the lists, at most BLOCK
    begin: int,  # the env of the first
    cell: int,
    flat: Float32Array,
    layout: Layout,
    lists: Lists,
    memory: Remembered,
    me: int,
) -> None:
    """One step of an LSTM for some envs."""
    lstms, past, after, cells = memory.lstms, memory.past, memory.after, memory.cells
    units, bias, sums, rows = lstms.units, cells.bias[me], cells.sums[me], cells.rows[me, 0]
    w, u, first, second = weights_of(cell, flat, layout, lstms)
    for c in range(4 * units):
        bias[c] = first[c] + second[c]
    sparse_forward(lists.values, lists.columns, lists.starts, block, w, bias, sums)
    for r in range(len(block)):
        kept = np.float32(1) - past.starts[begin + r]
        for c in range(units):
            rows[r, c] = past.states[2 * cell][begin + r, c] * kept
    add_product(rows, u, padded_rows(len(block)), sums)
    hidden, before, squashed = after[2 * cell], cells.rows[me, 1], cells.rows[me, 2]
    for r in range(len(block)):
        kept = np.float32(1) - past.starts[begin + r]
        for c in range(units):
            before[r, c] = past.states[2 * cell + 1][begin + r, c] * kept
        squash(sums[r], units)
        next_cells(sums[r], before[r], after[2 * cell + 1][begin + r], squashed[r])
        for c in range(units):
            hidden[begin + r, c] = sums[r, 3 * units + c] * squashed[r, c]


@njit_inline
def forward_remembering(
    block: Int64Array,
    begin: int,
    flat: Float32Array,
    layout: Layout,
    lists: Lists,
    memory: Remembered,
    activations: Float32Array,
    me: int,
) -> None:
    """`nets.forward_block` of a policy with LSTMs."""
    lstm_count = len(memory.lstms.inputs)
    for cell in range(lstm_count):
        step_cells(block, begin, cell, flat, layout, lists, memory, me)
    for net in (POLICY, VALUE):
        hidden = memory.after[2 * min(net, lstm_count - 1)]
        enter(begin, layout.columns[net, 0], hidden, len(block), activations)
    forward_hidden(flat, layout, padded_rows(len(block)), activations)


@njit_inline
def forward_lstms(
    laid: Int64Array,  # (m,) rows as `lay_out` has them
    count: int,  # sequences
    longest: int,
    flat: Float32Array,
    layout: Layout,
    lstms: Lstms,
    rows: Rows,
    past: Past,
    cells: Cells,
    part: int,
) -> None:
    """All LSTMs through one part's sequences."""
    total, units, bias = len(laid), lstms.units, cells.bias[part]
    for cell in range(len(lstms.inputs)):
        w, u, first, second = weights_of(cell, flat, layout, lstms)
        gates, out = cells.gates[part, cell, :total], cells.outputs[part, cell]
        for c in range(4 * units):
            bias[c] = first[c] + second[c]
        sparse_forward(rows.values, rows.columns, rows.starts, laid, w, bias, gates)
        h0, c0 = cells.begun[part, cell, 0, :count], cells.begun[part, cell, 1, :count]
        for s in range(count):
            row = laid[s]
            kept = np.float32(1) - past.starts[row]
            for c in range(units):
                h0[s, c] = past.states[2 * cell][row, c] * kept
                c0[s, c] = past.states[2 * cell + 1][row, c] * kept
        lstm_forward(gates, u, h0, c0, cells.places[part, SIZES, :longest], out[0], out[1], out[2], out[3],
                     cells.rows[part, 0], cells.sums[part])  # fmt: skip


@njit_inline
def backward_lstms(
    laid: Int64Array,
    count: int,
    longest: int,
    flat: Float32Array,
    layout: Layout,
    lstms: Lstms,
    rows: Rows,
    scratch: Scratch,
    cells: Cells,
    part: int,
) -> None:
    """Gradients of the LSTMs' parameters, from those of the hidden states in `cells.outputs[part, …, 4]`."""
    total, units, size, gradient = len(laid), lstms.units, len(scratch.ones), scratch.gradients[part]
    nothing = scratch.zeros[:units]
    for cell in range(len(lstms.inputs)):
        w_out, u_out, first, second = weights_of(cell, gradient, layout, lstms)
        gates, out, at = cells.gates[part, cell, :total], cells.outputs[part, cell], lstms.hidden[cell]
        turned = scratch.transposed[at : at + 4 * units * units].reshape((4 * units, units))
        for r in range(padded_rows(count)):
            for c in range(units):
                cells.rows[part, 0, r, c] = cells.rows[part, 1, r, c] = np.float32(0)
        lstm_backward(out[4], gates, turned, cells.begun[part, cell, 1, :count], cells.places[part, SIZES, :longest],
                      out[1], out[2], gates, cells.rows[part, 0], cells.rows[part, 1], cells.sums[part],
                      nothing)  # fmt: skip
        for begin in range(0, total, size):
            some = gates[begin : begin + size]
            add_product(out[0][begin : begin + len(some)].T, some, units, u_out)
            sum_rows(scratch.ones, scratch.every, 0, len(some), some, first, first)
        sparse_backward(rows.values, rows.columns, rows.starts, laid, gates, w_out)
        for c in range(4 * units):
            second[c] = first[c]


@njit_inline
def gradient_of_sequences(
    batch: Int64Array,  # (B,) rows of the minibatch
    begins: BoolArray,  # (B,)
    flat: Float32Array,
    layout: Layout,
    rows: Rows,
    loss: LossSettings,
    scratch: Scratch,
    memory: Sequences,
    part: int,
) -> None:
    """Gradients and statistics of one part's sequences into its sums."""
    lstms, past, cells = memory.lstms, memory.past, memory.cells
    gradient, statistics, parts = scratch.gradients[part], scratch.statistics[part], len(scratch.gradients)
    activations, deltas, probs = scratch.activations[part], scratch.deltas[part], scratch.probs[part]
    last, value_last = last_of_net(POLICY, layout, activations), last_of_net(VALUE, layout, activations)
    last_delta, value_delta = last_of_net(POLICY, layout, deltas), last_of_net(VALUE, layout, deltas)
    gradient[:] = 0.0
    statistics[:] = 0.0
    share, size, mean, scale = 1.0 / len(batch), len(activations), scratch.moments[0], scratch.moments[1]
    constants = Constants(scratch.zeros, scratch.ones, scratch.every)
    count, longest, total = lay_out(begins, len(batch) * part // parts, len(batch) * (part + 1) // parts, batch,
                                    cells.places[part], cells.order[part])  # fmt: skip
    laid, lstm_count = cells.order[part, :total], len(lstms.inputs)
    forward_lstms(laid, count, longest, flat, layout, lstms, rows, past, cells, part)
    for begin in range(0, total, size):
        block = laid[begin : begin + size]
        for net in (POLICY, VALUE):
            hidden = cells.outputs[part, min(net, lstm_count - 1), 3]
            enter(begin, layout.columns[net, 0], hidden, len(block), activations)
        forward_hidden(flat, layout, padded_rows(len(block)), activations)
        policy_block(block, share, mean, scale, flat, layout, rows, loss, last, probs, constants, last_delta, gradient,
                     statistics)  # fmt: skip
        value_block(block, share, flat, layout, rows, loss, value_last, scratch.values[part], constants, value_delta,
                    gradient, statistics)  # fmt: skip
        deltas[len(block) : padded_rows(len(block)), :] = 0.0
        backward_hidden(flat, layout, len(block), activations, deltas, scratch.transposed, constants, gradient)
        for cell in range(lstm_count):  # of an LSTM for both nets the policy's gradient alone, as in sb3-contrib
            column, d_hidden = layout.columns[cell, 0], cells.outputs[part, cell, 4]
            for r in range(len(block)):
                for c in range(lstms.units):
                    d_hidden[begin + r, c] = deltas[r, column + c]
    backward_lstms(laid, count, longest, flat, layout, lstms, rows, scratch, cells, part)


@njit_inner
def transpose_cells(flat: Float32Array, lstms: Lstms, transposed: Float32Array) -> None:
    """Weights of hidden states as (4H, H), at the same offsets."""
    units = lstms.units
    for cell in range(len(lstms.inputs)):
        at = lstms.hidden[cell]
        for c in range(units):
            for j in range(4 * units):
                transposed[at + j * units + c] = flat[at + c * 4 * units + j]
