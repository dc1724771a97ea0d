"""Where the parameters of a policy stand in the flat vectors of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.dqn.policies import QNetwork
from torch import Tensor, nn

from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.q_networks import BranchingQNetwork, DuelingQNetwork
from fasttrain.batch import Int64Array
from fasttrain.kernels.dense import RELU, TANH
from fasttrain.kernels.nets import Layout
from fasttrain.kernels.simd import PAD

KINDS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}


def keys_of(extractor: Any) -> tuple[str, ...]:
    """The keys of a Dict in the order in which the features have them; none for a plain observation."""
    return tuple(extractor.extractors) if isinstance(extractor, CombinedExtractor) else ()


class Place(NamedTuple):
    """One parameter's place: a grid (rows, width) from `at` on, in which it begins at `column`."""

    parameter: Tensor
    at: int
    rows: int
    width: int
    column: int = 0
    transposed: bool = False  # stored (inputs, outputs)

    def of(self, flat: Tensor) -> Tensor:
        """The part of `flat` (P,) that is this parameter's, in its shape."""
        grid = flat[self.at : self.at + self.rows * self.width].view(self.rows, self.width)
        if self.parameter.dim() == 1:
            return grid[0, self.column : self.column + len(self.parameter)]
        outputs, inputs = self.parameter.shape
        if self.transposed:
            return grid[:inputs, self.column : self.column + outputs].t()
        return grid[:outputs, :inputs]


def padded(width: int) -> int:
    """The next multiple of `PAD`."""
    return (width + PAD - 1) // PAD * PAD


def make_layout(policy: Any) -> tuple[Layout, list[Place], int, int]:
    """Layout and places of a policy that the kernels can serve; length P of the flat vectors, and S, the
    floats in a row of activations."""
    extractor = policy.mlp_extractor
    nets = [[*net[0::2]] for net in (extractor.policy_net, extractor.value_net)]
    inputs, widths = nets[0][0].in_features, [padded(net[0].out_features) for net in nets]
    first_width, places = sum(widths), list[Place]()
    first_biases = inputs * first_width
    for row, net in enumerate(nets):
        places += [
            Place(net[0].weight, 0, inputs, first_width, row * widths[0], transposed=True),
            Place(net[0].bias, first_biases, 1, first_width, row * widths[0]),
        ]
    return lay_out(policy, inputs, widths, [net[1:] for net in nets], places, first_biases + first_width)


def lay_out(
    policy: Any, inputs: int, widths: list[int], nets: list[list[Any]], places: list[Place], size: int
) -> tuple[Layout, list[Place], int, int]:
    """What `make_layout` gives, for nets whose first hidden layers have their places in the flat vectors already.

    Args:
        widths: of the first hidden layers, which are an MLP's or the outputs of LSTMs.
        nets: the linear layers behind those, of the policy net and of the value net, without the heads.
        places: of the parameters up to the first hidden layers, within the first `size` floats; the others are added.
    """
    depth = np.array([len(net) + 1 for net in nets], np.int64)
    shape = (2, int(depth.max()) + 1)
    sizes, columns, weights, biases = (np.zeros(shape, np.int64) for _ in range(4))
    first_width = across = sum(widths)
    first_biases = inputs * first_width
    for row, net in enumerate(nets):
        sizes[row, 0], columns[row, 0] = widths[row], row * widths[0]
        for index, linear in enumerate(net, start=1):
            k, n = sizes[row, index - 1], padded(linear.out_features)
            sizes[row, index], columns[row, index] = n, across
            weights[row, index], biases[row, index] = size, size + k * n
            places += [
                Place(linear.weight, size, int(k), n, transposed=True),
                Place(linear.bias, size + int(k) * n, 1, n),
            ]
            size, across = size + int(k) * n + n, across + n
        head, k = (policy.action_net, policy.value_net)[row], int(sizes[row, len(net)])
        outputs, at_bias = head.out_features, size + head.out_features * k
        weights[row, len(net) + 1], biases[row, len(net) + 1] = size, at_bias
        places += [Place(head.weight, size, outputs, k), Place(head.bias, at_bias, 1, padded(outputs))]
        size = at_bias + padded(outputs)
    log_std, space = -1, policy.action_space
    if continuous := isinstance(space, spaces.Box):
        log_std, outputs = size, policy.action_net.out_features
        places.append(Place(policy.log_std, size, 1, padded(outputs)))
        size += padded(outputs)
    dims = np.array([policy.action_net.out_features] if continuous else action_dims(space), np.int64)
    activations = [*policy.mlp_extractor.policy_net[1:2], *policy.mlp_extractor.value_net[1:2]]
    kind = KINDS[type(activations[0])] if activations else TANH
    layout = Layout(inputs, first_width, 0, first_biases, depth, sizes, columns, weights, biases, dims, kind,
                    log_std)  # fmt: skip
    return layout, places, size, across + PAD  # rows that begin at multiples of 4 KiB would share few cache sets


