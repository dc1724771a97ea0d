"""The LSTMs of a policy in compiled kernels, for the kernels of `actor_critic.py`.

An LSTM replaces the first layer. The gates are computed only from inputs that are not zero. Sequences are computed step
by step, without padding (`lstm.py`). The hidden states are then the inputs of the nets, in blocks of rows. A part of a
minibatch has whole sequences, so that the parts are independent.

Legend: C LSTMs (one for policy and one for value net, or one for both); H units; B rows of a minibatch, M of a rollout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain_kernels.dense import add_product, sparse_backward, sparse_forward, sum_rows
from fasttrain_kernels.jit import njit_inline, njit_inner
from fasttrain_kernels.lstm import lstm_backward, lstm_forward, next_cells, squash
from fasttrain_kernels.nets import (
    POLICY,
    VALUE,
    Constants,
    Layout,
    Lists,
    backward_hidden,
    forward_hidden,
    padded_rows,
)
from fasttrain_kernels.ppo import Training, policy_block, value_block

# Rows of `Cells.places`. By sequence: FIRSTS, its first row in the minibatch; LENGTHS. By step: SIZES, the number of
# sequences that reach it; NEXT, a counter to rank the sequences that end there; BEGINS, its first row in `order`.
FIRSTS, LENGTHS, SIZES, NEXT, BEGINS = range(5)


class Lstms(NamedTuple):
    """Where the LSTMs are in the flat parameter vector. `Layout` says where the nets after the LSTMs are."""

    units: int  # H
    inputs: Int64Array  # (C,) offsets of input weights (inputs, 4H)
    hidden: Int64Array  # (C,) offsets of hidden weights (H, 4H)
    biases: Int64Array  # (C, 2) offsets of both biases (4H,), for inputs and for hidden states


class Cells(NamedTuple):
    """Working memory of the LSTMs, for each part of a minibatch."""

    order: Int64Array  # (parts, B) row indices by step; in each step the longest sequence first
    places: Int64Array  # (parts, 5, B + 2) FIRSTS … BEGINS of sequences and steps, from `lay_out`
    begun: Float32Array  # (parts, C, 2, B, H) hidden states and cells at the start of sequences
    gates: Float32Array  # (parts, C, B, 4H) gates, later the gradients of the gates' sums
    # (parts, C, 5, B, H) hidden states before the steps; cells; tanh of cells; hidden states after the steps;
    # gradients of the hidden states after the steps
    outputs: Float32Array
    rows: Float32Array  # (parts, 3, B rounded up, H) for one step: hidden states, cells, tanh of cells; or gradients
    sums: Float32Array  # (parts, B rounded up, 4H) for one step: the gates' sums
    bias: Float32Array  # (parts, 4H) sum of both biases


class Past(NamedTuple):
    """States before each row's step: hidden states and cells of the policy's LSTM, then of the value net's."""

    states: tuple[Float32Array, Float32Array, Float32Array, Float32Array]  # (M, H)
    starts: Float32Array  # (M,) 1 where an episode begins: zeros are used instead of the states there


class Remembered(NamedTuple):
    """Inputs and outputs of the LSTMs in a step of N envs."""

    lstms: Lstms
    past: Past  # states of the N envs before the step
    after: tuple[Float32Array, Float32Array, Float32Array, Float32Array]  # (N, H) out: the states after the step
    cells: Cells


class Sequences(NamedTuple):
    """Inputs of the LSTMs in an epoch, and their working memory."""

    begins: BoolArray  # (M,) in the epoch's order: True where a sequence begins; each minibatch also begins one
    lstms: Lstms
    past: Past  # states before each of the M rows
    cells: Cells


@njit_inline
def weights_of(cell: int, flat: Float32Array, layout: Layout, lstms: Lstms) -> tuple[Any, Any, Any, Any]:
    """Views of a flat vector (P,): weights (inputs, 4H) and (H, 4H), and both biases (4H,)."""
    units, inputs, width = lstms.units, layout.inputs, 4 * lstms.units
    at, to, first, second = lstms.inputs[cell], lstms.hidden[cell], lstms.biases[cell, 0], lstms.biases[cell, 1]
    w = flat[at : at + inputs * width].reshape((inputs, width))
    u = flat[to : to + units * width].reshape((units, width))
    return w, u, flat[first : first + width], flat[second : second + width]


