"""Whether the kernels can stand in for a stock SB3 policy, and where its parameters stand in their flat vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import (
    MaskableBernoulliDistribution,
    MaskableCategoricalDistribution,
    MaskableMultiCategoricalDistribution,
)
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import CategoricalDistribution, MultiCategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import Tensor, nn

from fasttrain.batch import Int64Array
from fasttrain.engines.heads import action_dims, is_unchanged
from fasttrain.engines.q_networks import BranchingQNetwork, DuelingQNetwork
from fasttrain.kernels.dense import RELU, TANH
from fasttrain.kernels.nets import Layout
from fasttrain.kernels.simd import PAD

KINDS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}
_POLICIES = (ActorCriticPolicy, MaskableActorCriticPolicy)
DISTRIBUTIONS = (
    CategoricalDistribution,
    MultiCategoricalDistribution,
    MaskableCategoricalDistribution,
    MaskableMultiCategoricalDistribution,
    MaskableBernoulliDistribution,
)
_NETWORKS = (QNetwork, BranchingQNetwork, DuelingQNetwork)


def why_not(policy: Any) -> str:
    """Empty if the kernels can stand in for `policy` and its optimizer, else what they cannot do."""
    if not _is_plain(policy):
        return "not float32 on the CPU"
    if not is_unchanged(policy) or type(policy.action_dist) not in DISTRIBUTIONS:
        return "not a plain policy with discrete actions"
    stock_features = {base.extract_features for base in _POLICIES}
    if type(policy).extract_features not in stock_features or "extract_features" in vars(policy):
        return "the policy extracts features in a way of its own"
    if unfit := why_no_vectors(policy.features_extractor, policy.observation_space):
        return unfit
    return why_not_plain(policy, least=1)


def why_not_q(policy: Any) -> str:
    """Empty if the kernels can stand in for `policy` and its optimizer, else what they cannot do."""
    action_space = policy.action_space
    nets = (policy.q_net, policy.q_net_target)
    if not _is_plain(policy):
        return "not float32 on the CPU"
    if not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete)):
        return "neither Discrete nor MultiDiscrete actions"
    if action_space.dtype != np.int64:
        return "actions are not int64"
    if type(policy)._predict is not DQNPolicy._predict or "_predict" in vars(policy):
        return "the policy chooses actions in a way of its own"
    if type(nets[0]) not in _NETWORKS or any(type(net) is not type(nets[0]) or _is_changed(net) for net in nets):
        return "not a plain, branching or dueling Q-network"
    if unfit := why_no_vectors(nets[0].features_extractor, policy.observation_space):
        return unfit
    if any(not _is_plain_mlp(net) for net in nets) or shapes_of(nets[0]) != shapes_of(nets[1]):
        return "not an MLP of tanh or relu layers"
    return why_not_optimizer(policy.optimizer, list(policy.q_net.parameters()))


def _is_changed(net: QNetwork) -> bool:
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    return hooked or any(name in vars(net) for name in ("forward", "extract_features"))


def _is_plain_mlp(net: QNetwork) -> bool:
    """Hidden layers with one kind of activation between linear layers."""
    linears, activations = _linears(net), _activations(net)
    return len(activations) == len(linears) > 0 and _is_mlp([*linears, *_heads(net)], activations)


def why_not_plain(policy: Any, least: int) -> str:
    """Empty if hidden layers, `least` or more, and heads are an MLP of SB3's that no hook watches; else what is not."""
    if type(policy.mlp_extractor) is not MlpExtractor:
        return "hidden layers of a class of their own"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for module in policy.modules() for name in hooks):
        return "somebody watches the policy's modules"
    nets: list[Any] = [policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net]
    linears = [policy.action_net, policy.value_net, *(module for net in nets for module in net[0::2])]
    whole = all(len(net) >= 2 * least and len(net) % 2 == 0 for net in nets)
    if not (whole and _is_mlp(linears, [module for net in nets for module in net[1::2]])):
        return "not an MLP of tanh or relu layers"
    return why_not_optimizer(policy.optimizer, list(policy.parameters()))


