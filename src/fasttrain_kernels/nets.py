"""MLPs with one flat parameter vector, on blocks of rows: forward, backward, masked softmax; and heads of Q-networks.

The first layer uses only non-zero inputs, and the softmax only legal actions: in Skull King 37 of 248 inputs and 4 of
86 actions. This saves most of the work of the widest layers. The first layers of policy and value net are side by side
in one matrix, so that a row's inputs are read once.

An action has K sub-actions (Discrete: K = 1) with `dims` (K,) choices each. A row of Q-values (A,) has the choices of
all sub-actions side by side, and padding. Legend: `flat` (P,): parameters; `gradient` (P,): kernels add to it;
`activations` (BLOCK, S); `deltas` (BLOCK, S): their gradients; `transposed` (P,): hidden weights as (outputs, inputs).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Int32Array, Int64Array
from fasttrain_kernels.dense import (
    activate,
    add_product,
    set_product,
    sparse_backward,
    sparse_forward,
    sum_rows,
    through_activation,
)
from fasttrain_kernels.jit import njit_bare, njit_inline, njit_inner
from fasttrain_kernels.simd import (
    GROUP,
    LANES,
    TILE_ROWS,
    count_bits,
    dot_rows,
    lowest_bit,
    nonzero_bits,
    transpose_tile,
)
from fasttrain_kernels.threads import begin_work, claim, end_work

POLICY, VALUE = 0, 1
DENSE_FROM = 0.6  # share of inputs that are not zero, from which all inputs are multiplied
LISTED = 128  # rows that a thread of `compress` takes at once: about 50 µs of work with AVX2, 10 with AVX-512


class Layout(NamedTuple):
    """Where the layers of the policy net (row 0) and the value net (row 1) are in the flat parameter vector (P,).

    Weights are (inputs, outputs); in a head (outputs, inputs), because only outputs of legal actions are computed. All
    widths are padded. Both first layers are one matrix (inputs, `first_width`). A row of activations has all layers.
    """

    inputs: int
    first_width: int  # width of both first layers together
    first_weights: int  # where the weights of both first layers begin
    first_biases: int  # where the biases of both first layers begin
    depth: Int64Array  # (2,) number of hidden layers, at least 1
    sizes: Int64Array  # (2, D) width of every hidden layer
    columns: Int64Array  # (2, D) first column of every hidden layer in a row of activations
    weights: Int64Array  # (2, D + 1) where each layer's weights begin; [depth]: head. First layer: `first_weights`
    biases: Int64Array  # (2, D + 1) where each layer's biases begin; first layer: `first_biases`
    dims: Int64Array  # (K,) choices of each sub-action, with the sum A (mask width); [A] for continuous actions
    kind: int  # one of dense.ACTIVATIONS
    log_std: int = -1  # offset of the log standard deviations (A,) of continuous actions; -1: actions are choices


class Constants(NamedTuple):
    """Constant arrays: kernels without reference counts (`njit_bare`) cannot allocate arrays."""

    zeros: Float32Array  # (S,)
    ones: Float32Array  # (BLOCK,)
    every: Int32Array  # (BLOCK,) 0, 1, 2, …


class Lists(NamedTuple):
    """Observations and masks of M rows as lists. Row i's non-zero inputs: `columns[starts[i]:starts[i + 1]]`."""

    values: Float32Array  # the inputs that are not zero
    columns: Int32Array
    starts: Int64Array  # (M + 1,)
    legal: Int32Array  # the legal actions
    legal_starts: Int64Array  # (M + 1,)


class Rows(NamedTuple):
    """M transitions of a rollout."""

    lists: Lists
    actions: Int64Array  # (M, K); (M, 0) if actions are continuous
    points: Float32Array  # (M, A) continuous actions; (M, 0) if actions are choices
    old_values: Float32Array  # (M,)
    old_log_probs: Float32Array  # (M,)
    advantages: Float32Array  # (M,)
    returns: Float32Array  # (M,)


def empty_lists(count: int, inputs: int, actions: int) -> Lists:
    """Lists with room for `count` rows, not initialised. Pages that are never written take no memory."""
    values, columns = np.empty(count * inputs, np.float32), np.empty(count * inputs, np.int32)
    starts, legal_starts = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    return Lists(values, columns, starts, np.empty(count * actions, np.int32), legal_starts)