@njit_inner
def lay_out(
    begins: BoolArray,  # (B,) True in rows of a minibatch that begin a sequence; row 0 always begins one
    begin: int,
    end: int,
    batch: Int64Array,  # (B,) rows
    places: Int64Array,  # (5, ≥B + 2) out
    laid: Int64Array,  # (≥B,) out
) -> tuple[int, int, int]:
    """Order the rows of sequences whose first row is in begin … end - 1: by step, the longest sequence first.

    Returns:
        the number of sequences, the length of the longest sequence, and the number of rows.
    """
    count, longest, total, i = 0, 0, 0, begin
    while i < end and i > 0 and not begins[i]:  # skip the rows of a sequence that began earlier
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
    for t in range(longest - 2, -1, -1):  # sequences that end with step t, and those that go on
        places[SIZES, t] += places[SIZES, t + 1]
    row = 0
    for t in range(longest):
        places[BEGINS, t] = row
        places[NEXT, t] = places[SIZES, t + 1]  # sequences that end with step t follow all longer ones
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
    """Copy hidden states (B, H) of `count` rows, from row `block` on, into the nets' inputs, from column `columns` on.

    Padding rows are set to zero, because weight gradients use all rows. They may have NaN from an earlier block.
    """
    units = hidden.shape[1]
    for r in range(padded_rows(count)):
        for c in range(units):
            activations[r, columns + c] = hidden[block + r, c] if r < count else np.float32(0)


@njit_inner
def step_cells(
    block: Int64Array, begin: int, cell: int, flat: Float32Array, layout: Layout, lists: Lists, memory: Remembered,
    me: int,
) -> None:  # fmt: skip
    """One step of LSTM `cell` for `block`, the indices of at most BLOCK envs from `begin` on. `lists`: observations."""
    lstms, past, after, cells = memory.lstms, memory.past, memory.after, memory.cells
    units, bias, sums, rows = lstms.units, cells.bias[me], cells.sums[me], cells.rows[me, 0]
    w, u, first, second = weights_of(cell, flat, layout, lstms)
    for c in range(4 * units):
        bias[c] = first[c] + second[c]
    sparse_forward(lists, block, w, bias, sums)
    for r in range(len(block)):
        within = np.float32(1) - past.starts[begin + r]
        for c in range(units):
            rows[r, c] = past.states[2 * cell][begin + r, c] * within
    add_product(rows, u, padded_rows(len(block)), sums)
    hidden, before, squashed = after[2 * cell], cells.rows[me, 1], cells.rows[me, 2]
    for r in range(len(block)):
        within = np.float32(1) - past.starts[begin + r]
        for c in range(units):
            before[r, c] = past.states[2 * cell + 1][begin + r, c] * within
        squash(sums[r], units)
        next_cells(sums[r], before[r], after[2 * cell + 1][begin + r], squashed[r])
        for c in range(units):
            hidden[begin + r, c] = sums[r, 3 * units + c] * squashed[r, c]


@njit_inline
def forward_remembering(
    block: Int64Array, begin: int, flat: Float32Array, layout: Layout, lists: Lists, memory: Remembered,
    activations: Float32Array, me: int,
) -> None:  # fmt: skip
    """Like `nets.forward_block`, for a policy with LSTMs."""
    lstm_count = len(memory.lstms.inputs)
    for cell in range(lstm_count):
        step_cells(block, begin, cell, flat, layout, lists, memory, me)
    for net in (POLICY, VALUE):
        hidden = memory.after[2 * min(net, lstm_count - 1)]
        enter(begin, layout.columns[net, 0], hidden, len(block), activations)
    forward_hidden(flat, layout, padded_rows(len(block)), activations)


