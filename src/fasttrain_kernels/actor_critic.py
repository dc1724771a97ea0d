"""The two kernels that Python calls for an actor-critic with or without LSTMs: a step of acting, an epoch of PPO."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from fasttrain_kernels.jit import njit_bare, njit_inner
from fasttrain_kernels.nets import (
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
    transpose_hidden,
)
from fasttrain_kernels.ppo import (
    GRAD_NORM,
    NO_STEP,
    Scratch,
    Training,
    add_parts,
    draw_point,
    gradient_of_part,
    log_stds_of,
    moments,
    take_step,
)
from fasttrain_kernels.recurrent import (
    Remembered,
    Sequences,
    forward_remembering,
    gradient_of_sequences,
    transpose_cells,
)
from fasttrain_kernels.simd import dot_rows
from fasttrain_kernels.threads import (
    DONE,
    NOTE,
    begin_work,
    claim,
    end_work,
    fetch_add,
    is_open,
    open_pieces,
    rest,
    wait_for,
)

# Results of a step of N envs: choices (N, K) and continuous actions (N, A), the unused one is (N, 0); values (N,);
# log-probabilities (N,). No NamedTuple, because numba takes 15 µs longer to read a NamedTuple from Python.
Acted = tuple[Int64Array, Float32Array, Float32Array, Float32Array]


@njit_bare
def act_rows(
    observations: Float32Array,  # (N, O)
    masks: BoolArray,  # (N, A)
    drawn: Float32Array,  # random numbers: (N, K) in [0, 1), or (N, A) standard normal for continuous actions
    lists: Lists,  # out: non-zero inputs and legal actions of the N rows
    order: Int64Array,  # (N,) 0, 1, …
    flat: Float32Array,
    layout: Layout,
    scratch: Scratch,  # with one part for each thread
    memory: Remembered | None,  # states of the LSTMs; None: no LSTMs
    acted: Acted,  # out
    team: Int64Array,
    me: int,
) -> Any:
    """Draw a legal action for each row: by inverting the cumulative distribution, or from the Gaussian.

    A free thread takes the next block of rows. The result does not depend on which thread takes a block.

    Returns:
        float32, on thread 0: the sum of values and log-probabilities. It is finite only if all terms are finite. The
        caller checks it, because `isfinite` does not work with relaxed arithmetic here.
    """
    activations, probs, count = scratch.activations[me], scratch.probs[me], len(observations)
    if me == 0:
        count_entries(observations, masks, lists)
    begin_work(team, me, -(-count // len(activations)))
    size, total = len(activations), np.float32(0)
    piece = claim(team, me)
    while piece >= 0:
        begin = piece * size
        block = order[begin : begin + size]
        for i in range(begin, begin + len(block)):
            list_entries(observations[i], masks[i], i, lists)
        if memory is None:
            forward_block(flat, layout, lists, block, scratch.seen[me], activations)
        else:
            forward_remembering(block, begin, flat, layout, lists, memory, activations, me)
        decide(block, drawn, flat, layout, lists, activations, probs, scratch.every, acted)
        piece = claim(team, me)
    end_work(team, me)
    if me == 0:
        _, _, values, log_probs = acted
        for i in range(count):
            total += values[i] + log_probs[i]
    return total


@njit_inner
def decide(
    block: Int64Array, drawn: Float32Array, flat: Float32Array, layout: Layout, lists: Lists, activations: Float32Array,
    probs: Float32Array, every: Int32Array, acted: Acted,
) -> None:  # fmt: skip
    """Compute values, actions and log-probabilities of the rows `block` from their activations."""
    actions, points, values, log_probs = acted
    w, bias = head_of_net(POLICY, layout.dims.sum(), flat, layout)
    value_w, value_bias = head_of_net(VALUE, 1, flat, layout)
    last, value_last = last_of_net(POLICY, layout, activations), last_of_net(VALUE, layout, activations)
    for r in range(len(block)):
        i = block[r]
        dot_rows(value_w, every, 0, 1, value_last[r], value_w.shape[1], values[i : i + 1])
        values[i] += value_bias[0]
        legal = lists.legal[lists.legal_starts[i] : lists.legal_starts[i + 1]]
        head_logits(last[r], w, bias, legal, probs[1])
        if layout.log_std < 0:
            log_probs[i] = draw(layout.dims, legal, drawn[i], probs, actions[i])
        else:
            log_probs[i] = draw_point(log_stds_of(flat, layout), drawn[i], probs[1], points[i])


@njit_inner
def draw(dims: Int64Array, legal: Int32Array, uniforms: Float32Array, probs: Float32Array, actions: Int64Array) -> Any:
    """Draw a choice for each sub-action into `actions` (K,), from the logits in probs[1]; returns the log-probability.

    If no choice is legal, any choice is drawn with a log-probability of 0, as in sb3-contrib.
    """
    log_prob, begin, offset = np.float32(0), 0, 0
    for k in range(len(dims)):
        end = begin
        while end < len(legal) and legal[end] < offset + dims[k]:
            end += 1
        if end == begin:
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
    order: Int64Array,  # (M,) rows in the order in which they were drawn
    batch_size: int,
    first_step: int,  # number of the next Adam step, from 1
    training: Training,
    memory: Sequences | None,  # states of the LSTMs; None: no LSTMs
    statistics: Float64Array,  # (minibatches, NUM_STATISTICS) out: means, and the gradient norm
    guarded: bool,  # skip a step if loss or gradient is not finite; the norm is then NaN
    blamed: Int64Array,  # (1,) in and out: index in `flat` of the first bad gradient; -1: none so far
    team: Int64Array,
    me: int,  # this thread's number; all compute gradients, thread 0 takes the optimizer's steps
) -> int:
    """One epoch of minibatch steps. Returns the number of steps, which is smaller if `target_kl` was exceeded.

    The rows of a minibatch are cut into as many parts as `scratch` has room for. Thread 0 adds the parts in order, so
    that the result does not depend on the number of threads.
    """
    scratch, layout, flat = training.scratch, training.layout, training.flat
    done, skipped, looks, minibatches = 0, 0, 0, -(-len(order) // batch_size)
    parts = len(scratch.gradients)
    begin_work(team, me, 0)
    while is_open(team) if me > 0 else done < minibatches:
        worked = False
        if me == 0:
            batch = order[done * batch_size : (done + 1) * batch_size]
            moments(batch, training.rows.advantages, training.loss.normalize_advantage, scratch.moments)
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
                gradient_of_part(some, training, part)
            else:
                gradient_of_sequences(some, memory.begins[begin : begin + batch_size], training, memory, part)
            fetch_add(team, DONE, 1)
            part, worked = claim(team, me), True
        if me > 0:
            looks = 0 if worked else looks + 1
            rest(looks)
            continue
        wait_for(team, DONE, parts)
        add_parts(scratch)
        count = min(batch_size, len(order) - done * batch_size)
        take_step(count, first_step + done - skipped, training, statistics[done], guarded, blamed)
        if statistics[done, GRAD_NORM] == NO_STEP:
            break
        skipped += guarded and math.isnan(statistics[done, GRAD_NORM])
        done += 1
    end_work(team, me)
    return done
