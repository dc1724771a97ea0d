from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.policies import ActorCriticPolicy

from compiled import from_python
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.batch import Float32Array
from fasttrain.kernels.nets import (
    POLICY,
    VALUE,
    compress,
    count_nonzero,
    empty_lists,
    forward_block,
    head_logits,
    head_of_net,
    last_of_net,
    layer_of,
    padded_rows,
    softmax,
    transpose_hidden,
    where_nonzero,
)
from fasttrain.threads import run

count_nonzero = from_python(count_nonzero)
forward_block = from_python(forward_block)
head_logits = from_python(head_logits)
padded_rows = from_python(padded_rows)
softmax = from_python(softmax)
transpose_hidden = from_python(transpose_hidden)
where_nonzero = from_python(where_nonzero)


@given(
    st.sampled_from([0, 1, 6, 300]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**16), st.integers(1, 2)
)
@settings(max_examples=40)
def test_compress_keeps_what_counts(count: int, inputs: int, actions: int, seed: int, threads: int):
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((count, inputs)).astype(np.float32)
    observations[rng.random(observations.shape) < 0.6] = 0.0
    masks = rng.random((count, actions)) < 0.5
    lists = empty_lists(count, inputs, actions)
    run(compress, threads, observations, masks, lists)
    values, columns, starts, legal, legal_starts = lists
    for i in range(count):
        part = slice(starts[i], starts[i + 1])
        np.testing.assert_array_equal(columns[part], np.flatnonzero(observations[i]))
        np.testing.assert_array_equal(values[part], observations[i][columns[part]])
        np.testing.assert_array_equal(legal[legal_starts[i] : legal_starts[i + 1]], np.flatnonzero(masks[i]))


def test_places_of_what_is_not_zero():
    row = np.zeros(37, np.float32)
    row[[0, 15, 16, 31, 36]] = -1.0  # both ends of a group, and the remainder after the last one
    places = np.zeros(5, np.int32)
    assert count_nonzero(row) == 5
    where_nonzero(row, places)
    assert places.tolist() == [0, 15, 16, 31, 36]


def test_nan_is_an_input_that_counts():
    lists = empty_lists(1, 3, 1)
    run(compress, 1, np.array([[0.0, np.nan, 0.0]], np.float32), np.ones((1, 1), np.bool_), lists)
    assert lists.starts.tolist() == [0, 1]
    assert np.isnan(lists.values[0])
    assert lists.columns[0] == 1


def kernels_of(arch: Any) -> KernelEngine:
    torch.manual_seed(0)
    box = spaces.Box(-9.0, 9.0, (7,), np.float32)
    kernels = KernelEngine(ActorCriticPolicy(box, spaces.Discrete(5), lambda _: 1e-3, net_arch=arch), EngineSettings())
    kernels.pack()
    return kernels


def rows_of(observations: Float32Array, kernels: KernelEngine) -> Any:
    count, width = len(observations), int(kernels.layout.dims.sum())
    lists = empty_lists(count, observations.shape[1], width)
    run(compress, 1, observations, np.ones((count, width), np.bool_), lists)
    return lists


def test_forward_equals_the_policys_own_layers():
    kernels = kernels_of({"pi": [6, 5, 19], "vf": [3]})
    observations = np.random.default_rng(1).standard_normal((29, 7)).astype(np.float32)
    rows, order = rows_of(observations, kernels), np.arange(29)
    activations = np.full((32, kernels._row_size), np.nan, np.float32)
    forward_block(kernels.parameters.numpy(), kernels.layout, rows, order, activations)
    extractor = kernels.policy.mlp_extractor
    for net, module, width in ((POLICY, extractor.policy_net, 19), (VALUE, extractor.value_net, 3)):
        last = last_of_net(net, kernels.layout, activations)
        with torch.no_grad():
            expected = module(torch.from_numpy(observations)).numpy()
        np.testing.assert_allclose(last[:29, :width], expected, atol=1e-5)
        np.testing.assert_array_equal(last[:29, width:], 0.0, err_msg="padding stays zero")


def test_rows_are_padded_to_whole_tiles():
    assert [padded_rows(count) for count in (1, 8, 9, 32)] == [8, 8, 16, 32]


def test_softmax_by_hand():
    kernels = kernels_of([4])
    w, bias = head_of_net(POLICY, 5, kernels.parameters.numpy().copy(), kernels.layout)
    w[:], bias[:] = 0.0, np.log([1.0, 2.0, 4.0, 8.0, 16.0])
    probs = np.full((2, 5), np.nan, np.float32)
    legal = np.array([1, 3, 4], np.int32)  # weights 2, 8, 16
    head_logits(np.zeros(w.shape[1], np.float32), w, bias, legal, probs[1])
    np.testing.assert_allclose(probs[1, :3], np.log([2.0, 8.0, 16.0]), rtol=1e-6)
    entropy = softmax(probs, 1, 3)  # of a sub-action that begins at the second
    expected = np.array([8, 16]) / 24
    np.testing.assert_allclose(probs[0, 1:3], expected, rtol=1e-6)
    np.testing.assert_allclose(probs[1, 1:3], np.log(expected), rtol=1e-5)
    np.testing.assert_allclose(entropy, -(expected * np.log(expected)).sum(), rtol=1e-5)
    assert np.isnan(probs[0, 0])


def test_hidden_weights_are_transposed_in_place_of_their_own():
    kernels = kernels_of([6, 5])
    flat = kernels.parameters.numpy()
    transposed = np.zeros_like(flat)
    transpose_hidden(flat, kernels.layout, transposed)
    k, n = kernels.layout.sizes[VALUE, :2]
    at = kernels.layout.weights[VALUE, 1]
    _, w, _ = layer_of(VALUE, 1, flat, kernels.layout, np.zeros((8, kernels._row_size), np.float32))
    back = transposed[at : at + k * n].reshape(n, k)
    np.testing.assert_array_equal(back, w.T)
    np.testing.assert_array_equal(back[:5, :6], kernels.policy.mlp_extractor.value_net[2].weight.detach().numpy())