@njit_inline
def forward_lstms(laid: Int64Array, count: int, longest: int, training: Training, memory: Sequences, part: int) -> None:
    """Compute all LSTMs for the rows (m,) of one part's sequences, in the order of `lay_out`."""
    layout, lstms, past, cells = training.layout, memory.lstms, memory.past, memory.cells
    total, units, bias = len(laid), lstms.units, cells.bias[part]
    for cell in range(len(lstms.inputs)):
        w, u, first, second = weights_of(cell, training.flat, layout, lstms)
        gates, out = cells.gates[part, cell, :total], cells.outputs[part, cell]
        for c in range(4 * units):
            bias[c] = first[c] + second[c]
        sparse_forward(training.rows.lists, laid, w, bias, gates)
        h0, c0 = cells.begun[part, cell, 0, :count], cells.begun[part, cell, 1, :count]
        for s in range(count):
            row = laid[s]
            within = np.float32(1) - past.starts[row]
            for c in range(units):
                h0[s, c] = past.states[2 * cell][row, c] * within
                c0[s, c] = past.states[2 * cell + 1][row, c] * within
        lstm_forward(gates, u, h0, c0, cells.places[part, SIZES, :longest], out[0], out[1], out[2], out[3],
                     cells.rows[part, 0], cells.sums[part])  # fmt: skip


@njit_inline
def backward_lstms(
    laid: Int64Array, count: int, longest: int, training: Training, memory: Sequences, part: int
) -> None:
    """Gradients of the LSTMs' parameters, from the gradients of the hidden states in `memory.cells`."""
    layout, scratch, lstms, cells = training.layout, training.scratch, memory.lstms, memory.cells
    total, units, gradient = len(laid), lstms.units, scratch.gradients[part]
    nothing, size = scratch.zeros[:units], len(scratch.ones)
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
        sparse_backward(training.rows.lists, laid, gates, w_out)
        for c in range(4 * units):
            second[c] = first[c]


@njit_inline
def gradient_of_sequences(
    batch: Int64Array, begins: BoolArray, training: Training, memory: Sequences, part: int
) -> None:  # (B,), (B,)
    """Compute the summed gradients and statistics of one part of a minibatch's sequences."""
    flat, layout, scratch, cells = training.flat, training.layout, training.scratch, memory.cells
    activations, deltas, gradient = scratch.activations[part], scratch.deltas[part], scratch.gradients[part]
    parts, share, size = len(scratch.gradients), 1.0 / len(batch), len(activations)
    scratch.gradients[part] = 0.0
    scratch.statistics[part] = 0.0
    constants = Constants(scratch.zeros, scratch.ones, scratch.every)
    count, longest, total = lay_out(begins, len(batch) * part // parts, len(batch) * (part + 1) // parts, batch,
                                    cells.places[part], cells.order[part])  # fmt: skip
    laid, lstm_count = cells.order[part, :total], len(memory.lstms.inputs)
    forward_lstms(laid, count, longest, training, memory, part)
    for begin in range(0, total, size):
        block = laid[begin : begin + size]
        for net in (POLICY, VALUE):
            hidden = cells.outputs[part, min(net, lstm_count - 1), 3]
            enter(begin, layout.columns[net, 0], hidden, len(block), activations)
        forward_hidden(flat, layout, padded_rows(len(block)), activations)
        policy_block(block, share, training, part)
        value_block(block, share, training, part)
        backward_hidden(flat, layout, len(block), activations, deltas, scratch.transposed, constants, gradient)
        for cell in range(lstm_count):  # a shared LSTM gets only the policy's gradient, as in sb3-contrib
            column, d_hidden = layout.columns[cell, 0], cells.outputs[part, cell, 4]
            for r in range(len(block)):
                for c in range(memory.lstms.units):
                    d_hidden[begin + r, c] = deltas[r, column + c]
    backward_lstms(laid, count, longest, training, memory, part)


@njit_inner
def transpose_cells(flat: Float32Array, lstms: Lstms, transposed: Float32Array) -> None:
    """Write the weights of hidden states as (4H, H), at the same offsets as in `flat`."""
    units = lstms.units
    for cell in range(len(lstms.inputs)):
        at = lstms.hidden[cell]
        for c in range(units):
            for j in range(4 * units):
                transposed[at + j * units + c] = flat[at + c * 4 * units + j]
