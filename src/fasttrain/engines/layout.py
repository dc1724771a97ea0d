"""Where the parameters of a stock SB3 policy stand in the kernels' flat vectors, and transitions in their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor
from torch import Tensor, nn

from fasttrain.batch import BoolArray, Int64Array, joined
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.heads import action_dims
from fasttrain.kernels.dense import RELU, TANH
from fasttrain.kernels.nets import Layout, Rows, compress, empty_lists
from fasttrain.kernels.simd import PAD

KINDS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}


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


def why_no_vectors(extractor: nn.Module, space: spaces.Space[Any]) -> str:
    """Empty if the features are the observation itself, flat: a float32 Box, or a Dict of vectors; else why not."""
    if isinstance(space, spaces.Dict):
        parts = dict(extractor.extractors.items()) if type(extractor) is CombinedExtractor else {}
        vectors = all(isinstance(part, spaces.MultiBinary | spaces.Box) for part in space.values())
        same = list(parts) == list(space.spaces) and all(type(part) is nn.Flatten for part in parts.values())
        return "" if vectors and same else "not a Dict of vectors"
    if type(extractor) is not FlattenExtractor or not isinstance(space, spaces.Box):
        return "not a flat Box observation"
    return "" if space.dtype == np.float32 else "observations are not float32"


def keys_of(extractor: Any) -> tuple[str, ...]:
    """The keys of a Dict in the order in which the features have them; none for a plain observation."""
    return tuple(extractor.extractors) if isinstance(extractor, CombinedExtractor) else ()


def padded(width: int) -> int:
    """The next multiple of `PAD`."""
    return (width + PAD - 1) // PAD * PAD


def make_layout(policy: Any) -> tuple[Layout, list[Place], int, int]:
    """Layout and places of a policy that the kernels can serve; length P of the flat vectors, and S, the
    floats in a row of activations."""
    extractor = policy.mlp_extractor
    nets = [[*net[0::2]] for net in (extractor.policy_net, extractor.value_net)]
    depth = np.array([len(net) for net in nets], np.int64)
    shape = (2, int(depth.max()) + 1)
    sizes, columns, weights, biases = (np.zeros(shape, np.int64) for _ in range(4))
    inputs, widths = nets[0][0].in_features, [padded(net[0].out_features) for net in nets]
    first_width, places = sum(widths), list[Place]()
    first_biases = inputs * first_width
    size, across = first_biases + first_width, first_width
    for row, net in enumerate(nets):
        sizes[row, 0], columns[row, 0] = widths[row], row * widths[0]
        places += [
            Place(net[0].weight, 0, inputs, first_width, row * widths[0], transposed=True),
            Place(net[0].bias, first_biases, 1, first_width, row * widths[0]),
        ]
        for index, linear in enumerate(net[1:], start=1):
            k, n = sizes[row, index - 1], padded(linear.out_features)
            sizes[row, index], columns[row, index] = n, across
            weights[row, index], biases[row, index] = size, size + k * n
            places += [
                Place(linear.weight, size, int(k), n, transposed=True),
                Place(linear.bias, size + int(k) * n, 1, n),
            ]
            size, across = size + int(k) * n + n, across + n
        head, k = (policy.action_net, policy.value_net)[row], int(sizes[row, len(net) - 1])
        outputs, at_bias = head.out_features, size + head.out_features * k
        weights[row, len(net)], biases[row, len(net)] = size, at_bias
        places += [Place(head.weight, size, outputs, k), Place(head.bias, at_bias, 1, padded(outputs))]
        size = at_bias + padded(outputs)
    dims = np.array(action_dims(policy.action_space), np.int64)
    kind = KINDS[type(extractor.policy_net[1])]
    layout = Layout(inputs, first_width, 0, first_biases, depth, sizes, columns, weights, biases, dims, kind)
    return layout, places, size, across + PAD  # rows that begin at multiples of 4 KiB would share few cache sets


def _rows_of(observations: NDArray[Any], masks: BoolArray | None, dims: Int64Array, scalars: Any = None) -> Rows:
    if masks is None:
        masks = np.ones((1, int(dims.sum())), np.bool_).repeat(len(observations), 0)
    none = np.zeros(0, np.float32)
    scalars = (np.zeros((0, len(dims)), np.int64), none, none, none, none) if scalars is None else scalars
    lists = empty_lists(len(observations), observations.shape[1], masks.shape[1])
    compress(np.ascontiguousarray(observations, np.float32), np.ascontiguousarray(masks), lists)
    return Rows(*lists, *scalars)


def rows_of_storage(storage: RolloutStorage, dims: Int64Array, keys: tuple[str, ...] = ()) -> Rows:
    """All T × N transitions, in the order they are stored in."""
    total = storage.num_steps * storage.num_envs
    masks = storage.masks
    stored: Any = storage.observations
    parts = {key: stored[key].reshape(total, -1) for key in keys}
    observations = joined(parts or stored.reshape(total, -1))
    masks = None if masks is None else masks.reshape(total, -1)
    return _rows_of(observations, masks, dims, scalars_of(storage))


def scalars_of(storage: RolloutStorage) -> tuple[Any, ...]:
    """`Rows.actions` and what follows."""
    actions = np.asarray(storage.actions, np.int64).reshape(storage.num_steps * storage.num_envs, -1)
    scalars = (storage.values, storage.log_probs, storage.advantages, storage.returns)
    return actions, *(array.reshape(-1) for array in scalars)
