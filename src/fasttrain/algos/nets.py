"""Policy and value MLP of one flat parameter vector, on blocks of rows: forward, backward, masked softmax.

The kernels under `fused.py`. Only non-zero inputs enter the first layer and only legal actions enter the softmax: in
Skull King 37 of 248 inputs and 4 of 86 actions, which saves most of the work of the widest layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fasttrain.algos.dense import (
    activate,
    add_outer,
    add_sparse_outer,
    dot,
    matmul_bt,
    sparse_row_times,
    through_activation,
)
from fasttrain.batch import BoolArray, Float32Array, Int32Array, Int64Array
from fasttrain.jit import njit_relaxed

BLOCK = 32  # rows that go through the nets together: their activations stay in the L1 and L2 caches
POLICY, VALUE = 0, 1


class Layout(NamedTuple):
    """Where the layers of the policy net (row 0) and the value net (row 1) lie in the flat parameter vector (P,).

    A hidden layer's weights are (outputs, inputs) as in torch, but the first layer's are (inputs, outputs); the head
    stands at index `depth`.
    """

    depth: Int64Array  # (2,) hidden layers, at least 1
    sizes: Int64Array  # (2, D + 1) width of the input and of every hidden layer
    weights: Int64Array  # (2, D + 1) offsets
    biases: Int64Array  # (2, D + 1) offsets
    num_actions: int
    kind: int  # dense.TANH or dense.RELU


class Rows(NamedTuple):
    """M transitions. Observations and masks as lists of what counts: row i has `columns[starts[i]:starts[i + 1]]`."""

    values: Float32Array  # non-zero inputs
    columns: Int32Array
    starts: Int64Array  # (M + 1,)
    legal: Int32Array  # legal actions
    legal_starts: Int64Array  # (M + 1,)
    actions: Int64Array  # (M,)
    old_values: Float32Array  # (M,)
    old_log_probs: Float32Array  # (M,)
    advantages: Float32Array  # (M,)
    returns: Float32Array  # (M,)


@njit_relaxed
def compress(
    observations: Float32Array, masks: BoolArray
) -> tuple[  # (M, O), (M, A)
    Float32Array, Int32Array, Int64Array, Int32Array, Int64Array
]:
    """`Rows.values, columns, starts, legal, legal_starts` of dense observations and masks."""
    count = len(observations)
    starts, legal_starts = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for i in range(count):
        nonzero, legal = 0, 0
        for value in observations[i]:
            nonzero += value != 0
        for mask in masks[i]:
            legal += mask
        starts[i + 1], legal_starts[i + 1] = starts[i] + nonzero, legal_starts[i] + legal
    values, columns = np.empty(starts[count], np.float32), np.empty(starts[count], np.int32)
    legal_actions = np.empty(legal_starts[count], np.int32)
    for i in range(count):
        at, legal_at = starts[i], legal_starts[i]
        row, mask_row = observations[i], masks[i]
        for column in range(len(row)):
            if row[column] != 0:
                values[at], columns[at] = row[column], column
                at += 1
        for action in range(len(mask_row)):
            if mask_row[action]:
                legal_actions[legal_at] = action
                legal_at += 1
    return values, columns, starts, legal_actions, legal_starts


@njit_relaxed
def forward_block(
    net: int, flat: Float32Array, layout: Layout, rows: Rows, order: Int64Array, activations: Float32Array
) -> None:
    """Hidden activations (D, BLOCK, W) of the rows named by `order` (at most BLOCK)."""
    depth, sizes = layout.depth[net], layout.sizes[net]
    inputs, width = sizes[0], sizes[1]
    at = layout.weights[net, 0]
    w = flat[at : at + inputs * width].reshape((inputs, width))
    bias = flat[layout.biases[net, 0] : layout.biases[net, 0] + width]
    for r in range(BLOCK):
        a = activations[0, r]
        a[:width] = bias
        if r < len(order):
            begin, end = rows.starts[order[r]], rows.starts[order[r] + 1]
            sparse_row_times(rows.values[begin:end], rows.columns[begin:end], w, a)
        activate(a, width, layout.kind)
    for layer in range(1, depth):
        k, n = sizes[layer], sizes[layer + 1]
        at = layout.weights[net, layer]
        matmul_bt(activations[layer - 1], flat[at : at + n * k].reshape((n, k)), BLOCK, activations[layer])
        bias = flat[layout.biases[net, layer] : layout.biases[net, layer] + n]
        for r in range(BLOCK):
            a = activations[layer, r]
            for c in range(n):
                a[c] += bias[c]
            activate(a, n, layout.kind)


@njit_relaxed
def backward_block(
    net: int,
    flat: Float32Array,
    layout: Layout,
    rows: Rows,
    order: Int64Array,
    activations: Float32Array,  # (D, BLOCK, W)
    deltas: Float32Array,  # (2, BLOCK, W): [0] has the gradient of the last activations, zero from len(order) on
    transposed: Float32Array,
    gradient: Float32Array,  # (P,) added to
) -> None:
    """Gradients of all hidden layers of one net."""
    sizes = layout.sizes[net]
    now = 0
    for layer in range(layout.depth[net] - 1, -1, -1):
        k, n = sizes[layer], sizes[layer + 1]
        d = deltas[now]
        bias = gradient[layout.biases[net, layer] : layout.biases[net, layer] + n]
        for r in range(len(order)):
            through_activation(d[r], activations[layer, r], n, layout.kind)
            for c in range(n):
                bias[c] += d[r, c]
        at = layout.weights[net, layer]
        if layer == 0:
            out = gradient[at : at + k * n].reshape((k, n))
            for r in range(len(order)):
                begin, end = rows.starts[order[r]], rows.starts[order[r] + 1]
                add_sparse_outer(rows.values[begin:end], rows.columns[begin:end], d[r], out)
        else:
            add_outer(activations[layer - 1], d, BLOCK, gradient[at : at + n * k].reshape((n, k)))
            matmul_bt(d, transposed[at : at + k * n].reshape((k, n)), BLOCK, deltas[1 - now])
            now = 1 - now


@njit_relaxed
def head_of_net(net: int, outputs: int, flat: Float32Array, layout: Layout) -> tuple[Float32Array, Float32Array]:
    """Views of a head's weights (outputs, k) and biases (outputs,) in a flat vector (P,) of parameters or gradients."""
    depth = layout.depth[net]
    k, at, bias_at = layout.sizes[net, depth], layout.weights[net, depth], layout.biases[net, depth]
    return flat[at : at + outputs * k].reshape((outputs, k)), flat[bias_at : bias_at + outputs]


