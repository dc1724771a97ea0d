"""The PPO update of an MLP policy as compiled kernels: forward, log-probabilities, clipped loss, backward, gradient
clipping and Adam without a Python call per layer; for choices, and for continuous actions of a diagonal Gaussian.
`actor_critic.py` has the calls.

Same algorithm as `algos/ppo.py`, other order of summation (class `rounding`): gradients agree with autograd to 1e-5
relative (tests/kernels/test_ppo_kernels.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import Float32Array, Float64Array, Int32Array, Int64Array
from fasttrain.jit import njit_inline, njit_inner
from fasttrain.kernels.dense import add_to_rows, clip_and_adam, sum_rows, worst_of
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    Constants,
    Layout,
    Lists,
    Rows,
    backward_block,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    padded_rows,
    softmax,
)
from fasttrain.kernels.simd import dot_rows, fetch

NUM_STATISTICS = 7
POLICY_LOSS, VALUE_LOSS, ENTROPY, CLIPPED, APPROX_KL, LOSS, GRAD_NORM = range(NUM_STATISTICS)
NO_STEP = -1.0  # in the place of a gradient norm: none was asked for
HALF_LOG_2_PI = np.float32(0.5 * math.log(2 * math.pi))


class LossSettings(NamedTuple):
    """Coefficients of one update, as SB3 names them. `clip_range_vf` < 0: values are not clipped."""

    clip_range: float
    clip_range_vf: float
    ent_coef: float
    vf_coef: float
    normalize_advantage: bool
    target_kl: float  # < 0: none


class AdamSettings(NamedTuple):
    """The optimizer's group and the gradient norm's bound."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float


class Scratch(NamedTuple):
    """Working memory for `parts` parts of a minibatch, which threads may work on at once."""

    activations: Float32Array  # (parts, BLOCK, S); BLOCK rows go through the nets together and stay in the caches
    deltas: Float32Array  # (parts, BLOCK, S) their gradients
    probs: Float32Array  # (parts, 4, A) of one row's legal actions, see `rate`
    gradients: Float32Array  # (parts, P)
    transposed: Float32Array  # (P,) hidden weights as (outputs, inputs)
    statistics: Float64Array  # (parts, NUM_STATISTICS)
    values: Float32Array  # (parts, 1) a row's value, then its gradient
    moments: Float64Array  # (2,) of a minibatch's advantages, see `moments`
    zeros: Float32Array  # the rest as in `Constants`
    ones: Float32Array
    every: Int32Array


@njit_inline
def surrogate(advantage: float, ratio: float, clip_range: float) -> tuple[float, float, bool]:
    """Clipped policy loss of one row (Schulman et al. 2017, eq. 7), its slope in the log-probability, whether clipped.

    torch.min passes the gradient to the smaller of the two terms; inside the range they are the same term.
    """
    clipped = min(max(ratio, 1.0 - clip_range), 1.0 + clip_range)
    outside = abs(ratio - 1.0) > clip_range
    flows = not outside or advantage * ratio < advantage * clipped
    slope = -advantage * ratio if flows else 0.0
    return -min(advantage * ratio, advantage * clipped), slope, outside


