from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.accelerators.layout import make_layout, padded
from fasttrain.kernels.simd import PAD


def test_padding():
    assert [padded(width) for width in (1, PAD, PAD + 1)] == [PAD, PAD, 2 * PAD]


@pytest.mark.parametrize("arch", [[64, 64], {"pi": [5], "vf": [20, 33, 7]}, [16]])
@pytest.mark.parametrize("action", [spaces.Discrete(3), spaces.MultiDiscrete([4, 13])])
def test_every_parameter_has_a_place_of_its_own(arch: Any, action: Any):
    box = spaces.Box(-1.0, 1.0, (7,), np.float32)
    policy = ActorCriticPolicy(box, action, lambda _: 1e-3, net_arch=arch)
    layout, places, size, row_size = make_layout(policy)
    assert {id(place.parameter) for place in places} == {id(parameter) for parameter in policy.parameters()}
    counts = torch.zeros(size)
    for place in places:
        assert place.of(counts).shape == place.parameter.shape
        place.of(counts)[...] += 1.0
        assert place.at % PAD == 0, "rows begin with a cache line"
    assert counts.max() == 1.0
    assert counts.sum() == sum(parameter.numel() for parameter in policy.parameters())
    assert (layout.sizes % PAD == 0).all()
    ends = layout.columns + layout.sizes
    assert ends.max() <= row_size
    assert layout.dims.tolist() == ([3] if isinstance(action, spaces.Discrete) else [4, 13])
    assert layout.columns[1, 0] == layout.sizes[0, 0], "the first layers stand side by side"
    assert layout.first_width == layout.sizes[:, 0].sum()


def test_values_arrive_where_the_kernels_read_them():
    box = spaces.Box(-1.0, 1.0, (3,), np.float32)
    policy = ActorCriticPolicy(box, spaces.Discrete(2), lambda _: 1e-3, net_arch=[4, 5])
    layout, places, size, _ = make_layout(policy)
    flat = torch.zeros(size)
    for place in places:
        place.of(flat).copy_(place.parameter.detach())
    first = flat[: 3 * layout.first_width].view(3, layout.first_width).detach()
    extractor = policy.mlp_extractor
    torch.testing.assert_close(first[:, :4], extractor.policy_net[0].weight.t().detach())
    torch.testing.assert_close(first[:, PAD : PAD + 4], extractor.value_net[0].weight.t().detach())
    at = int(layout.weights[1, 1])
    second = flat[at : at + PAD * PAD].view(PAD, PAD)
    torch.testing.assert_close(second[:4, :5], extractor.value_net[2].weight.t().detach())
    head = flat[int(layout.weights[0, 2]) :][: 2 * PAD].view(2, PAD)
    torch.testing.assert_close(head[:, :5], policy.action_net.weight.detach())
