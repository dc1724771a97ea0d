"""The DQN update of an MLP Q-network in compiled kernels: U updates in one call, without the GIL; and acting.

An update gathers its minibatch from the replay storage, computes temporal difference errors and gradients, clips them
and takes Adam's step. The algorithm is that of SB3's `dqn/dqn.py` with double Q-learning (van Hasselt et al. 2016),
dueling heads (Wang et al. 2016), one head per sub-action (Tavakoli et al. 2018), n-step returns, action masks and
importance weights (Schaul et al. 2016), with another order of summation: gradients agree with autograd to 1e-5 relative
(tests/kernels/test_q.py).

The first layer is dense. The PPO kernels use lists of non-zero inputs, but here every minibatch would need new lists.
For 64 rows of 248 floats, 37 of them not zero, and layers [64, 64] they would save only 11 of 165 µs.

Parameters (P,) are read and updated in torch's memory, tensor after tensor. The kernels need padded copies (F,) of the
layers: (inputs, outputs) for the forward pass, (outputs, inputs) for the backward pass and for gradients. These copies
are made for every update, in 2 µs for [64, 64]. Parameters cannot be views of the padded layers, because torch's fused
Adam (2.13) writes strided parameters to the wrong places.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, QBatches
from fasttrain_kernels import threads
from fasttrain_kernels.dense import (
    activate,
    add_product,
    clip_and_adam,
    set_product,
    sum_rows,
    through_activation,
    worst_of,
)
from fasttrain_kernels.jit import fetch, njit_bare, njit_inline, njit_inner, njit_relaxed
from fasttrain_kernels.nets import (
    Constants,
    Layout,
    add_slope,
    forward_hidden,
    greedy_row,
    join,
    layer_of,
    padded_rows,
    value_of,
)
from fasttrain_kernels.ppo import AdamSettings
from fasttrain_kernels.simd import LANES, transpose_tile

NET = 0  # the only net in a Q-network's `Layout`; the head is the layer after the hidden layers


class QSettings(NamedTuple):
    """Settings that decide which algorithm an update computes."""

    double: bool  # double Q-learning: the online net chooses the next action, the target net values it
    huber: bool  # smooth L1 loss with beta 1, as in SB3; False: squared error
    dueling: bool  # the head has A advantages and one value


class QScratch(NamedTuple):
    """Working memory for `parts` parts of a minibatch, so that threads can work at the same time.

    The nets compute BLOCK rows at once, which stay in the caches. Padding is always zero.
    """

    inputs: Float32Array  # (parts, BLOCK, inputs)
    activations: Float32Array  # (parts, BLOCK, S)
    deltas: Float32Array  # (parts, BLOCK, S) gradients of the activations
    targets: Float32Array  # (parts, BLOCK)
    chosen: Int64Array  # (parts, BLOCK, K) the next actions
    losses: Float64Array  # (parts,) sums over the rows
    sums: Float32Array  # (parts, F) the gradient of the layers, in the order of `back`
    online: Float32Array  # (F,) layers of the online net for the forward pass
    back: Float32Array  # (F,) layers of the online net for the backward pass
    target: Float32Array  # (F,) layers of the target net for the forward pass
    gradient: Float32Array  # (P,)
    constants: Constants


# One row per parameter tensor. Columns: FROM, the offset in the parameters (P,); the numbers of OUTPUTS and INPUTS (a
# bias is (1, outputs)). In the padded layers (F,) for the forward pass: the offset AHEAD, and the stride ACROSS from an
# input to the next. In the layers (F,) for the backward pass: the offset BACK, the stride DOWN from output to output.
Pieces = Int64Array
FROM, OUTPUTS, INPUTS, AHEAD, ACROSS, BACK, DOWN = range(7)


class QTraining(NamedTuple):
    """The inputs of U updates, and their working memory."""

    batches: QBatches
    layout: Layout
    pieces: Pieces
    settings: QSettings
    adam: AdamSettings
    scratch: QScratch


@njit_inner
def lay_ahead(parameters: Float32Array, pieces: Pieces, layers: Float32Array) -> None:
    """Copy parameters (P,) into layers (F,) for the forward pass."""
    for p in range(len(pieces)):
        at, outputs, inputs = pieces[p, FROM], pieces[p, OUTPUTS], pieces[p, INPUTS]
        ahead, across = pieces[p, AHEAD], pieces[p, ACROSS]
        whole = inputs // LANES * LANES
        for j in range(0, outputs // LANES * LANES, LANES):
            for c in range(0, whole, LANES):
                transpose_tile(parameters, at + j * inputs + c, inputs, layers, ahead + c * across + j, across)
        for j in range(outputs):
            for c in range(whole if j < outputs // LANES * LANES else 0, inputs):
                layers[ahead + c * across + j] = parameters[at + j * inputs + c]


@njit_inner
def lay_back(parameters: Float32Array, pieces: Pieces, layers: Float32Array, collect: bool = False) -> None:
    """Copy parameters (P,) into layers (F,) for the backward pass; if `collect`, copy layers into parameters."""
    for p in range(len(pieces)):
        outputs, inputs = pieces[p, OUTPUTS], pieces[p, INPUTS]
        for j in range(outputs):
            at, to = pieces[p, FROM] + j * inputs, pieces[p, BACK] + j * pieces[p, DOWN]
            for c in range(inputs):
                if collect:
                    parameters[at + c] = layers[to + c]
                else:
                    layers[to + c] = parameters[at + c]


@njit_inline
def q_values_of(activations: Float32Array, layout: Layout) -> Float32Array:
    """A view (BLOCK, ≥A) of the head's outputs, or of their gradients if `deltas` are passed."""
    column, n = layout.columns[NET, layout.depth[NET]], layout.sizes[NET, layout.depth[NET]]
    return activations[:, column : column + n]


