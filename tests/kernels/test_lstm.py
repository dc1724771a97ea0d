"""The LSTM kernels against torch's own LSTM on packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from compiled import from_python
from fasttrain_kernels.lstm import lstm_backward, lstm_forward
from fasttrain_kernels.simd import TILE_ROWS

forward, backward = from_python(lstm_forward), from_python(lstm_backward)


@pytest.mark.parametrize("lengths", [[1], [9] * 8, [30, 17, 17, 9, 8, 3, 2, 1, 1, 1, 1]])
def test_hidden_states_and_gradients_are_torchs(lengths: list[int]):
    torch.manual_seed(3)
    units, rows, count = 32, sum(lengths), len(lengths)
    lstm = torch.nn.LSTM(5, units)
    sizes = np.array([sum(length > step for length in lengths) for step in range(lengths[0])])
    inputs = torch.randn(rows, 5, requires_grad=True)
    states: Any = torch.randn(1, count, units), torch.randn(1, count, units)
    expected = lstm(PackedSequence(inputs, torch.from_numpy(sizes)), states)[0].data
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [inputs, *lstm.parameters()])

    w_ih, w_hh, b_ih, b_hh = (parameter.detach() for parameter in lstm.parameters())
    gates = torch.addmm(b_ih + b_hh, inputs.detach(), w_ih.t()).numpy()
    h0, c0 = (state[0].numpy() for state in states)
    working = -(-count // TILE_ROWS) * TILE_ROWS
    zeros = lambda width: np.zeros((working, width), np.float32)  # noqa: E731
    befores, cells, squashed, hidden = (np.zeros((rows, units), np.float32) for _ in range(4))
    forward(gates, w_hh.t().contiguous().numpy(), h0, c0, sizes, befores, cells, squashed, hidden, zeros(units),
            zeros(4 * units))  # fmt: skip
    assert np.abs(hidden - expected.detach().numpy()).max() < 1e-6
    d_gates = np.zeros_like(gates)
    backward(weights.numpy().copy(), gates, w_hh.numpy(), c0, sizes, cells, squashed, d_gates, zeros(units),
             zeros(units), zeros(4 * units), np.zeros(units, np.float32))  # fmt: skip
    d_bias = d_gates.sum(0)
    given = (d_gates @ w_ih.numpy(), d_gates.T @ inputs.detach().numpy(), d_gates.T @ befores, d_bias, d_bias)
    for ours, theirs in zip(given, wanted, strict=True):
        assert np.abs(ours - theirs.numpy()).max() < 3e-6 * max(1.0, float(theirs.abs().max()))
