"""Random actions of a whole vector step, drawn at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from fasttrain.algos.q_collect import random_actions


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 4])], ids=["discrete", "multi"])
@pytest.mark.parametrize("masked", [False, True])
def test_actions_drawn_at_once_are_distributed_as_the_spaces_own(space: Any, masked: bool):
    space.seed(0)
    count, dims = 20_000, [5] if isinstance(space, spaces.Discrete) else [3, 4]
    mask = np.array(
        [True, False, True, True, False] if len(dims) == 1 else [True, True, False, True, False, True, True]
    )
    masks = np.tile(mask, (count, 1)) if masked else None
    tables = []
    for at_once in (True, False):
        drawn = random_actions(space, count, masks, at_once).reshape(count, -1)
        codes = drawn[:, 0] if len(dims) == 1 else drawn[:, 0] * dims[1] + drawn[:, 1]
        tables.append(np.bincount(codes, minlength=int(np.prod(dims))))
    possible = tables[0] + tables[1] > 0
    legal = np.outer(mask[:3], mask[3:]).ravel() if len(dims) == 2 else mask
    np.testing.assert_array_equal(possible, legal if masked else np.ones_like(possible))
    assert stats.chi2_contingency([table[possible] for table in tables]).pvalue > 1e-3


@pytest.mark.parametrize("at_once", [False, True])
def test_a_single_sub_action_takes_masks_too(at_once: bool):
    """`MultiDiscrete.sample` wants a tuple of masks, of one sub-action too."""
    space = spaces.MultiDiscrete([4], seed=0)
    masks = np.array([[False, True, False, False], [False, False, False, True]])
    drawn = random_actions(space, 2, masks, at_once)
    assert drawn.tolist() == [[1], [3]]