@njit_inner
def gather(source: Float32Array, rows: Int64Array, inputs: Float32Array) -> None:
    """Copy `rows` of `source` (M, O) into `inputs` (BLOCK, ≥O), and zeros into the padding rows."""
    for row in rows:
        fetch(source[row], 0, source.shape[1])
    for r in range(len(rows)):
        values = source[rows[r]]
        for c in range(source.shape[1]):
            inputs[r, c] = values[c]
    for r in range(len(rows), padded_rows(len(rows))):
        for c in range(inputs.shape[1]):
            inputs[r, c] = 0.0


@njit_inner
def forward(
    layers: Float32Array, layout: Layout, dueling: bool, inputs: Float32Array, count: int, activations: Float32Array
) -> None:
    """Compute the activations (BLOCK, S) of the first `count` rows of `inputs`, up to the Q-values."""
    padded, width = padded_rows(count), layout.first_width
    w = layers[: layout.inputs * width].reshape((layout.inputs, width))
    bias = layers[layout.first_biases : layout.first_biases + width]
    set_product(inputs, w, bias, padded, activations[:, :width])
    for r in range(padded):
        activate(activations[r, :width], layout.kind)
    forward_hidden(layers, layout, padded, activations)
    x, w, bias = layer_of(NET, layout.depth[NET], layers, layout, activations)
    q_values = q_values_of(activations, layout)
    set_product(x, w, bias, padded, q_values)
    if dueling:
        for r in range(count):
            join(q_values[r], layout.dims)


@njit_inner
def target_block(update: int, begin: int, end: int, training: QTraining, part: int) -> None:
    """Compute `scratch.targets`, the targets of the Q-values, for rows `begin` to `end` of a minibatch."""
    batches, layout, settings, scratch = training.batches, training.layout, training.settings, training.scratch
    count, dims, chosen = end - begin, layout.dims, scratch.chosen[part]
    inputs, activations, targets = scratch.inputs[part], scratch.activations[part], scratch.targets[part]
    q_values = q_values_of(activations, layout)
    gather(batches.next_observations, batches.next_rows[update, begin:end], inputs)
    for net in range(0 if settings.double else 1, 2):
        layers = scratch.online if net == 0 else scratch.target
        forward(layers, layout, settings.dueling, inputs, count, activations)
        if net == 0 or not settings.double:
            for r in range(count):
                greedy_row(q_values[r], batches.next_masks[update, begin + r], dims, chosen[r])
    for r in range(count):
        at = begin + r
        future = value_of(q_values[r], chosen[r], dims)
        left = (np.float32(1) - batches.dones[update, at]) * batches.discounts[update, at]
        targets[r] = batches.rewards[update, at] + left * future


@njit_inner
def error_block(update: int, begin: int, end: int, training: QTraining, errors: Float32Array, part: int) -> float:
    """Write the absolute temporal difference errors of rows `begin` to `end` into `errors` (U, B), and the gradients of
    loss ÷ B into the head's deltas. Returns the sum of the losses. Errors and losses are means over the sub-actions.
    The activations of the online net are in `scratch`."""
    batches, layout, settings, scratch = training.batches, training.layout, training.settings, training.scratch
    dims = layout.dims
    share = np.float32(1.0 / (batches.rows.shape[1] * len(dims)))
    q_values, deltas = q_values_of(scratch.activations[part], layout), q_values_of(scratch.deltas[part], layout)
    targets = scratch.targets[part]
    weighted, total = len(batches.weights) > 0, 0.0
    for r in range(end - begin):
        at = begin + r
        taken = batches.actions[batches.rows[update, at]]
        weight = batches.weights[update, at] if weighted else np.float32(1)
        deltas[r, :] = 0.0
        column, size_sum, loss_sum = 0, np.float32(0), np.float32(0)
        for k in range(len(dims)):
            error = q_values[r, column + taken[k]] - targets[r]
            size = abs(error)
            size_sum += size
            if settings.huber:
                loss_sum += np.float32(0.5) * error * error if size < 1 else size - np.float32(0.5)
                slope = min(max(error, np.float32(-1)), np.float32(1))
            else:
                loss_sum += error * error
                slope = error + error
            add_slope(weight * share * slope, taken[k], column, dims[k], settings.dueling, deltas[r], dims.sum())
            column += dims[k]
        errors[update, at] = size_sum / np.float32(len(dims))
        total += weight * loss_sum / np.float32(len(dims))
    for r in range(end - begin, padded_rows(end - begin)):
        deltas[r, :] = 0.0
    return total


