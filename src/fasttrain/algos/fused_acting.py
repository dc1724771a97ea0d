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
    Lists,
    compress,
    count_entries,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    list_entries,
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
    lists: Lists,  # out: what counts in the N rows, from row `first` on; the rows before are there already
    first: int,
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,
    actions: Int64Array,  # (N, K) out
    values: Float32Array,  # (N,) out
    log_probs: Float32Array,  # (N,) out
    on_threads: bool,  # changes no number
) -> Any:
    """Draw a legal action for each row from its softmax (inverse of the cumulative distribution), with its value.

    Returns:
        float32, the sum of values and log-probabilities, for the caller to see whether all are finite (here it would
        not do: sums in any order make `isfinite(a + b)` true for LLVM).
    """
    count_entries(observations, masks, first, lists.starts, lists.legal_starts)
    order = np.arange(first, first + len(observations))
    if on_threads:
        act_on_threads(order, first, observations, masks, uniforms, lists, flat, layout, scratch, actions, values,
                       log_probs)  # fmt: skip
    else:
        act_on(order, first, observations, masks, uniforms, lists, flat, layout, scratch, 0, actions, values, log_probs)
    return values.sum() + log_probs.sum()


@njit_parallel
def act_on_threads(
    order: Int64Array, first: int, observations: Float32Array, masks: BoolArray, uniforms: Float32Array, lists: Lists,
    flat: Float32Array, layout: Layout, scratch: Scratch, actions: Int64Array, values: Float32Array,
    log_probs: Float32Array,
) -> None:  # fmt: skip
    """Every part of the rows on a thread of its own."""
    parts, count = len(scratch.gradients), len(order)
    for part in prange(parts):
        some = order[count * part // parts : count * (part + 1) // parts]
        act_on(some, first, observations, masks, uniforms, lists, flat, layout, scratch, part, actions, values,
               log_probs)  # fmt: skip


@njit_bare
def act_on(
    order: Int64Array,  # rows of the lists, counted already
    first: int,  # the row of the lists that is row 0 of all other arrays
    observations: Float32Array,
    masks: BoolArray,
    uniforms: Float32Array,
    lists: Lists,
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,
    part: int,
    actions: Int64Array,
    values: Float32Array,
    log_probs: Float32Array,
) -> None:
    """`act_rows` for some of the rows."""
    activations, probs = scratch.activations[part], scratch.probs[part]
    w, bias = head_of_net(POLICY, layout.dims.sum(), flat, layout)
    last = last_of_net(POLICY, layout, activations)
    size = len(activations)
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        for row in block:
            list_entries(observations[row - first], masks[row - first], row, lists)
        forward_block(flat, layout, lists, block, activations)
        write_values(block, first, flat, layout, activations, scratch.every, values)
        for r in range(len(block)):
            row, i = block[r], block[r] - first
            legal = lists.legal[lists.legal_starts[row] : lists.legal_starts[row + 1]]
            head_logits(last[r], w, bias, legal, probs[1])
            log_probs[i] = draw(layout.dims, legal, uniforms[i], probs, actions[i])


@njit_bare
def write_values(
    block: Int64Array,  # rows that went through the nets last
    first: int,
    flat: Float32Array,
    layout: Layout,
    activations: Float32Array,
    every: Int32Array,
    values: Float32Array,
) -> None:
    """The value head of some rows."""
    w, bias = head_of_net(VALUE, 1, flat, layout)
    last = last_of_net(VALUE, layout, activations)
    for r in range(len(block)):
        i = block[r] - first
        dot_rows(w, every, 0, 1, last[r], w.shape[1], values[i : i + 1])
        values[i] += bias[0]


@njit_relaxed
def value_rows(
    observations: Float32Array,  # (N, O)
    lists: Lists,  # room for them
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,
    values: Float32Array,  # (N,) out
) -> None:
    """Values alone."""
    compress(observations, np.zeros((len(observations), 0), np.bool_), lists)
    order, activations = np.arange(len(observations)), scratch.activations[0]
    for begin in range(0, len(order), len(activations)):
        block = order[begin : begin + len(activations)]
        forward_block(flat, layout, lists, block, activations)
        write_values(block, 0, flat, layout, activations, scratch.every, values)


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
