"""The acting step of a policy with LSTMs in one compiled call: what `acting.py` is to an MLP."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain.jit import njit_bare, njit_inner
from fasttrain.kernels.acting import decide
from fasttrain.kernels.dense import add_product, sparse_forward
from fasttrain.kernels.lstm import next_cells, squash
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    Layout,
    Lists,
    count_entries,
    forward_hidden,
    list_entries,
    padded_rows,
)
from fasttrain.kernels.ppo import Scratch
from fasttrain.kernels.recurrent import Cells, Lstms, Past, enter, weights_of
from fasttrain.threads import begin_work, claim, end_work


@njit_inner
def step_cells(
    block: Int64Array,  # rows of the lists, at most BLOCK
    begin: int,  # the env of the first
    cell: int,
    flat: Float32Array,
    layout: Layout,
    lstms: Lstms,
    lists: Lists,
    past: Past,  # of the N envs
    after: tuple[Float32Array, Float32Array, Float32Array, Float32Array],  # (N, H) out
    cells: Cells,
    me: int,
) -> None:
    """One step of an LSTM for some envs."""
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


@njit_bare
def act_remembering(
    observations: Float32Array,
    masks: BoolArray,
    uniforms: Float32Array,
    lists: Lists,
    order: Int64Array,
    past: Past,  # of the N envs
    after: tuple[Float32Array, Float32Array, Float32Array, Float32Array],  # (N, H) out: the states then
    flat: Float32Array,
    layout: Layout,
    lstms: Lstms,
    scratch: Scratch,
    cells: Cells,
    actions: Int64Array,
    values: Float32Array,
    log_probs: Float32Array,
    team: Int64Array,
    me: int,
) -> Any:
    """`acting.act_rows` with memory; what is not described here is as there."""
    activations, probs, count = scratch.activations[me], scratch.probs[me], len(observations)
    if me == 0:
        count_entries(observations, masks, lists.starts, lists.legal_starts)
    begin_work(team, me, -(-count // len(activations)))
    size, total = len(activations), np.float32(0)
    piece = claim(team, me)
    while piece >= 0:
        begin = piece * size
        block = order[begin : begin + size]
        for i in range(begin, begin + len(block)):
            list_entries(observations[i], masks[i], i, lists)
        for cell in range(len(lstms.inputs)):
            step_cells(block, begin, cell, flat, layout, lstms, lists, past, after, cells, me)
        for net in (POLICY, VALUE):
            cell = min(net, len(lstms.inputs) - 1)
            enter(begin, layout.columns[net, 0], after[2 * cell], len(block), activations)
        forward_hidden(flat, layout, padded_rows(len(block)), activations)
        decide(begin, len(block), flat, layout, lists, activations, probs, scratch.every, uniforms, actions,
               values, log_probs)  # fmt: skip
        piece = claim(team, me)
    end_work(team, me)
    if me == 0:
        for i in range(count):
            total += values[i] + log_probs[i]
    return total