def why_not_optimizer(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> str:
    if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1:
        return "not a plain Adam"
    (group,) = optimizer.param_groups
    special = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
    if group["weight_decay"] != 0 or any(group.get(name) for name in special):
        return "Adam with options the kernel lacks"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "somebody watches the optimizer's steps"
    frozen = any(not parameter.requires_grad or parameter._backward_hooks for parameter in parameters)
    same = {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in parameters}
    return "" if same and not frozen else "some parameters are frozen or hooked"


def _is_plain(policy: nn.Module) -> bool:
    return all(each.device.type == "cpu" and each.dtype == torch.float32 for each in policy.parameters())


def _is_mlp(linears: list[Any], activations: list[Any]) -> bool:
    """Linear layers with biases, and one kind of activation that the kernels know."""
    kinds = {type(module) for module in activations}
    plain = all(type(module) is nn.Linear and module.bias is not None for module in linears)
    return plain and len(kinds) <= 1 and kinds <= set(KINDS)


def why_no_vectors(extractor: nn.Module, space: spaces.Space[Any]) -> str:
    """Empty if the features are the observation itself, flat: a float32 Box, or a Dict of vectors; else why not."""
    if isinstance(space, spaces.Discrete):
        return f"observations are {space}; kernels would serve a one-hot Box"
    if not isinstance(space, spaces.Dict):
        if type(extractor) is not FlattenExtractor or not isinstance(space, spaces.Box):
            return "not a flat Box observation"
        return "" if space.dtype == np.float32 else f"observations are {space.dtype}; kernels would serve a float32 Box"
    if type(extractor) is not CombinedExtractor or list(extractor.extractors) != list(space.spaces):
        return "the policy extracts features in a way of its own"
    for key, part in space.items():
        if not isinstance(part, spaces.MultiBinary | spaces.Box):
            return f"the observations' key {key!r} is {part}; kernels would serve a one-hot Box"
        if type(extractor.extractors[key]) is not nn.Flatten:
            return f"the observations' key {key!r} is an image"
    return ""


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
    dims = np.array(action_dims(policy.action_space), np.int64)
    activations = [*policy.mlp_extractor.policy_net[1:2], *policy.mlp_extractor.value_net[1:2]]
    kind = KINDS[type(activations[0])] if activations else TANH
    layout = Layout(inputs, first_width, 0, first_biases, depth, sizes, columns, weights, biases, dims, kind)
    return layout, places, size, across + PAD  # rows that begin at multiples of 4 KiB would share few cache sets


def make_q_layout(net: QNetwork) -> tuple[Layout, int, int]:
    """Layout of a net, its head last; F, the floats of its padded layers; S, those of a row of activations."""
    linears, heads = _linears(net), _heads(net)
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
    kind = KINDS[type(_activations(net)[0])]
    layout = Layout(inputs, sizes[0], 0, biases[0], depth, rows[0], rows[1], rows[2], rows[3], dims, kind)
    return layout, size, sum(sizes) + PAD  # rows that begin at multiples of 4 KiB would share few cache sets


def make_pieces(net: QNetwork, layout: Layout) -> Int64Array:
    """Where the parameters of `net` stand, in their order; see `kernels/q.py`."""
    linears, heads = _linears(net), _heads(net)
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


def _linears(net: QNetwork) -> list[Any]:
    """The hidden linear layers."""
    return [*net.q_net][: None if isinstance(net, DuelingQNetwork) else -1 : 2]


def _activations(net: QNetwork) -> list[nn.Module]:
    return [*net.q_net][1::2]


def _heads(net: QNetwork) -> list[Any]:
    """Linear layers whose outputs stand side by side: Q-values, or advantages and the value."""
    return [net.advantage_net, net.value_net] if isinstance(net, DuelingQNetwork) else [net.q_net[-1]]


def shapes_of(net: QNetwork) -> list[torch.Size]:
    return [parameter.shape for parameter in net.parameters()]
