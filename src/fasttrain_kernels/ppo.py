"""The PPO update of an MLP policy in compiled kernels: log-probabilities, clipped loss, gradients, clipping and Adam.

Actions are choices, or continuous actions of a diagonal Gaussian. The kernels that Python calls are in
`actor_critic.py`. They compute what `algos/ppo.py` computes, but sums have another order: gradients agree with
autograd to 1e-5 relative (tests/kernels/test_ppo_kernels.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import Float32Array, Float64Array, Int32Array, Int64Array
from fasttrain_kernels.dense import add_to_rows, clip_and_adam, sum_rows, worst_of
from fasttrain_kernels.jit import fetch, njit_inline, njit_inner
from fasttrain_kernels.nets import (
    POLICY,
    VALUE,
    Constants,
    Layout,
    Rows,
    backward_block,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    padded_rows,
    softmax,
)
from fasttrain_kernels.simd import dot_rows

NUM_STATISTICS = 7
POLICY_LOSS, VALUE_LOSS, ENTROPY, CLIPPED, APPROX_KL, LOSS, GRAD_NORM = range(NUM_STATISTICS)
NO_STEP = -1.0  # stored instead of a gradient norm if `target_kl` was exceeded
HALF_LOG_2_PI = np.float32(0.5 * math.log(2 * math.pi))


class LossSettings(NamedTuple):
    """Coefficients of one update, with SB3's names."""

    clip_range: float
    clip_range_vf: float  # < 0: values are not clipped
    ent_coef: float
    vf_coef: float
    normalize_advantage: bool
    target_kl: float  # < 0: no limit


