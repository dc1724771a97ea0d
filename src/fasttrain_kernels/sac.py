"""The SAC update of MLP networks in a compiled kernel on threads: critics, actor and target critics; and acting.

The algorithm is that of SB3's `sac/sac.py` (Haarnoja et al. 2018), with n-step returns and another order of summation.
Unlike in autograd, the actor's update computes no gradients of the critics' weights, and the gradient of a row goes
only through the critic with the lowest value. Parameters are in torch's memory and copied into padded layers (`q.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import Float32Array, Float64Array, Int64Array
from fasttrain_kernels import threads
from fasttrain_kernels.dense import LARGEST, clip_and_adam, worst_of
from fasttrain_kernels.jit import njit, njit_bare, njit_inline, njit_inner, njit_relaxed
from fasttrain_kernels.nets import Constants, Layout, padded_rows
from fasttrain_kernels.ppo import HALF_LOG_2_PI, AdamSettings
from fasttrain_kernels.q import NET, Pieces, backward, forward, lay_ahead, lay_back, q_values_of, to_inputs
from fasttrain_kernels.simd import PAD

LOWEST_LOG_STD, HIGHEST_LOG_STD = np.float32(-20), np.float32(2)  # as in SB3
EPSILON, ONE, HALF = np.float32(1e-6), np.float32(1), np.float32(0.5)  # EPSILON: SB3's, in an action's log-probability
SEEN, NEXT = 0, 1  # index of the observations, and of the next observations
NUM_STATISTICS = 5
CRITIC_LOSS, ACTOR_LOSS, MISSING_ENTROPY, CRITIC_NORM, ACTOR_NORM = range(NUM_STATISTICS)
# Stages of an update: copy the parameters into layers; gradients of the critics; sums of these gradients; step of the
# critics; gradients of the actor; step of the actor and update of the target critics; end.
LAY, VALUES, SUM, STEP, ACTOR, FOLLOW, OVER = range(7)


class SACBatch(NamedTuple):
    """B transitions."""

    features: Float32Array  # (2, B, O) features of the observations and of the next observations
    actions: Float32Array  # (B, A) from -1 to 1
    rewards: Float32Array  # (B,)
    discounts: Float32Array  # (B,) 0 where the episode ended by the rules
    noise: Float32Array  # (2, B, A) standard normal


class Net(NamedTuple):
    """The layout of the actor or of a critic. The actor's head gives means and log standard deviations, (2 A,)."""

    layout: Layout
    pieces: Pieces


class Learners(NamedTuple):
    """Parameters and Adam's moments, in and out: of the actor (P,), of N critics and N target critics (N, P)."""

    actor: Float32Array
    actor_avg: Float32Array
    actor_avg_sq: Float32Array
    critics: Float32Array
    critics_avg: Float32Array
    critics_avg_sq: Float32Array
    targets: Float32Array


class SACSettings(NamedTuple):
    """Numbers that an update uses."""

    ent_coef: float
    log_ent_coef: float  # logarithm of ent_coef; 0 if it is not learned
    target_entropy: float
    tau: float  # 0: the target critics do not change
    actor_step: int  # number of this Adam step of the actor, from 1
    critic_step: int
    guarded: bool  # skip a step where loss or gradient is not finite


class Update(NamedTuple):
    """Everything that one update reads and writes."""

    batch: SACBatch
    learners: Learners
    actor: Net
    critic: Net  # the layout of every critic
    settings: SACSettings
    actor_adam: AdamSettings
    critic_adam: AdamSettings