@njit_inner
def backward(
    back: Float32Array, layout: Layout, count: int, inputs: Float32Array, activations: Float32Array,
    deltas: Float32Array, constants: Constants, sums: Float32Array,
) -> None:  # fmt: skip
    """Add the gradients of all layers to `sums` (F,), from the head's gradient in `deltas`."""
    head, zeros, ones, every = layout.depth[NET], constants.zeros, constants.ones, constants.every
    padded = padded_rows(count)
    for layer in range(head, -1, -1):
        column, n, at = layout.columns[NET, layer], layout.sizes[NET, layer], layout.weights[NET, layer]
        if layer < head:
            for r in range(padded):
                outputs = activations[r, column : column + n]
                through_activation(deltas[r, column : column + n], outputs, layout.kind)
        k = layout.sizes[NET, layer - 1] if layer > 0 else layout.inputs
        below = layout.columns[NET, layer - 1] if layer > 0 else 0
        x = activations[:padded, below : below + k] if layer > 0 else inputs[:padded, :k]
        d = deltas[:padded, column : column + n]
        bias = sums[layout.biases[NET, layer] : layout.biases[NET, layer] + n]
        sum_rows(ones, every, 0, padded, d, bias, bias)
        add_product(d.T, x, n, sums[at : at + n * k].reshape((n, k)))
        if layer > 0:
            w = back[at : at + n * k].reshape((n, k))
            set_product(d, w, zeros[:k], padded, deltas[:, below : below + k])


@njit_inner
def to_inputs(
    back: Float32Array, layout: Layout, chosen: Int64Array, activations: Float32Array, deltas: Float32Array, first: int,
    zeros: Float32Array, by_inputs: Float32Array,
) -> None:  # fmt: skip
    """Write d(first Q-value) ÷ d(inputs) of each row in `chosen` into `by_inputs`, from column `first` on."""
    head, count = layout.depth[NET], len(chosen)
    padded = padded_rows(count)
    for layer in range(head, -1, -1):
        column, n, at = layout.columns[NET, layer], layout.sizes[NET, layer], layout.weights[NET, layer]
        d = deltas[:, column : column + n]
        for r in range(padded):
            if layer == head:
                d[r, :] = 0.0
                d[r, 0] = 1.0 if r < count else 0.0
            elif r < count:
                through_activation(d[r], activations[chosen[r], column : column + n], layout.kind)
        if layer > 0:
            k, below = layout.sizes[NET, layer - 1], layout.columns[NET, layer - 1]
            w = back[at : at + n * k].reshape((n, k))
            set_product(d, w, zeros[:k], padded, deltas[:, below : below + k])
        else:
            w = back[at : at + n * layout.inputs].reshape((n, layout.inputs))[:, first:]
            set_product(d, w, zeros[: layout.inputs - first], padded, by_inputs[:, first:])


@njit_inner
def are_within(batches: QBatches, dims: Int64Array) -> bool:
    """Whether all rows and actions are in range. The kernels check no bounds."""
    for u in range(batches.rows.shape[0]):
        for i in range(batches.rows.shape[1]):
            row, next_row = batches.rows[u, i], batches.next_rows[u, i]
            if row < 0 or row >= len(batches.actions) or next_row < 0 or next_row >= len(batches.next_observations):
                return False
            for k in range(len(dims)):
                if batches.actions[row, k] < 0 or batches.actions[row, k] >= dims[k]:
                    return False
    return True


