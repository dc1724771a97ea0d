from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.accelerators.layout import make_layout
from fasttrain_kernels.simd import PAD


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