@njit_inline
def rate(dims: Int64Array, legal: Int32Array, actions: Int64Array, probs: Float32Array) -> tuple[Any, Any]:
    """Log-probability of the actions (K,) and entropy, of one row, from the logits of its legal actions in probs[1].

    probs (4, ≥m) then holds, action by action: the probability p, log p, p × (log p + entropy of its sub-action), which
    is minus the entropy's slope in the logit, and whether it was taken.
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
    """A view (A,) of the log standard deviations among parameters or gradients; (0,) where actions are choices."""
    at = max(layout.log_std, 0)
    return flat[at : at + (layout.dims.sum() if layout.log_std >= 0 else 0)]


@njit_inline
def draw_point(log_stds: Float32Array, normals: Float32Array, means: Float32Array, point: Float32Array) -> Any:
    """A continuous action (A,) of a diagonal Gaussian into `point`; returns its log-probability."""
    log_prob = np.float32(0)
    for d in range(len(log_stds)):
        point[d] = means[d] + np.exp(log_stds[d]) * normals[d]
        log_prob -= np.float32(0.5) * normals[d] * normals[d] + log_stds[d] + HALF_LOG_2_PI
    return log_prob


@njit_inline
def rate_point(log_stds: Float32Array, point: Float32Array, probs: Float32Array) -> tuple[Any, Any]:
    """Log-probability of a continuous action (A,) and entropy, of one row, from the Gaussian's means (A,) in probs[1].

    probs (4, A) then holds what makes the slopes in the means those of `rate` in its logits: zeros in rows 0 and 2, and
    in row 3 (action - mean) ÷ variance.
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
    """The row's gradients in the log standard deviations, added to `out` (A,).

    Args:
        slope: of the loss in the row's log-probability.
        entropy_share: by which a nat of entropy lowers the loss.
        probs: as `rate_point` left it.
    """
    for d in range(len(log_stds)):
        z = probs[3, d] * np.exp(log_stds[d])
        out[d] += slope * (z * z - np.float32(1)) - entropy_share


@njit_inner
def policy_block(
    order: Int64Array,  # at most BLOCK rows
    share: float,  # 1 ÷ rows of the minibatch
    mean: float,  # of the advantages, 0 if they are not normalised
    scale: float,  # 1 ÷ (their standard deviation + 1e-8)
    flat: Float32Array,
    layout: Layout,
    rows: Rows,
    loss: LossSettings,
    hidden: Float32Array,  # (BLOCK, k) last activations
    probs: Float32Array,
    constants: Constants,
    deltas: Float32Array,  # (BLOCK, k) out: their gradient
    gradient: Float32Array,
    statistics: Float64Array,
) -> None:
    """Policy loss and entropy bonus of some rows, and their gradients through the policy head."""
    width = layout.dims.sum()
    w, bias = head_of_net(POLICY, width, flat, layout)
    out_w, out_bias = head_of_net(POLICY, width, gradient, layout)
    log_stds, out_log_stds = log_stds_of(flat, layout), log_stds_of(gradient, layout)
    entropy_share = np.float32(share * loss.ent_coef)
    for r in range(len(order)):
        row = order[r]
        legal = rows.legal[rows.legal_starts[row] : rows.legal_starts[row + 1]]
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
        slopes = probs[1]  # in the logits; the log-probabilities are not needed any more
        for m in range(len(legal)):
            slopes[m] = slope * (probs[3, m] - probs[0, m]) + entropy_share * probs[2, m]
            out_bias[legal[m]] += slopes[m]
        sum_rows(slopes, legal, 0, len(legal), w, constants.zeros, deltas[r])
        add_to_rows(slopes, legal, 0, len(legal), hidden[r], out_w)


@njit_inner
def value_block(
    order: Int64Array,
    share: float,
    flat: Float32Array,
    layout: Layout,
    rows: Rows,
    loss: LossSettings,
    hidden: Float32Array,
    out: Float32Array,  # (1,)
    constants: Constants,
    deltas: Float32Array,
    gradient: Float32Array,
    statistics: Float64Array,
) -> None:
    """Squared value error of some rows and its gradients through the value head."""
    w, bias = head_of_net(VALUE, 1, flat, layout)
    out_w, out_bias = head_of_net(VALUE, 1, gradient, layout)
    only = constants.every  # of which the first is the head's only row
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
        sum_rows(out, only, 0, 1, w, constants.zeros, deltas[r])
        add_to_rows(out, only, 0, 1, hidden[r], out_w)