@njit_relaxed
def masked_softmax(
    h: Float32Array,  # (≥k,) last hidden activations
    w: Float32Array,  # (A, k)
    bias: Float32Array,  # (A,)
    legal: Int32Array,  # (m,) legal actions
    probs: Float32Array,  # (2, ≥m) out: probabilities and log-probabilities
) -> Any:
    """Softmax over the legal actions alone; returns the entropy, float32."""
    k = w.shape[1]
    highest = np.float32(-np.inf)
    for m in range(len(legal)):
        logit = dot(w[legal[m]], h, k) + bias[legal[m]]
        probs[1, m] = logit
        highest = max(highest, logit)
    total = np.float32(0)
    for m in range(len(legal)):
        probs[0, m] = np.exp(probs[1, m] - highest)
        total += probs[0, m]
    log_total = highest + np.log(total)
    entropy = np.float32(0)
    for m in range(len(legal)):
        probs[0, m] /= total
        probs[1, m] -= log_total
        entropy -= probs[0, m] * probs[1, m]
    return entropy


@njit_relaxed
def transpose_hidden(flat: Float32Array, layout: Layout, transposed: Float32Array) -> None:
    """Hidden weights as (inputs, outputs), which the gradient of a layer's inputs wants to read along."""
    for net in (POLICY, VALUE):
        for layer in range(1, layout.depth[net]):
            k, n = layout.sizes[net, layer], layout.sizes[net, layer + 1]
            at = layout.weights[net, layer]
            for j in range(n):
                for c in range(k):
                    transposed[at + c * n + j] = flat[at + j * k + c]
