"""The LSTM kernels against torch's own LSTM on packed sequences, and against a step worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from fasttrain.engines.packed_lstm import kernel_calls, packed
from fasttrain.kernels.lstm import lstm_forward


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [9] * 8, [30, 17, 17, 9, 8, 3, 2, 1, 1, 1, 1], [5, 4, 4, 4, 4, 4, 4, 4, 4]])
def test_hidden_states_and_gradients_are_torchs(lengths: list[int], layers: int):
    torch.manual_seed(3)
    lstm = torch.nn.LSTM(5, 32, num_layers=layers)
    sizes = np.array([sum(length > step for length in lengths) for step in range(lengths[0])])
    inputs = torch.randn(sum(lengths), 5, requires_grad=True)
    states = torch.randn(layers, len(lengths), 32), torch.randn(layers, len(lengths), 32)
    expected = lstm(PackedSequence(inputs, torch.from_numpy(sizes)), states)[0].data
    found = packed(lstm, inputs, states, sizes)
    assert float((found - expected).detach().abs().max()) < 1e-6
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [inputs, *lstm.parameters()])
    given = torch.autograd.grad((found * weights).sum(), [inputs, *lstm.parameters()])
    for ours, theirs in zip(given, wanted, strict=True):
        assert float((ours - theirs).abs().max()) < 3e-6 * max(1.0, float(theirs.abs().max()))


def test_a_step_worked_out_by_hand():
    units = 16
    gates = np.zeros((1, 4 * units), np.float32)
    gates[0, :units], gates[0, units : 2 * units], gates[0, 2 * units : 3 * units] = 0.0, math.log(3), 0.5
    w = np.zeros((units, 4 * units), np.float32)
    w[:, 3 * units :] = np.eye(units) * math.log(3)  # the output gate sees what its own unit had
    h0, c0 = np.ones((1, units), np.float32), np.full((1, units), 2.0, np.float32)
    out = [np.zeros((1, units), np.float32) for _ in range(4)]
    working, sums = np.zeros((8, units), np.float32), np.zeros((8, 4 * units), np.float32)
    lstm_forward(gates, w, h0, c0, np.array([1]), *out, working, sums)
    befores, cells, squashed, hidden = out
    cell = 0.75 * 2.0 + 0.5 * math.tanh(0.5)  # σ(log 3) = ¾, σ(0) = ½
    assert befores == pytest.approx(h0)
    assert cells == pytest.approx(np.full((1, units), cell), abs=1e-6)
    assert squashed == pytest.approx(np.full((1, units), math.tanh(cell)), abs=1e-6)
    assert hidden == pytest.approx(np.full((1, units), 0.75 * math.tanh(cell)), abs=1e-6)


def test_calls_name_the_kernels():
    assert [call.name for call in kernel_calls("lstm")] == ["lstm_forward", "lstm_backward"]