class AdamSettings(NamedTuple):
    """Settings of the optimizer, and the largest norm of a gradient."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float


class Scratch(NamedTuple):
    """Working memory for `parts` parts of a minibatch, so that threads can work at the same time.

    The nets compute BLOCK rows at once, so that the activations stay in the cache.
    """

    seen: Float32Array  # (parts, inputs, BLOCK) inputs of the rows, if few of them are zero
    activations: Float32Array  # (parts, BLOCK, S)
    deltas: Float32Array  # (parts, BLOCK, S) gradients of the activations
    probs: Float32Array  # (parts, 4, A) values for the legal actions of one row; see `rate`
    gradients: Float32Array  # (parts, P)
    transposed: Float32Array  # (P,) hidden weights as (outputs, inputs)
    statistics: Float64Array  # (parts, NUM_STATISTICS)
    values: Float32Array  # (parts, 1) the value of a row, later its gradient
    moments: Float64Array  # (2,) results of the function `moments` for a minibatch
    # The arrays of `Constants`. They are fields here because numba takes 4 µs longer to read a nested NamedTuple.
    zeros: Float32Array
    ones: Float32Array
    every: Int32Array


class Training(NamedTuple):
    """Everything that an update reads and writes."""

    flat: Float32Array  # (P,) in and out
    exp_avg: Float32Array  # (P,) in and out
    exp_avg_sq: Float32Array  # (P,) in and out
    layout: Layout
    rows: Rows
    loss: LossSettings
    adam: AdamSettings
    scratch: Scratch


@njit_inline
def surrogate(advantage: float, ratio: float, clip_range: float) -> tuple[float, float, bool]:
    """One row's clipped policy loss (Schulman et al. 2017, eq. 7), d(loss) ÷ d(log-probability), whether clipped.

    torch.min gives the gradient to the smaller of two terms. Inside the clip range both terms are equal.
    """
    clipped = min(max(ratio, 1.0 - clip_range), 1.0 + clip_range)
    outside = abs(ratio - 1.0) > clip_range
    flows = not outside or advantage * ratio < advantage * clipped
    slope = -advantage * ratio if flows else 0.0
    return -min(advantage * ratio, advantage * clipped), slope, outside


@njit_inline
def rate(dims: Int64Array, legal: Int32Array, actions: Int64Array, probs: Float32Array) -> tuple[Any, Any]:
    """Log-probability of the actions (K,) and entropy of one row, from the logits of its legal actions in probs[1].

    Fills the rows of probs (4, ≥m) for each legal action: the probability p; log p; p × (log p + entropy of the
    sub-action), which is -d(entropy) ÷ d(logit); and 1 if the action was taken, else 0.
    """
    log_prob, entropy = np.float32(0), np.float32(0)
    begin, offset = 0, 0
    for k in range(len(dims)):
        end = begin
        while end < len(legal) and legal[end] < offset + dims[k]:
            end += 1
        own = softmax(probs, begin, end)
        entropy += own
        for m in range(begin, end):
            taken = legal[m] - offset == actions[k]
            log_prob += probs[1, m] if taken else np.float32(0)
            probs[2, m] = probs[0, m] * (probs[1, m] + own)
            probs[3, m] = np.float32(taken)
        begin, offset = end, offset + dims[k]
    return log_prob, entropy


@njit_inline
def log_stds_of(flat: Float32Array, layout: Layout) -> Float32Array:
    """A view (A,) of the log standard deviations among parameters or gradients; (0,) if actions are choices."""
    at = max(layout.log_std, 0)
    return flat[at : at + (layout.dims.sum() if layout.log_std >= 0 else 0)]


@njit_inline
def draw_point(log_stds: Float32Array, normals: Float32Array, means: Float32Array, point: Float32Array) -> Any:
    """Draw a continuous action (A,) of a diagonal Gaussian into `point`; returns its log-probability."""
    log_prob = np.float32(0)
    for d in range(len(log_stds)):
        point[d] = means[d] + np.exp(log_stds[d]) * normals[d]
        log_prob -= np.float32(0.5) * normals[d] * normals[d] + log_stds[d] + HALF_LOG_2_PI
    return log_prob


@njit_inline
def rate_point(log_stds: Float32Array, point: Float32Array, probs: Float32Array) -> tuple[Any, Any]:
    """Log-probability of a continuous action (A,) and entropy of one row, from the Gaussian's means (A,) in probs[1].

    Fills rows 0 and 2 of probs (4, A) with zeros, and row 3 with (action - mean) ÷ variance. From these rows the
    formula in `policy_block`, written for logits, computes the gradients of the means.
    """
    log_prob, entropy = np.float32(0), np.float32(0)
    for d in range(len(log_stds)):
        precision = np.exp(-log_stds[d])
        z = (point[d] - probs[1, d]) * precision
        log_prob -= np.float32(0.5) * z * z + log_stds[d] + HALF_LOG_2_PI
        entropy += np.float32(0.5) + HALF_LOG_2_PI + log_stds[d]
        probs[0, d], probs[2, d], probs[3, d] = np.float32(0), np.float32(0), z * precision
    return log_prob, entropy


@njit_inline
def add_log_std_slopes(
    slope: Any, entropy_share: Any, log_stds: Float32Array, probs: Float32Array, out: Float32Array
) -> None:
    """Add a row's gradients of the log standard deviations to `out` (A,).

    Args:
        slope: derivative of the loss by the row's log-probability.
        entropy_share: ent_coef ÷ number of rows in the minibatch, the weight of the row's entropy in the loss.
        probs: result of `rate_point`.
    """
    for d in range(len(log_stds)):
        z = probs[3, d] * np.exp(log_stds[d])
        out[d] += slope * (z * z - np.float32(1)) - entropy_share


@njit_inner
def policy_block(order: Int64Array, share: float, training: Training, part: int) -> None:
    """Policy loss and entropy bonus of at most BLOCK rows, and their gradients through the policy head.

    `share` is 1 ÷ number of rows in the minibatch. `scratch.activations[part]` has the activations of the rows.
    """
    flat, layout, rows, loss, scratch = training.flat, training.layout, training.rows, training.loss, training.scratch
    gradient, statistics, probs = scratch.gradients[part], scratch.statistics[part], scratch.probs[part]
    hidden = last_of_net(POLICY, layout, scratch.activations[part])
    deltas = last_of_net(POLICY, layout, scratch.deltas[part])
    mean, scale, width, lists = scratch.moments[0], scratch.moments[1], layout.dims.sum(), rows.lists
    w, bias = head_of_net(POLICY, width, flat, layout)
    out_w, out_bias = head_of_net(POLICY, width, gradient, layout)
    log_stds, out_log_stds = log_stds_of(flat, layout), log_stds_of(gradient, layout)
    entropy_share = np.float32(share * loss.ent_coef)
    for r in range(len(order)):
        row = order[r]
        legal = lists.legal[lists.legal_starts[row] : lists.legal_starts[row + 1]]
        head_logits(hidden[r], w, bias, legal, probs[1])
        if layout.log_std < 0:
            log_prob, entropy = rate(layout.dims, legal, rows.actions[row], probs)
        else:
            log_prob, entropy = rate_point(log_stds, rows.points[row], probs)
        log_ratio = log_prob - rows.old_log_probs[row]
        advantage = (rows.advantages[row] - mean) * scale
        ratio = np.exp(log_ratio)
        row_loss, slope, outside = surrogate(advantage, ratio, loss.clip_range)
        statistics[POLICY_LOSS] += row_loss
        statistics[ENTROPY] += entropy
        statistics[CLIPPED] += outside
        statistics[APPROX_KL] += (ratio - 1.0) - log_ratio
        slope = np.float32(slope * share)
        add_log_std_slopes(slope, entropy_share, log_stds, probs, out_log_stds)
        slopes = probs[1]  # gradients of the logits replace the log-probabilities
        for m in range(len(legal)):
            slopes[m] = slope * (probs[3, m] - probs[0, m]) + entropy_share * probs[2, m]
            out_bias[legal[m]] += slopes[m]
        sum_rows(slopes, legal, 0, len(legal), w, scratch.zeros, deltas[r])
        add_to_rows(slopes, legal, 0, len(legal), hidden[r], out_w)


@njit_inner
def value_block(order: Int64Array, share: float, training: Training, part: int) -> None:
    """Squared value error of the rows `order`, and the gradients through the value head; see `policy_block`."""
    flat, layout, rows, loss, scratch = training.flat, training.layout, training.rows, training.loss, training.scratch
    gradient, statistics, out = scratch.gradients[part], scratch.statistics[part], scratch.values[part]
    hidden = last_of_net(VALUE, layout, scratch.activations[part])
    deltas = last_of_net(VALUE, layout, scratch.deltas[part])
    w, bias = head_of_net(VALUE, 1, flat, layout)
    out_w, out_bias = head_of_net(VALUE, 1, gradient, layout)
    only = scratch.every  # only[0] is 0: the index of the head's only output
    for r in range(len(order)):
        row = order[r]
        dot_rows(w, only, 0, 1, hidden[r], w.shape[1], out)
        value, flows = out[0] + bias[0], True
        if loss.clip_range_vf >= 0.0:
            change = value - rows.old_values[row]
            flows = abs(change) <= loss.clip_range_vf
            value = rows.old_values[row] + min(max(change, -loss.clip_range_vf), loss.clip_range_vf)
        error = value - rows.returns[row]
        statistics[VALUE_LOSS] += error * error
        out[0] = np.float32(2.0 * share * loss.vf_coef * error if flows else 0.0)
        out_bias[0] += out[0]
        sum_rows(out, only, 0, 1, w, scratch.zeros, deltas[r])
        add_to_rows(out, only, 0, 1, hidden[r], out_w)
    scratch.deltas[part, len(order) : padded_rows(len(order))] = 0.0


@njit_inline
def gradient_of_part(batch: Int64Array, training: Training, part: int) -> None:
    """Compute the summed gradients and statistics of one part of a minibatch's rows (B,)."""
    flat, layout, lists, scratch = training.flat, training.layout, training.rows.lists, training.scratch
    count, parts, size = len(batch), len(scratch.gradients), scratch.activations.shape[1]
    order = batch[count * part // parts : count * (part + 1) // parts]
    scratch.gradients[part] = 0.0
    scratch.statistics[part] = 0.0
    constants = Constants(scratch.zeros, scratch.ones, scratch.every)
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        for row in order[begin + size : begin + 2 * size]:
            fetch(lists.values, lists.starts[row], lists.starts[row + 1])
            fetch(lists.columns, lists.starts[row], lists.starts[row + 1])
            fetch(lists.legal, lists.legal_starts[row], lists.legal_starts[row + 1])
        dense = forward_block(flat, layout, lists, block, scratch.seen[part], scratch.activations[part])
        policy_block(block, 1.0 / count, training, part)
        value_block(block, 1.0 / count, training, part)
        backward_block(flat, layout, lists, block, dense, scratch.seen[part], scratch.activations[part],
                       scratch.deltas[part], scratch.transposed, constants, scratch.gradients[part])  # fmt: skip


@njit_inline
def moments(order: Int64Array, advantages: Float32Array, normalize: bool, out: Float64Array) -> None:  # …, (2,)
    """Mean and 1 ÷ (standard deviation + 1e-8) of the advantages of a minibatch, as in torch. 0 and 1 if there is only
    one row, or if `normalize` is False."""
    count, total = len(order), 0.0
    out[0], out[1] = 0.0, 1.0
    if count < 2 or not normalize:
        return
    for row in order:
        total += advantages[row]
    mean, square = total / count, 0.0
    for row in order:
        square += (advantages[row] - mean) ** 2
    out[0], out[1] = mean, 1.0 / (math.sqrt(square / (count - 1)) + 1e-8)


@njit_inline
def add_parts(scratch: Scratch) -> None:
    """Add the gradients and statistics of all parts, in order, into the arrays of the first part."""
    total, sums = scratch.gradients[0], scratch.statistics[0]
    for part in range(1, len(scratch.gradients)):
        for c in range(len(total)):
            total[c] += scratch.gradients[part, c]
        for c in range(len(sums)):
            sums[c] += scratch.statistics[part, c]


@njit_inline
def take_step(
    count: int,  # rows of the minibatch
    step: int,  # number of this Adam step, from 1
    training: Training,  # part 0 of its gradients and statistics has the sums over all parts
    means: Float64Array,  # (NUM_STATISTICS,) out
    guarded: bool,
    blamed: Int64Array,
) -> None:
    """The optimizer's step. If `target_kl` is exceeded, no step is taken and means[GRAD_NORM] is `NO_STEP`. If
    `guarded` and loss or gradient is not finite, no step is taken and means[GRAD_NORM] is NaN."""
    loss, adam, scratch = training.loss, training.adam, training.scratch
    for c in range(len(means)):
        means[c] = scratch.statistics[0, c] / count
    means[LOSS] = means[POLICY_LOSS] - loss.ent_coef * means[ENTROPY] + loss.vf_coef * means[VALUE_LOSS]
    if loss.target_kl >= 0.0 and means[APPROX_KL] > 1.5 * loss.target_kl:
        means[GRAD_NORM] = NO_STEP
        return
    means[GRAD_NORM] = clip_and_adam(training.flat, scratch.gradients[0], training.exp_avg, training.exp_avg_sq, step,
                                     adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.max_grad_norm,
                                     means[LOSS], guarded)  # fmt: skip
    if guarded and math.isnan(means[GRAD_NORM]) and blamed[0] < 0:
        blamed[0] = worst_of(scratch.gradients[0])
