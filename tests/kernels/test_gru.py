"""The kernels of GRU and minGRU against a float64 walk through every sequence, and against steps worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.engines.packed_lstm import kernel_calls, packed
from fasttrain.engines.recurrent_policies import GRU, MinGRU
from fasttrain.kernels.gru import gru_forward, scan_backward, scan_forward


def stepped(cell: Any, inputs: torch.Tensor, before: torch.Tensor, sizes: Any) -> torch.Tensor:
    """Hidden states (B, H) of packed rows by torch's products and nothing else of ours, one step after the other."""
    for layer in range(cell.num_layers):
        h, found, first = before[layer], [], 0
        for size in sizes:
            x, h = inputs[first : first + size], h[:size]
            if isinstance(cell, GRU):
                names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                w, u, b, c = (getattr(cell, f"{name}_l{layer}") for name in names)
                (r, z, n), (hr, hz, hn) = (x @ w.T + b).chunk(3, 1), (h @ u.T + c).chunk(3, 1)
                z, n = torch.sigmoid(z + hz), torch.tanh(n + torch.sigmoid(r + hr) * hn)
                h = (1 - z) * n + z * h
            else:
                z, n = (x @ cell.layers[layer].weight.T + cell.layers[layer].bias).chunk(2, 1)
                h = (1 - torch.sigmoid(z)) * h + torch.sigmoid(z) * n
            found.append(h)
            first += size
        inputs = torch.cat(found)
    return inputs


@pytest.mark.parametrize("kind", [GRU, MinGRU])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [9] * 8, [30, 17, 17, 9, 8, 3, 2, 1, 1, 1, 1], [5, 4, 4, 4, 4, 4, 4, 4, 4]])
def test_hidden_states_and_gradients_are_those_of_a_walk(lengths: list[int], layers: int, kind: Any):
    torch.manual_seed(3)
    cell = kind(5, 32, layers)
    sizes = np.array([sum(length > step for length in lengths) for step in range(lengths[0])])
    inputs, before = torch.randn(sum(lengths), 5, requires_grad=True), torch.randn(layers, len(lengths), 32)
    found = packed(cell, inputs, (before, before[..., :0]), sizes)
    weights = torch.randn_like(found)
    given = torch.autograd.grad((found * weights).sum(), [inputs, *cell.parameters()])
    cell = cell.double()
    exact = inputs.detach().double().requires_grad_()
    expected = stepped(cell, exact, before.double(), sizes)
    assert float((found - expected).detach().abs().max()) < 2e-6
    wanted = torch.autograd.grad((expected * weights).sum(), [exact, *cell.parameters()])
    for ours, theirs in zip(given, wanted, strict=True):
        assert float((ours - theirs).abs().max()) < 3e-6 * max(1.0, float(theirs.abs().max()))


def test_a_step_of_a_gru_worked_out_by_hand():
    units = 16
    gates = np.zeros((1, 3 * units), np.float32)
    gates[0, units : 2 * units], gates[0, 2 * units :] = math.log(3), 0.5  # reset: σ(0) = ½; kept: σ(log 3) = ¾
    w = np.zeros((units, 3 * units), np.float32)
    w[:, 2 * units :] = np.eye(units)
    h0, bias = np.full((1, units), 2.0, np.float32), np.full(units, 0.25, np.float32)
    befores, recalled, hidden = (np.zeros((1, units), np.float32) for _ in range(3))
    working, sums = np.zeros((8, units), np.float32), np.zeros((8, 3 * units), np.float32)
    gru_forward(gates, w, bias, h0, np.array([1]), befores, recalled, hidden, working, sums)
    assert befores == pytest.approx(h0)
    assert recalled == pytest.approx(np.full((1, units), 2.25))
    assert hidden == pytest.approx(np.full((1, units), 0.75 * 2.0 + 0.25 * math.tanh(0.5 + 0.5 * 2.25)), abs=1e-6)


def test_a_scan_worked_out_by_hand():
    """Two sequences, of three steps and of one."""
    kept = np.array([[0.5], [0.25], [0.5], [0.1]], np.float32)
    hidden = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)  # what is added
    befores, sizes = np.zeros((4, 1), np.float32), np.array([2, 1, 1])
    scan_forward(kept, np.array([[2.0], [4.0]], np.float32), sizes, befores, hidden)
    assert hidden[:, 0] == pytest.approx([2.0, 3.0, 4.0, 4.4])
    assert befores[:, 0] == pytest.approx([2.0, 4.0, 2.0, 4.0])
    d_hidden = np.ones((4, 1), np.float32)
    scan_backward(d_hidden, kept, sizes)
    assert d_hidden[:, 0] == pytest.approx([1 + 0.5 * 1.1, 1.0, 1.1, 1.0])


def test_calls_name_the_kernels():
    assert [call.name for call in kernel_calls("gru")] == ["gru_forward", "gru_backward"]
    assert [call.name for call in kernel_calls("mingru")] == ["scan_forward", "scan_backward"]