@njit_inner
def gradient_of_part(update: int, part: int, training: QTraining, errors: Float32Array) -> None:
    """Compute gradient, losses and errors of one part of the minibatch's rows."""
    batches, layout, scratch = training.batches, training.layout, training.scratch
    inputs, activations, parts = scratch.inputs[part], scratch.activations[part], len(scratch.sums)
    sums, rows = scratch.sums[part], batches.rows[update]
    first, last = len(rows) * part // parts, len(rows) * (part + 1) // parts
    sums[:] = 0.0
    scratch.losses[part] = 0.0
    for begin in range(first, last, len(inputs)):
        end = min(begin + len(inputs), last)
        target_block(update, begin, end, training, part)
        gather(batches.observations, rows[begin:end], inputs)
        forward(scratch.online, layout, training.settings.dueling, inputs, end - begin, activations)
        scratch.losses[part] += error_block(update, begin, end, training, errors, part)
        backward(scratch.back, layout, end - begin, inputs, activations, scratch.deltas[part], scratch.constants, sums)


@njit_bare
def train_updates(
    training: QTraining,
    online: Float32Array,  # (P,) in and out
    target: Float32Array,  # (P,)
    exp_avg: Float32Array,  # (P,) in and out
    exp_avg_sq: Float32Array,  # (P,) in and out
    first_step: int,  # number of the next Adam step, from 1
    losses: Float64Array,  # (U,) out: mean loss of each update
    errors: Float32Array,  # (U, B) out: absolute temporal difference errors, computed before the update
    norms: Float64Array,  # (U,) out: norm of the gradient of each update
    guarded: bool,  # skip a step if loss or gradient is not finite; the norm is then NaN
    blamed: Int64Array,  # (1,) in and out: index of the first gradient that was not finite; -1: none so far
    team: Int64Array,
    me: int,  # this thread's number; all compute gradients, thread 0 takes the optimizer's steps
) -> int:
    """U gradient updates, one after another.

    The rows of a minibatch are cut into as many parts as `scratch` has room for. Thread 0 adds the parts in order, so
    that the result does not depend on which thread computes a part.

    Returns the number of Adam steps; -1 if a row or an action is out of range, then nothing is changed.
    """
    batches, pieces, adam, scratch = training.batches, training.pieces, training.adam, training.scratch
    taken, looks, update, parts = 0, 0, 0, len(scratch.sums)
    if me == 0:
        if not are_within(batches, training.layout.dims):
            return -1
        lay_ahead(target, pieces, scratch.target)
    threads.begin_work(team, me, 0)
    while threads.is_open(team) if me > 0 else update < len(losses):
        if me == 0:
            lay_ahead(online, pieces, scratch.online)
            lay_back(online, pieces, scratch.back)
            team[threads.NOTE] = update
            threads.open_pieces(team, parts)
        part, worked = threads.claim(team, me), False
        while part >= 0:
            gradient_of_part(team[threads.NOTE], part, training, errors)
            threads.fetch_add(team, threads.DONE, 1)
            part, worked = threads.claim(team, me), True
        if me > 0:
            looks = 0 if worked else looks + 1
            threads.rest(looks)
            continue
        threads.wait_for(team, threads.DONE, parts)
        for other in range(1, parts):
            for c in range(scratch.sums.shape[1]):
                scratch.sums[0, c] += scratch.sums[other, c]
        lay_back(scratch.gradient, pieces, scratch.sums[0], True)
        losses[update] = scratch.losses.sum() / batches.rows.shape[1]
        norms[update] = clip_and_adam(online, scratch.gradient, exp_avg, exp_avg_sq, first_step + taken,
                                      adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.max_grad_norm,
                                      losses[update], guarded)  # fmt: skip
        if not guarded or not math.isnan(norms[update]):
            taken += 1
        elif blamed[0] < 0:
            blamed[0] = worst_of(scratch.gradient)
        update += 1
    threads.end_work(team, me)
    return taken


@njit_relaxed
def act_rows(
    observations: Float32Array,  # (N, O)
    masks: BoolArray,  # (N, A) True = legal; (0, 0): all actions are legal
    parameters: Float32Array,  # (P,)
    layout: Layout,
    pieces: Pieces,
    dueling: bool,
    scratch: QScratch,
    q_values: Float32Array,  # (N, A) out
    actions: Int64Array,  # (N, K) out: the greedy legal actions, 0 where none is legal
) -> Any:
    """Q-values and greedy actions. Returns the sum of the values, which is finite only if all are finite."""
    inputs, activations, choices = scratch.inputs[0], scratch.activations[0], layout.dims.sum()
    lay_ahead(parameters, pieces, scratch.online)
    every, size, outputs = np.arange(len(observations)), len(inputs), q_values_of(activations, layout)
    for begin in range(0, len(observations), size):
        block = every[begin : begin + size]
        gather(observations, block, inputs)
        forward(scratch.online, layout, dueling, inputs, len(block), activations)
        for r in range(len(block)):
            i = block[r]
            q_values[i] = outputs[r, :choices]
            greedy_row(outputs[r], masks[i], layout.dims, actions[i])
            for k in range(actions.shape[1]):
                actions[i, k] = max(0, actions[i, k])
    return q_values.sum()
