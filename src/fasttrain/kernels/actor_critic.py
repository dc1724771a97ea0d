"""The two compiled calls of an actor-critic, of an MLP or of LSTMs before it: a step of acting (forward, masked softmax
or Gaussian, draw, log-probability, value), and an epoch of PPO."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from fasttrain.jit import njit_bare, njit_inner
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    Layout,
    Lists,
    Rows,
    count_entries,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    list_entries,
    softmax,
    transpose_hidden,
)
from fasttrain.kernels.ppo import (
    GRAD_NORM,
    NO_STEP,
    AdamSettings,
    LossSettings,
    Scratch,
    add_parts,
    draw_point,
    gradient_of_part,
    log_stds_of,
    moments,
    take_step,
)
from fasttrain.kernels.recurrent import (
    Remembered,
    Sequences,
    forward_remembering,
    gradient_of_sequences,
    transpose_cells,
)
from fasttrain.kernels.simd import dot_rows
from fasttrain.threads import DONE, NOTE, begin_work, claim, end_work, fetch_add, is_open, open_pieces, rest, wait_for


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


@njit_bare
def train_epoch(
    order: Int64Array,  # (M,) rows in the order they are drawn
    batch_size: int,
    flat: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    first_step: int,  # of Adam, from 1
    layout: Layout,
    rows: Rows,
    loss: LossSettings,
    adam: AdamSettings,
    scratch: Scratch,
    memory: Sequences | None,  # of LSTMs before the nets; None: there are none, and the branches are not compiled
    statistics: Float64Array,  # (minibatches, NUM_STATISTICS) out: means, and the gradient's norm
    guarded: bool,  # no step where loss or gradient is not finite; its norm is then NaN
    blamed: Int64Array,  # (1,) in and out: the parameter, in `flat`, that was the cause of the first; -1: none yet
    team: Int64Array,
    me: int,  # thread 0 takes the steps, the others compute parts of the gradients
) -> int:
    """One epoch of minibatch steps; returns how many it came to: fewer than all where `target_kl` was exceeded.

    The rows of a minibatch are cut into as many parts as `scratch` has room for, and thread 0 sums the parts in order:
    the result does not depend on how many threads there are.
    """
    done, skipped, looks, minibatches = 0, 0, 0, -(-len(order) // batch_size)
    parts = len(scratch.gradients)
    begin_work(team, me, 0)
    while is_open(team) if me > 0 else done < minibatches:
        worked = False
        if me == 0:
            batch = order[done * batch_size : (done + 1) * batch_size]
            moments(batch, rows.advantages, loss.normalize_advantage, scratch.moments)
            transpose_hidden(flat, layout, scratch.transposed)
            if memory is not None:
                transpose_cells(flat, memory.lstms, scratch.transposed)
            team[NOTE] = done
            open_pieces(team, parts)
        part = claim(team, me)
        while part >= 0:
            begin = team[NOTE] * batch_size
            some = order[begin : begin + batch_size]
            if memory is None:
                gradient_of_part(some, flat, layout, rows, loss, scratch, part)
            else:
                begins = memory.begins[begin : begin + batch_size]
                gradient_of_sequences(some, begins, flat, layout, rows, loss, scratch, memory, part)
            fetch_add(team, DONE, 1)
            part, worked = claim(team, me), True
        if me > 0:
            looks = 0 if worked else looks + 1
            rest(looks)
            continue
        wait_for(team, DONE, parts)
        add_parts(scratch)
        count = min(batch_size, len(order) - done * batch_size)
        take_step(count, flat, exp_avg, exp_avg_sq, first_step + done - skipped, loss, adam, scratch, statistics[done],
                  guarded, blamed)  # fmt: skip
        if statistics[done, GRAD_NORM] == NO_STEP:
            break
        skipped += guarded and math.isnan(statistics[done, GRAD_NORM])
        done += 1
    end_work(team, me)
    return done