def make_q_layout(net: QNetwork) -> tuple[Layout, int, int]:
    """Layout of a net, its head last; F, the floats of its padded layers; S, those of a row of activations."""
    linears, heads = linears_of(net), heads_of(net)
    outputs = [*(linear.out_features for linear in linears), sum(head.out_features for head in heads)]
    inputs, sizes = padded(linears[0].in_features), [padded(width) for width in outputs]
    columns = [sum(sizes[:index]) for index in range(len(sizes))]
    weights, biases, size = list[int](), list[int](), 0
    for k, n in zip([inputs, *sizes], sizes, strict=False):
        weights.append(size)
        biases.append(size + k * n)
        size += k * n + n
    depth = np.array([len(linears)], np.int64)
    dims = np.array(net.dims if isinstance(net, BranchingQNetwork) else [heads[0].out_features], np.int64)
    rows = [np.array([values], np.int64) for values in (sizes, columns, weights, biases)]
    kind = KINDS[type(activations_of(net)[0])]
    layout = Layout(inputs, sizes[0], 0, biases[0], depth, rows[0], rows[1], rows[2], rows[3], dims, kind)
    return layout, size, sum(sizes) + PAD  # rows that begin at multiples of 4 KiB would share few cache sets


def make_pieces(net: QNetwork, layout: Layout) -> Int64Array:
    """Where the parameters of `net` stand, in their order; see `kernels/q.py`."""
    linears, heads = linears_of(net), heads_of(net)
    found: dict[int, tuple[int, ...]] = {}
    for index, linear in enumerate([*linears, *heads]):
        layer = min(index, len(linears))  # the heads are one layer
        column = heads[0].out_features if linear is not heads[0] and layer == len(linears) else 0
        n, at, bias_at = (int(row[0, layer]) for row in (layout.sizes, layout.weights, layout.biases))
        k, outputs, inputs = (bias_at - at) // n, linear.out_features, linear.in_features
        found[id(linear.weight)] = (outputs, inputs, at + column, n, at + column * k, k)
        found[id(linear.bias)] = (1, outputs, bias_at + column, 1, bias_at + column, n)
    pieces = [found[id(parameter)] for parameter in net.parameters()]
    starts = np.cumsum([0, *(outputs * inputs for outputs, inputs, *_ in pieces)])
    return np.array([(start, *piece) for start, piece in zip(starts, pieces, strict=False)], np.int64)


def linears_of(net: QNetwork) -> list[Any]:
    """The hidden linear layers."""
    return [*net.q_net][: None if isinstance(net, DuelingQNetwork) else -1 : 2]


def activations_of(net: QNetwork) -> list[nn.Module]:
    return [*net.q_net][1::2]


def heads_of(net: QNetwork) -> list[Any]:
    """Linear layers whose outputs stand side by side: Q-values, or advantages and the value."""
    return [net.advantage_net, net.value_net] if isinstance(net, DuelingQNetwork) else [net.q_net[-1]]


def shapes_of(net: QNetwork) -> list[torch.Size]:
    return [parameter.shape for parameter in net.parameters()]
