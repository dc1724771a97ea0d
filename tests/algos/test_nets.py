from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.algos.fused_policy import FusedPolicy
from fasttrain.algos.nets import (
    BLOCK,
    POLICY,
    VALUE,
    compress,
    forward_block,
    head_of_net,
    masked_softmax,
    transpose_hidden,
)
from fasttrain.batch import Float32Array


@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_compress_keeps_what_counts(count: int, inputs: int, actions: int, seed: int):
    rng = np.random.default_rng(seed)
    observations = rng.standard_normal((count, inputs)).astype(np.float32)
    observations[rng.random(observations.shape) < 0.6] = 0.0
    masks = rng.random((count, actions)) < 0.5
    values, columns, starts, legal, legal_starts = compress(observations, masks)
    for i in range(count):
        part = slice(starts[i], starts[i + 1])
        np.testing.assert_array_equal(columns[part], np.flatnonzero(observations[i]))
        np.testing.assert_array_equal(values[part], observations[i][columns[part]])
        np.testing.assert_array_equal(legal[legal_starts[i] : legal_starts[i + 1]], np.flatnonzero(masks[i]))


def test_nan_is_an_input_that_counts():
    values, columns, *_ = compress(np.array([[0.0, np.nan, 0.0]], np.float32), np.ones((1, 1), np.bool_))
    assert np.isnan(values).all()
    assert columns.tolist() == [1]


def kernels_of(arch: Any) -> FusedPolicy:
    torch.manual_seed(0)
    box = spaces.Box(-9.0, 9.0, (7,), np.float32)
    kernels = FusedPolicy(ActorCriticPolicy(box, spaces.Discrete(5), lambda _: 1e-3, net_arch=arch))
    kernels.pack()
    return kernels


def rows_of(observations: Float32Array, kernels: FusedPolicy) -> Any:
    from fasttrain.algos.fused_policy import _rows_of

    return _rows_of(observations, None, kernels.layout.num_actions)


def test_forward_equals_the_policys_own_layers():
    kernels = kernels_of({"pi": [6, 5, 9], "vf": [3]})
    observations = np.random.default_rng(1).standard_normal((BLOCK - 3, 7)).astype(np.float32)
    rows, order = rows_of(observations, kernels), np.arange(BLOCK - 3)
    activations = np.full((3, BLOCK, 9), np.nan, np.float32)
    extractor = kernels.policy.mlp_extractor
    for net, module, width, depth in ((POLICY, extractor.policy_net, 9, 3), (VALUE, extractor.value_net, 3, 1)):
        forward_block(net, kernels.parameters.numpy(), kernels.layout, rows, order, activations)
        with torch.no_grad():
            expected = module(torch.from_numpy(observations)).numpy()
        np.testing.assert_allclose(activations[depth - 1, : len(order), :width], expected, atol=1e-5)


def test_masked_softmax_by_hand():
    kernels = kernels_of([4])
    w, bias = head_of_net(POLICY, 5, kernels.parameters.numpy().copy(), kernels.layout)
    w[:], bias[:] = 0.0, np.log([1.0, 2.0, 4.0, 8.0, 16.0])
    probs = np.zeros((2, 5), np.float32)
    legal = np.array([1, 3, 4], np.int32)  # weights 2, 8, 16
    entropy = masked_softmax(np.zeros(4, np.float32), w, bias, legal, probs)
    expected = np.array([2, 8, 16]) / 26
    np.testing.assert_allclose(probs[0, :3], expected, rtol=1e-6)
    np.testing.assert_allclose(probs[1, :3], np.log(expected), rtol=1e-5)
    np.testing.assert_allclose(entropy, -(expected * np.log(expected)).sum(), rtol=1e-5)


def test_hidden_weights_are_transposed_in_place_of_their_own():
    kernels = kernels_of([6, 5])
    flat = kernels.parameters.numpy()
    transposed = np.zeros_like(flat)
    transpose_hidden(flat, kernels.layout, transposed)
    at = kernels.layout.weights[VALUE, 1]
    np.testing.assert_array_equal(
        transposed[at : at + 30].reshape(6, 5), kernels.policy.mlp_extractor.value_net[2].weight.detach().numpy().T
    )