class SACScratch(NamedTuple):
    """Working memory for R rows (B and padding) in `parts` parts, so that threads can work at the same time.

    A net computes BLOCK rows at once. Padding is always zero."""

    inputs: Float32Array  # (2, R, inputs) inputs of the actor
    activations: Float32Array  # (2, R, S) activations of the actor
    drawn: Float32Array  # (2, R, A) actions
    slopes: Float32Array  # (2, R, A) 1 - action²
    log_probs: Float32Array  # (2, R)
    deltas: Float32Array  # (parts, BLOCK, S)
    q_inputs: Float32Array  # (parts, BLOCK, inputs) inputs of the critics, later d(lowest value) ÷ d(inputs)
    q_activations: Float32Array  # (parts, N, BLOCK, S)
    q_deltas: Float32Array  # (parts, BLOCK, S)
    targets: Float32Array  # (parts, BLOCK)
    chosen: Int64Array  # (parts, BLOCK) row indices from `lowest_rows`
    actor_ahead: Float32Array  # (F,) weights in the order of the forward pass
    actor_back: Float32Array  # (F,) weights in the order of the backward pass
    critics_ahead: Float32Array  # (N, F)
    critics_back: Float32Array  # (N, F)
    targets_ahead: Float32Array  # (N, F)
    actor_sums: Float32Array  # (parts, F) gradients of the layers, in the order of `actor_back`
    critic_sums: Float32Array  # (parts, N, F)
    actor_gradient: Float32Array  # (P,)
    critic_gradients: Float32Array  # (N, P)
    squares: Float64Array  # (N,) squared norms of the critics' gradients
    sums: Float64Array  # (parts, NUM_STATISTICS)
    constants: Constants


@njit
def draw_rows(
    heads: Float32Array,  # (≥n, 2 A) the outputs of the actor's head
    noise: Float32Array,  # (n, A)
    actions: Float32Array,  # (≥n, A) out
    slopes: Float32Array,  # (≥n, A) out
    log_probs: Float32Array,  # (≥n,) out
) -> None:
    """Actions of a squashed Gaussian, and their log-probabilities.

    The arithmetic is strict, not relaxed: near ±1 the value of 1 - action² depends on rounding, and must equal torch's.
    """
    dims = noise.shape[1]
    for r in range(noise.shape[0]):
        log_prob = np.float32(0)
        for a in range(dims):
            log_std = heads[r, dims + a]
            log_std = LOWEST_LOG_STD if log_std < LOWEST_LOG_STD else log_std  # NaN stays NaN
            log_std = HIGHEST_LOG_STD if log_std > HIGHEST_LOG_STD else log_std
            action = np.float32(math.tanh(np.float64(heads[r, a] + np.exp(log_std) * noise[r, a])))
            slope = ONE - action * action
            actions[r, a], slopes[r, a] = action, slope
            log_prob += -HALF * noise[r, a] * noise[r, a] - log_std - HALF_LOG_2_PI - np.log(slope + EPSILON)
        log_probs[r] = log_prob


@njit_inner
def fill(features: Float32Array, actions: Float32Array, begin: int, count: int, inputs: Float32Array) -> None:
    """Copy `count` rows of features (B, O) and actions (≥B, A), from row `begin` on, side by side into `inputs`
    (BLOCK, ≥O + A). All other entries of `inputs` are set to 0."""
    wide = features.shape[1]
    for r in range(padded_rows(count)):
        inputs[r, :] = np.float32(0)
        for c in range(wide if r < count else 0):
            inputs[r, c] = features[begin + r, c]
        for a in range(actions.shape[1] if r < count else 0):
            inputs[r, wide + a] = actions[begin + r, a]


@njit_inner
def act_block(which: int, begin: int, end: int, batch: SACBatch, actor: Net, scratch: SACScratch) -> None:
    """Draw actions for rows `begin` to `end`; `which`: SEEN or NEXT. `scratch` keeps what the backward pass needs."""
    inputs, activations = scratch.inputs[which, begin:], scratch.activations[which, begin:]
    fill(batch.features[which], batch.actions[:, :0], begin, end - begin, inputs)
    forward(scratch.actor_ahead, actor.layout, False, inputs, end - begin, activations)
    draw_rows(q_values_of(activations, actor.layout), batch.noise[which, begin:end], scratch.drawn[which, begin:],
              scratch.slopes[which, begin:], scratch.log_probs[which, begin:])  # fmt: skip


