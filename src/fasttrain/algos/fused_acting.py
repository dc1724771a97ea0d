"""The acting step of an MLP policy in one compiled call: forward, masked softmax, draw, log-probability, value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from fasttrain.algos.fused import Scratch
from fasttrain.algos.nets import (
    POLICY,
    VALUE,
    Layout,
    Rows,
    compress,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    softmax,
)
from fasttrain.algos.simd import dot_rows
from fasttrain.batch import BoolArray, Float32Array, Int32Array, Int64Array
from fasttrain.jit import njit_bare, njit_parallel, njit_relaxed


@njit_relaxed
def act_rows(
    observations: Float32Array,  # (N, O)
    masks: BoolArray,  # (N, A)
    uniforms: Float32Array,  # (N, K) in [0, 1)
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,
    actions: Int64Array,  # (N, K) out
    values: Float32Array,  # (N,) out
    log_probs: Float32Array,  # (N,) out
    on_threads: bool,  # changes no number
) -> tuple[Rows, float]:
    """Draw a legal action for each row from its softmax (inverse of the cumulative distribution), with its value.

    Returns:
        the rows, with what is stored later left empty; the sum of values and log-probabilities, for the caller to see
        whether all are finite (here it would not do: sums in any order make `isfinite(a + b)` true for LLVM).
    """
    rows = Rows(*compress(observations, masks), actions[:0], values[:0], values[:0], values[:0], values[:0])
    order = np.arange(len(uniforms))
    if on_threads:
        act_on_threads(order, rows, uniforms, flat, layout, scratch, actions, values, log_probs)
    else:
        act_on(order, rows, uniforms, flat, layout, scratch, 0, actions, values, log_probs)
    return rows, values.sum() + log_probs.sum()


@njit_parallel
def act_on_threads(
    order: Int64Array, rows: Rows, uniforms: Float32Array, flat: Float32Array, layout: Layout, scratch: Scratch,
    actions: Int64Array, values: Float32Array, log_probs: Float32Array,
) -> None:  # fmt: skip
    """Every part of the rows on a thread of its own."""
    parts, count = len(scratch.gradients), len(order)
    for part in prange(parts):
        some = order[count * part // parts : count * (part + 1) // parts]
        act_on(some, rows, uniforms, flat, layout, scratch, part, actions, values, log_probs)


@njit_bare
def act_on(
    order: Int64Array,  # some of the N rows
    rows: Rows,
    uniforms: Float32Array,
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,
    part: int,
    actions: Int64Array,
    values: Float32Array,
    log_probs: Float32Array,
) -> None:
    """`act_rows` once the observations are lists of what counts."""
    activations, probs, only = scratch.activations[part], scratch.probs[part], scratch.every
    w, bias = head_of_net(POLICY, layout.dims.sum(), flat, layout)
    value_w, value_bias = head_of_net(VALUE, 1, flat, layout)
    last, value_last = last_of_net(POLICY, layout, activations), last_of_net(VALUE, layout, activations)
    size = len(activations)
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        forward_block(flat, layout, rows, block, activations)
        for r in range(len(block)):
            row = block[r]
            dot_rows(value_w, only, 0, 1, value_last[r], value_w.shape[1], values[row : row + 1])
            values[row] += value_bias[0]
            legal = rows.legal[rows.legal_starts[row] : rows.legal_starts[row + 1]]
            head_logits(last[r], w, bias, legal, probs[1])
            log_probs[row] = draw(layout.dims, legal, uniforms[row], probs, actions[row])


@njit_bare
def draw(dims: Int64Array, legal: Int32Array, uniforms: Float32Array, probs: Float32Array, actions: Int64Array) -> Any:
    """One action per sub-action into `actions` (K,), from the logits in probs[1]; returns their log-probability."""
    log_prob, begin, offset = np.float32(0), 0, 0
    for k in range(len(dims)):
        end = begin
        while end < len(legal) and legal[end] < offset + dims[k]:
            end += 1
        softmax(probs, begin, end)
        chosen, cumulative = begin, probs[0, begin]
        while chosen < end - 1 and uniforms[k] >= cumulative:
            chosen += 1
            cumulative += probs[0, chosen]
        actions[k] = legal[chosen] - offset
        log_prob += probs[1, chosen]
        begin, offset = end, offset + dims[k]
    return log_prob