@njit_bare
def compress(observations: Float32Array, masks: BoolArray, lists: Lists, team: Int64Array, me: int) -> None:
    """Write observations (M, O) and masks (M, A) into the first M rows of `lists`."""
    if me == 0:
        count_entries(observations, masks, lists)
    begin_work(team, me, -(-len(observations) // LISTED))
    piece = claim(team, me)
    while piece >= 0:
        for i in range(piece * LISTED, min((piece + 1) * LISTED, len(observations))):
            list_entries(observations[i], masks[i], i, lists)
        piece = claim(team, me)
    end_work(team, me)


@njit_inner
def count_entries(observations: Float32Array, masks: BoolArray, lists: Lists) -> None:  # (M, O), (M, A)
    """Write `lists.starts` and `lists.legal_starts`: where each row's entries begin."""
    for i in range(len(observations)):
        lists.starts[i + 1] = lists.starts[i] + count_nonzero(observations[i])
        lists.legal_starts[i + 1] = lists.legal_starts[i] + count_nonzero(masks[i])


@njit_inner
def list_entries(observation: Float32Array, mask: BoolArray, row: int, lists: Lists) -> None:  # (O,), (A,)
    """Write the non-zero inputs and the legal actions of row `row` into `lists`."""
    begin, end = lists.starts[row], lists.starts[row + 1]
    where_nonzero(observation, lists.columns[begin:end])
    for m in range(begin, end):
        lists.values[m] = observation[lists.columns[m]]
    where_nonzero(mask, lists.legal[lists.legal_starts[row] : lists.legal_starts[row + 1]])


@njit_inner
def count_nonzero(row: Any) -> int:  # (n,) float32 or bool
    """The number of entries that are not zero."""
    whole, count = len(row) // GROUP * GROUP, 0
    for at in range(0, whole, GROUP):
        count += count_bits(nonzero_bits(row, at))
    for at in range(whole, len(row)):
        count += row[at] != 0
    return count


@njit_inner
def where_nonzero(row: Any, places: Int32Array) -> None:  # (n,) float32 or bool, (m,) out
    """Write the indices of the entries that are not zero into `places`, in order."""
    whole, m = len(row) // GROUP * GROUP, 0
    for at in range(0, whole, GROUP):
        bits: Any = nonzero_bits(row, at)
        while bits != 0:
            places[m] = at + lowest_bit(bits)
            bits &= bits - 1
            m += 1
    for at in range(whole, len(row)):
        if row[at] != 0:
            places[m] = at
            m += 1


@njit_inner
def padded_rows(count: int) -> int:
    """`count` rounded up to a multiple of TILE_ROWS: the number of rows that the dense layers compute."""
    return (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@njit_inner
def forward_block(
    flat: Float32Array, layout: Layout, lists: Lists, order: Int64Array, seen: Float32Array, activations: Float32Array
) -> bool:
    """Compute the hidden activations of both nets for `order`, at most BLOCK rows. Returns what `spread` returns."""
    inputs, width, at = layout.inputs, layout.first_width, layout.first_weights
    w = flat[at : at + inputs * width].reshape((inputs, width))
    bias = flat[layout.first_biases : layout.first_biases + width]
    padded = padded_rows(len(order))
    dense = spread(lists, order, seen)
    if dense:
        set_product(seen[:, :padded].T, w, bias, padded, activations[:, :width])
    else:
        sparse_forward(lists, order, w, bias, activations)
    activations[len(order) : padded, :width] = 0.0
    for r in range(len(order)):
        activate(activations[r, :width], layout.kind)
    forward_hidden(flat, layout, padded, activations)
    return dense


@njit_inner
def spread(lists: Lists, order: Int64Array, seen: Float32Array) -> bool:
    """Write the inputs of the rows `order` into the columns of `seen` (inputs, BLOCK), if few of them are zero.

    A product of all inputs then takes half the time of sums over lists, with the same bits: it only adds zeros.
    """
    count, total = len(order), 0
    for row in order:
        total += lists.starts[row + 1] - lists.starts[row]
    if DENSE_FROM * count * len(seen) > total or len(seen) < TILE_ROWS:
        return False
    seen[:, : padded_rows(count)] = 0.0
    for r in range(count):
        for m in range(lists.starts[order[r]], lists.starts[order[r] + 1]):
            seen[lists.columns[m], r] = lists.values[m]
    return True


@njit_inner
def forward_hidden(flat: Float32Array, layout: Layout, padded: int, activations: Float32Array) -> None:
    """Compute the activations of all hidden layers but the first, in every net."""
    for net in range(len(layout.depth)):
        for layer in range(1, layout.depth[net]):
            x, w, bias = layer_of(net, layer, flat, layout, activations)
            n, column = layout.sizes[net, layer], layout.columns[net, layer]
            set_product(x, w, bias, padded, activations[:, column : column + n])
            for r in range(padded):
                activate(activations[r, column : column + n], layout.kind)


@njit_inline
def layer_of(
    net: int, layer: int, flat: Float32Array, layout: Layout, activations: Float32Array
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Views of a layer's inputs (BLOCK, k), weights (k, n) and biases (n,); not of the first layer."""
    k, n, at = layout.sizes[net, layer - 1], layout.sizes[net, layer], layout.weights[net, layer]
    column, bias_at = layout.columns[net, layer - 1], layout.biases[net, layer]
    return activations[:, column : column + k], flat[at : at + k * n].reshape((k, n)), flat[bias_at : bias_at + n]


@njit_inner
def backward_hidden(
    flat: Float32Array, layout: Layout, count: int, activations: Float32Array, deltas: Float32Array,
    transposed: Float32Array, constants: Constants, gradient: Float32Array,
) -> None:  # fmt: skip
    """Compute the gradients of all hidden layers but the first, in both nets, for `count` rows.

    `deltas` has the gradients of each net's last activations, and zeros in the padding rows.
    """
    padded = padded_rows(count)
    zeros, ones, every = constants
    for net in (POLICY, VALUE):
        for layer in range(layout.depth[net] - 1, 0, -1):
            x, w_out, bias_out = layer_of(net, layer, gradient, layout, activations)
            k, n = w_out.shape
            column, below, at = layout.columns[net, layer], layout.columns[net, layer - 1], layout.weights[net, layer]
            d = deltas[:, column : column + n]
            for r in range(padded):
                through_activation(deltas[r, column : column + n], activations[r, column : column + n], layout.kind)
            sum_rows(ones, every, 0, padded, d, bias_out, bias_out)
            add_product(x[:padded].T, d[:padded], k, w_out)
            back = transposed[at : at + k * n].reshape((n, k))
            set_product(d, back, zeros[:k], padded, deltas[:, below : below + k])


@njit_inner
def backward_block(
    flat: Float32Array, layout: Layout, lists: Lists, order: Int64Array, dense: bool, seen: Float32Array,
    activations: Float32Array, deltas: Float32Array, transposed: Float32Array, constants: Constants,
    gradient: Float32Array,
) -> None:  # fmt: skip
    """Gradients of all hidden layers for `order`; `deltas` of `backward_hidden`, `seen` of `forward_block`."""
    backward_hidden(flat, layout, len(order), activations, deltas, transposed, constants, gradient)
    _, ones, every = constants
    inputs, width, at = layout.inputs, layout.first_width, layout.first_weights
    w_out = gradient[at : at + inputs * width].reshape((inputs, width))
    for r in range(len(order)):
        through_activation(deltas[r, :width], activations[r, :width], layout.kind)
    if dense:
        padded, tiled = padded_rows(len(order)), inputs // TILE_ROWS * TILE_ROWS
        add_product(seen[:, :padded], deltas[:padded, :width], tiled, w_out)
        for c in range(tiled, inputs):
            sum_rows(seen[c], every, 0, len(order), deltas[:, :width], w_out[c], w_out[c])
    else:
        sparse_backward(lists, order, deltas, w_out)
    bias_out = gradient[layout.first_biases : layout.first_biases + width]
    sum_rows(ones, every, 0, len(order), deltas[:, :width], bias_out, bias_out)


@njit_inline
def head_of_net(net: int, outputs: int, flat: Float32Array, layout: Layout) -> tuple[Float32Array, Float32Array]:
    """Views of a head's weights (outputs, k) and biases (outputs,) among the parameters or gradients (P,)."""
    depth = layout.depth[net]
    k, at, bias_at = layout.sizes[net, depth - 1], layout.weights[net, depth], layout.biases[net, depth]
    return flat[at : at + outputs * k].reshape((outputs, k)), flat[bias_at : bias_at + outputs]


@njit_inline
def last_of_net(net: int, layout: Layout, activations: Float32Array) -> Float32Array:
    """A view (BLOCK, k) of a head's inputs in `activations`, or of their gradients if `deltas` are passed."""
    last = layout.depth[net] - 1
    column = layout.columns[net, last]
    return activations[:, column : column + layout.sizes[net, last]]


@njit_inner
def head_logits(h: Float32Array, w: Float32Array, bias: Float32Array, legal: Int32Array, logits: Float32Array) -> None:
    """Write the logits of the m legal actions into `logits` (≥m,), from the last activations h (k,)."""
    dot_rows(w, legal, 0, len(legal), h, len(h), logits)
    for m in range(len(legal)):
        logits[m] += bias[legal[m]]


@njit_inner
def softmax(probs: Float32Array, begin: int, end: int) -> Any:
    """Replace the logits in row 1 of probs (2, m), from `begin` to `end`, by log-probabilities. Write probabilities
    into row 0. Returns the entropy, float32."""
    highest = np.float32(-np.inf)
    for m in range(begin, end):
        highest = max(highest, probs[1, m])
    total = np.float32(0)
    for m in range(begin, end):
        probs[0, m] = np.exp(probs[1, m] - highest)
        total += probs[0, m]
    log_total, scale = highest + np.log(total), np.float32(1) / total
    entropy = np.float32(0)
    for m in range(begin, end):
        probs[0, m] *= scale
        probs[1, m] -= log_total
        entropy -= probs[0, m] * probs[1, m]
    return entropy


@njit_inner
def transpose_hidden(flat: Float32Array, layout: Layout, transposed: Float32Array) -> None:
    """Write hidden weights as (outputs, inputs), for the gradients of a layer's inputs."""
    for net in (POLICY, VALUE):
        for layer in range(1, layout.depth[net]):
            k, n = layout.sizes[net, layer - 1], layout.sizes[net, layer]
            at = layout.weights[net, layer]
            for c in range(0, k, LANES):
                for j in range(0, n, LANES):
                    transpose_tile(flat, at + c * n + j, n, transposed, at + j * k + c, k)


@njit_inner
def join(outputs: Float32Array, dims: Int64Array) -> None:
    """Turn the advantages a (A,) in `outputs` into Q-values: v + a - mean(a) in each sub-action; `outputs[A]` is v.

    Wang et al. 2016, eq. 9; several sub-actions share the value (Tavakoli et al. 2018, eq. 1).
    """
    value, begin = outputs[dims.sum()], 0
    for choices in dims:
        total = np.float32(0)
        for a in range(begin, begin + choices):
            total += outputs[a]
        shift = value - total / np.float32(choices)
        for a in range(begin, begin + choices):
            outputs[a] += shift
        begin += choices


@njit_inner
def greedy_of(q_values: Float32Array, mask: BoolArray, begin: int, choices: int) -> int:
    """The first legal choice with the highest value in the sub-action from column `begin`; -1: no choice is legal.

    mask is (A,), or (0,) if all choices are legal. If the first legal value is NaN, its choice is returned, because
    comparisons with NaN are False. Then the caller finds the NaN.
    """
    best = -1
    for a in range(choices):
        legal = len(mask) == 0 or mask[begin + a]
        if legal and (best < 0 or q_values[begin + a] > q_values[begin + best]):
            best = a
    return best


@njit_inner
def greedy_row(q_values: Float32Array, mask: BoolArray, dims: Int64Array, chosen: Int64Array) -> None:
    """Write `greedy_of` of every sub-action into `chosen` (K,)."""
    begin = 0
    for k in range(len(dims)):
        chosen[k] = greedy_of(q_values, mask, begin, dims[k])
        begin += dims[k]


@njit_inner
def value_of(q_values: Float32Array, chosen: Int64Array, dims: Int64Array) -> float:
    """Mean of the values of the chosen sub-actions; the value is 0 for a sub-action without a legal choice."""
    total, begin = np.float32(0), 0
    for k in range(len(dims)):
        if chosen[k] >= 0:
            total += q_values[begin + chosen[k]]
        begin += dims[k]
    mean: float = total / np.float32(len(dims))
    return mean


@njit_inner
def add_slope(
    slope: float, action: int, begin: int, choices: int, dueling: bool, delta: Float32Array, value: int
) -> None:
    """Add one row's gradient of the head's outputs to `delta`. `slope`: dloss ÷ d(value of one sub-action).

    `begin` is the sub-action's first column, `value` the column of the dueling value.
    """
    if dueling:
        for a in range(begin, begin + choices):
            delta[a] -= slope / np.float32(choices)
        delta[value] += slope
    delta[begin + action] += slope
