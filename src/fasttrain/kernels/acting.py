"""The acting step in one compiled call: forward, masked softmax or Gaussian, draw, log-probability, value."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int32Array, Int64Array
from fasttrain.jit import njit_bare, njit_inner
from fasttrain.kernels.gaussian import draw_point, log_stds_of
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    Layout,
    Lists,
    count_entries,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    list_entries,
    softmax,
)
from fasttrain.kernels.ppo import Scratch
from fasttrain.kernels.recurrent import Remembered, forward_remembering
from fasttrain.kernels.simd import dot_rows
from fasttrain.threads import begin_work, claim, end_work


@njit_bare
def act_rows(
    observations: Float32Array,  # (N, O)
    masks: BoolArray,  # (N, A)
    drawn: Float32Array,  # (N, K) in [0, 1), or (N, A) standard normal numbers where actions are continuous
    lists: Lists,  # out: what counts in the N rows
    order: Int64Array,  # (N,) 0, 1, …
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,  # a part for each thread
    memory: Remembered | None,  # of LSTMs before the nets; None: there are none, and the branch is not compiled
    actions: Int64Array,  # (N, K) out
    points: Float32Array,  # (N, A) out, where actions are continuous
    values: Float32Array,  # (N,) out
    log_probs: Float32Array,  # (N,) out
    team: Int64Array,
    me: int,
) -> Any:
    """Draw a legal action for each row from its softmax (inverse of the cumulative distribution), or a continuous one
    from its Gaussian, with its value.

    Blocks of rows go to whichever thread is free; that changes no number.

    Returns:
        float32, the sum of values and log-probabilities, for the caller to see whether all are finite (here it would
        not do: sums in any order make `isfinite(a + b)` true for LLVM). Of thread 0 alone.
    """
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
        if memory is None:
            forward_block(flat, layout, lists, block, activations)
        else:
            forward_remembering(block, begin, flat, layout, lists, memory, activations, me)
        decide(begin, len(block), flat, layout, lists, activations, probs, scratch.every, drawn, actions, points,
               values, log_probs)  # fmt: skip
        piece = claim(team, me)
    end_work(team, me)
    if me == 0:
        for i in range(count):
            total += values[i] + log_probs[i]
    return total


@njit_inner
def decide(
    begin: int,
    count: int,  # rows that went through the nets last
    flat: Float32Array,
    layout: Layout,
    lists: Lists,
    activations: Float32Array,
    probs: Float32Array,
    every: Int32Array,
    drawn: Float32Array,
    actions: Int64Array,
    points: Float32Array,
    values: Float32Array,
    log_probs: Float32Array,
) -> None:
    """Value, action and log-probability of some rows, from `begin` on."""
    w, bias = head_of_net(POLICY, layout.dims.sum(), flat, layout)
    last = last_of_net(POLICY, layout, activations)
    write_values(begin, count, flat, layout, activations, every, values)
    for r in range(count):
        i = begin + r
        legal = lists.legal[lists.legal_starts[i] : lists.legal_starts[i + 1]]
        head_logits(last[r], w, bias, legal, probs[1])
        if layout.log_std < 0:
            log_probs[i] = draw(layout.dims, legal, drawn[i], probs, actions[i])
        else:
            log_probs[i] = draw_point(log_stds_of(flat, layout), drawn[i], probs[1], points[i])


@njit_inner
def write_values(
    begin: int,
    count: int,  # rows that went through the nets last
    flat: Float32Array,
    layout: Layout,
    activations: Float32Array,
    every: Int32Array,
    values: Float32Array,  # (N,) out, from `begin` on
) -> None:
    """The value head of some rows."""
    w, bias = head_of_net(VALUE, 1, flat, layout)
    last = last_of_net(VALUE, layout, activations)
    for r in range(count):
        dot_rows(w, every, 0, 1, last[r], w.shape[1], values[begin + r : begin + r + 1])
        values[begin + r] += bias[0]


@njit_inner
def draw(dims: Int64Array, legal: Int32Array, uniforms: Float32Array, probs: Float32Array, actions: Int64Array) -> Any:
    """One action per sub-action into `actions` (K,), from the logits in probs[1]; returns their log-probability."""
    log_prob, begin, offset = np.float32(0), 0, 0
    for k in range(len(dims)):
        end = begin
        while end < len(legal) and legal[end] < offset + dims[k]:
            end += 1
        if end == begin:  # nothing is legal: any is drawn, and its log-probability counts as 0, as in sb3-contrib
            actions[k] = min(np.int64(uniforms[k] * dims[k]), dims[k] - 1)
            offset += dims[k]
            continue
        softmax(probs, begin, end)
        chosen, cumulative = begin, probs[0, begin]
        while chosen < end - 1 and uniforms[k] >= cumulative:
            chosen += 1
            cumulative += probs[0, chosen]
        actions[k] = legal[chosen] - offset
        log_prob += probs[1, chosen]
        begin, offset = end, offset + dims[k]
    return log_prob