@njit_inline
def values_block(part: int, begin: int, end: int, update: Update, scratch: SACScratch) -> None:
    """For rows `begin` to `end`: draw actions, compute the critics' targets, and gradients of the squared errors."""
    batch, actor, ent_coef = update.batch, update.actor, np.float32(update.settings.ent_coef)
    count, layout, critics = end - begin, update.critic.layout, len(scratch.critics_ahead)
    inputs, targets, deltas = scratch.q_inputs[part], scratch.targets[part], scratch.q_deltas[part]
    act_block(SEEN, begin, end, batch, actor, scratch)
    act_block(NEXT, begin, end, batch, actor, scratch)
    fill(batch.features[NEXT], scratch.drawn[NEXT], begin, count, inputs)
    for n in range(critics):
        activations = scratch.q_activations[part, 0]
        forward(scratch.targets_ahead[n], layout, False, inputs, count, activations)
        values = q_values_of(activations, layout)
        for r in range(count):
            value = values[r, 0]
            if n == 0 or value < targets[r] or value != value:  # NaN is the lowest, as in torch
                targets[r] = value
    for r in range(count):
        soft = targets[r] - ent_coef * scratch.log_probs[NEXT, begin + r]
        targets[r] = batch.rewards[begin + r] + batch.discounts[begin + r] * soft
    share = ONE / np.float32(len(batch.rewards))
    fill(batch.features[SEEN], batch.actions, begin, count, inputs)
    for n in range(critics):
        activations = scratch.q_activations[part, 0]
        forward(scratch.critics_ahead[n], layout, False, inputs, count, activations)
        values, slopes = q_values_of(activations, layout), q_values_of(deltas, layout)
        for r in range(padded_rows(count)):
            slopes[r, :] = np.float32(0)
            if r < count:
                error = values[r, 0] - targets[r]
                slopes[r, 0] = error * share
                scratch.sums[part, CRITIC_LOSS] += HALF * error * error
        backward(scratch.critics_back[n], layout, count, inputs, activations, deltas, scratch.constants,
                 scratch.critic_sums[part, n])  # fmt: skip


@njit_inner
def lowest_rows(n: int, count: int, layout: Layout, activations: Float32Array, chosen: Int64Array) -> int:
    """Write the indices of the rows in which critic n is the first with the lowest value to `chosen`; returns how many.

    `activations` are (N, BLOCK, S), with `count` rows.
    """
    number, column = 0, layout.columns[NET, layout.depth[NET]]
    for r in range(count):
        own, lower = activations[n, r, column], 0
        for other in range(len(activations)):
            value = activations[other, r, column]
            nan = value != value  # NaN is the lowest, as in torch
            lower += value < own or (nan and own == own) or (other < n and (nan or value == own))
        if lower == 0:
            chosen[number] = r
            number += 1
    return number


@njit_inline
def actor_block(part: int, begin: int, end: int, update: Update, scratch: SACScratch) -> None:
    """For rows `begin` to `end`: gradients of the mean of ent_coef × log_prob - (lowest value of the critics)."""
    batch, actor, settings, layout = update.batch, update.actor, update.settings, update.critic.layout
    count, critics, dims = end - begin, len(scratch.critics_ahead), batch.actions.shape[1]
    inputs, rows = scratch.q_inputs[part], scratch.chosen[part]
    wide, deltas, ent_coef = batch.features.shape[2], scratch.deltas[part], np.float32(settings.ent_coef)
    outputs = q_values_of(scratch.activations[SEEN, begin:], actor.layout)
    slopes, share = q_values_of(deltas, actor.layout), ONE / np.float32(len(batch.rewards))
    for r in range(padded_rows(count)):
        slopes[r, :] = np.float32(0)
    fill(batch.features[SEEN], scratch.drawn[SEEN], begin, count, inputs)
    for n in range(critics):
        forward(scratch.critics_ahead[n], layout, False, inputs, count, scratch.q_activations[part, n])
    for n in range(critics):
        activations = scratch.q_activations[part, n]
        values = q_values_of(activations, layout)
        chosen = rows[: lowest_rows(n, count, layout, scratch.q_activations[part], rows)]
        to_inputs(scratch.critics_back[n], layout, chosen, activations, scratch.q_deltas[part], wide // PAD * PAD,
                  scratch.constants.zeros, inputs)  # fmt: skip
        for i in range(len(chosen)):
            r = chosen[i]
            at = begin + r
            log_prob = scratch.log_probs[SEEN, at]
            scratch.sums[part, ACTOR_LOSS] += ent_coef * log_prob - values[r, 0]
            scratch.sums[part, MISSING_ENTROPY] += log_prob + np.float32(settings.target_entropy)
            for a in range(dims):
                slope, raw = scratch.slopes[SEEN, at, a], outputs[r, dims + a]
                by_action = (ent_coef + ent_coef) * scratch.drawn[SEEN, at, a] / (slope + EPSILON)
                outer = (by_action - inputs[i, wide + a]) * share * slope  # gradient of the Gaussian's mean
                slopes[r, a] = outer
                if not (raw < LOWEST_LOG_STD or raw > HIGHEST_LOG_STD):
                    slopes[r, dims + a] = outer * np.exp(raw) * batch.noise[SEEN, at, a] - ent_coef * share
    backward(scratch.actor_back, actor.layout, count, scratch.inputs[SEEN, begin:], scratch.activations[SEEN, begin:],
             deltas, scratch.constants, scratch.actor_sums[part])  # fmt: skip