@njit_inline
def gradient_of_part(
    batch: Int64Array,  # (B,) rows of the minibatch
    flat: Float32Array,
    layout: Layout,
    rows: Rows,
    loss: LossSettings,
    scratch: Scratch,
    part: int,
) -> None:
    """Gradients and statistics of one part's rows into its sums."""
    count, parts = len(batch), len(scratch.gradients)
    order = batch[count * part // parts : count * (part + 1) // parts]
    gradient, statistics = scratch.gradients[part], scratch.statistics[part]
    activations, deltas, probs = scratch.activations[part], scratch.deltas[part], scratch.probs[part]
    last, value_last = last_of_net(POLICY, layout, activations), last_of_net(VALUE, layout, activations)
    last_delta, value_delta = last_of_net(POLICY, layout, deltas), last_of_net(VALUE, layout, deltas)
    gradient[:] = 0.0
    statistics[:] = 0.0
    share, size, mean, scale = 1.0 / count, len(activations), scratch.moments[0], scratch.moments[1]
    constants = Constants(scratch.zeros, scratch.ones, scratch.every)
    lists = Lists(rows.values, rows.columns, rows.starts, rows.legal, rows.legal_starts)
    for begin in range(0, len(order), size):
        block = order[begin : begin + size]
        for row in order[begin + size : begin + 2 * size]:
            fetch(rows.values, rows.starts[row], rows.starts[row + 1])
            fetch(rows.columns, rows.starts[row], rows.starts[row + 1])
            fetch(rows.legal, rows.legal_starts[row], rows.legal_starts[row + 1])
        forward_block(flat, layout, lists, block, activations)
        policy_block(block, share, mean, scale, flat, layout, rows, loss, last, probs, constants, last_delta, gradient,
                     statistics)  # fmt: skip
        value_block(block, share, flat, layout, rows, loss, value_last, scratch.values[part], constants, value_delta,
                    gradient, statistics)  # fmt: skip
        deltas[len(block) : padded_rows(len(block)), :] = 0.0
        backward_block(flat, layout, rows, block, activations, deltas, scratch.transposed, constants, gradient)


@njit_inline
def moments(order: Int64Array, advantages: Float32Array, normalize: bool, out: Float64Array) -> None:  # …, (2,)
    """Mean and 1 ÷ (standard deviation + 1e-8) over a minibatch, as torch's; 0 and 1 of a single row, or if nothing is
    to be normalised."""
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
    """Gradients and statistics of all parts into those of the first, in order."""
    total, sums = scratch.gradients[0], scratch.statistics[0]
    for part in range(1, len(scratch.gradients)):
        for c in range(len(total)):
            total[c] += scratch.gradients[part, c]
        for c in range(len(sums)):
            sums[c] += scratch.statistics[part, c]


@njit_inline
def take_step(
    count: int,  # rows of the minibatch
    flat: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    step: int,
    loss: LossSettings,
    adam: AdamSettings,
    scratch: Scratch,  # sums in the first part
    means: Float64Array,  # (NUM_STATISTICS,) out
    guarded: bool,
    blamed: Int64Array,
) -> None:
    """The step that follows from the sums. means[GRAD_NORM] is `NO_STEP` where `target_kl` is exceeded, NaN where
    something is not finite; no step is taken then."""
    for c in range(len(means)):
        means[c] = scratch.statistics[0, c] / count
    means[LOSS] = means[POLICY_LOSS] - loss.ent_coef * means[ENTROPY] + loss.vf_coef * means[VALUE_LOSS]
    if loss.target_kl >= 0.0 and means[APPROX_KL] > 1.5 * loss.target_kl:
        means[GRAD_NORM] = NO_STEP
        return
    means[GRAD_NORM] = clip_and_adam(flat, scratch.gradients[0], exp_avg, exp_avg_sq, step, adam.learning_rate,
                                     adam.beta1, adam.beta2, adam.eps, adam.max_grad_norm, means[LOSS],
                                     guarded)  # fmt: skip
    if guarded and math.isnan(means[GRAD_NORM]) and blamed[0] < 0:
        blamed[0] = worst_of(scratch.gradients[0])