@njit_inner
def add_up(parts: Any, pieces: Pieces, gradient: Float32Array) -> None:
    """Sum the gradients (parts, F) over the parts, in order, and copy the sum into the parameters' gradient (P,)."""
    for part in range(1, len(parts)):
        for c in range(parts.shape[1]):
            parts[0, c] += parts[part, c]
    lay_back(gradient, pieces, parts[0], True)


@njit_inner
def lay_critic(n: int, nets: Learners, critic: Net, scratch: SACScratch) -> None:
    """Copy the parameters of critic n into its padded layers."""
    lay_ahead(nets.critics[n], critic.pieces, scratch.critics_ahead[n])
    lay_back(nets.critics[n], critic.pieces, scratch.critics_back[n])


@njit_inner
def pieces_of(stage: int, parts: int, critics: int) -> int:
    """Number of pieces of work in a stage. In every stage threads claim `most` pieces, and skip those without work."""
    if stage in (VALUES, ACTOR):
        return parts
    return 2 * critics + 1 if stage == LAY else critics + 1 if stage == FOLLOW else critics


@njit_inline
def work_on(stage: int, piece: int, update: Update, scratch: SACScratch, statistics: Float64Array) -> None:
    """Do one piece of the work of a stage."""
    nets, actor, critic, settings = update.learners, update.actor, update.critic, update.settings
    critics, parts, rows = len(nets.critics), len(scratch.sums), len(update.batch.rewards)
    if stage == LAY:
        if piece < critics:
            lay_critic(piece, nets, critic, scratch)
        elif piece < 2 * critics:
            lay_ahead(nets.targets[piece - critics], critic.pieces, scratch.targets_ahead[piece - critics])
        else:
            lay_ahead(nets.actor, actor.pieces, scratch.actor_ahead)
            lay_back(nets.actor, actor.pieces, scratch.actor_back)
    elif stage in (VALUES, ACTOR):
        size, whole = len(scratch.constants.every), padded_rows(-(-rows // parts))
        last = min((piece + 1) * whole, rows)
        if stage == VALUES:
            scratch.critic_sums[piece] = np.float32(0)
            scratch.sums[piece] = 0.0
        else:
            scratch.actor_sums[piece] = np.float32(0)
        for begin in range(piece * whole, last, size):
            end = min(begin + size, last)
            if stage == VALUES:
                values_block(piece, begin, end, update, scratch)
            else:
                actor_block(piece, begin, end, update, scratch)
    elif stage == SUM:
        gradient, square = scratch.critic_gradients[piece], 0.0
        add_up(scratch.critic_sums[:, piece], critic.pieces, gradient)
        for c in range(len(gradient)):
            square += gradient[c] * gradient[c]
        scratch.squares[piece] = square
    elif stage == STEP:
        adam = update.critic_adam
        clip_and_adam(nets.critics[piece], scratch.critic_gradients[piece], nets.critics_avg[piece],
                      nets.critics_avg_sq[piece], settings.critic_step, adam.learning_rate, adam.beta1, adam.beta2,
                      adam.eps, math.inf)  # fmt: skip
        lay_critic(piece, nets, critic, scratch)
    elif piece > 0:
        target, learned = nets.targets[piece - 1], nets.critics[piece - 1]
        tau, stays = np.float32(settings.tau), np.float32(1.0 - settings.tau)
        for c in range(len(target) if settings.tau > 0.0 else 0):
            target[c] = stays * target[c] + tau * learned[c]
    elif not (settings.guarded and math.isnan(statistics[CRITIC_NORM])):
        adam = update.actor_adam
        add_up(scratch.actor_sums, actor.pieces, scratch.actor_gradient)
        loss = statistics[ACTOR_LOSS] - settings.log_ent_coef * statistics[MISSING_ENTROPY]
        norm = clip_and_adam(nets.actor, scratch.actor_gradient, nets.actor_avg, nets.actor_avg_sq,
                             settings.actor_step, adam.learning_rate, adam.beta1, adam.beta2, adam.eps, math.inf, loss,
                             settings.guarded)  # fmt: skip
        statistics[ACTOR_NORM] = norm


@njit_inline
def end_of(stage: int, count: int, settings: SACSettings, scratch: SACScratch, statistics: Float64Array) -> int:
    """Compute the means of a stage's statistics, and return the next stage. Only thread 0 calls this."""
    if stage in (VALUES, ACTOR):
        for name in range(CRITIC_NORM):
            if (name == CRITIC_LOSS) == (stage == VALUES):
                statistics[name] = scratch.sums[:, name].sum() / count
    if stage == SUM:
        statistics[CRITIC_NORM] = math.sqrt(scratch.squares.sum())
        if settings.guarded and not abs(statistics[CRITIC_NORM] + statistics[CRITIC_LOSS]) <= LARGEST:
            statistics[CRITIC_NORM] = statistics[ACTOR_NORM] = math.nan
            return FOLLOW
    return stage + 1


@njit_bare
def train_update(
    update: Update,
    scratch: SACScratch,
    statistics: Float64Array,  # (NUM_STATISTICS,) out: means; norms of gradients, NaN if the step was skipped
    team: Int64Array,
    me: int,  # thread 0 starts the stages
) -> int:
    """One update of all networks.

    The number of parts is that of `scratch`. The sums of the parts are added in order, so that the result does not
    depend on the number of threads. Returns 0, or after a skipped step the index of the first number
    in the gradient that is not finite: the critics' gradient, or the actor's if only the actor's step was skipped.
    """
    stage, looks, critics, settings = LAY, 0, len(update.learners.critics), update.settings
    parts = len(scratch.sums)
    most = max(parts, pieces_of(LAY, parts, critics))
    threads.begin_work(team, me, 0)
    while threads.is_open(team) if me > 0 else stage < OVER:
        if me == 0:
            team[threads.NOTE] = stage
            threads.open_pieces(team, most)
        piece, worked = threads.claim(team, me), False
        while piece >= 0:
            if piece < pieces_of(team[threads.NOTE], parts, critics):
                work_on(team[threads.NOTE], piece, update, scratch, statistics)
            threads.fetch_add(team, threads.DONE, 1)
            piece, worked = threads.claim(team, me), True
        if me > 0:
            looks = 0 if worked else looks + 1
            threads.rest(looks)
            continue
        threads.wait_for(team, threads.DONE, most)
        stage = end_of(stage, len(update.batch.rewards), settings, scratch, statistics)
    threads.end_work(team, me)
    if settings.guarded and math.isnan(statistics[CRITIC_NORM]):
        return worst_of(scratch.critic_gradients.reshape(scratch.critic_gradients.size))
    return worst_of(scratch.actor_gradient) if settings.guarded and math.isnan(statistics[ACTOR_NORM]) else 0


@njit_relaxed
def act_rows(batch: SACBatch, parameters: Float32Array, actor: Net, scratch: SACScratch) -> Any:
    """Draw actions for the first observations of `batch` into `scratch.drawn`. Returns the sum of the actions, which
    is finite only if all actions are finite."""
    count, size = len(batch.actions), len(scratch.constants.every)
    lay_ahead(parameters, actor.pieces, scratch.actor_ahead)
    for begin in range(0, count, size):
        act_block(SEEN, begin, min(begin + size, count), batch, actor, scratch)
    return scratch.drawn[SEEN, :count].sum()
