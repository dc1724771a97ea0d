"""Random actions of a whole vector step, drawn at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

import fasttrain
from fasttrain.algos.q_collect import random_actions
from toys import ToyGame


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


def test_ends_are_stored_by_what_ended_them():
    """ToyGame's even envs end by the rules, its odd ones are cut, env 4 is both at once, which counts as the rules."""
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = fasttrain.DQN("MlpPolicy", env, learning_starts=1000, buffer_size=500, seed=0).learn(100)
    storage = model.replay_buffer
    dones, timeouts = storage.dones[:20].astype(bool), storage.timeouts[:20].astype(bool)
    assert dones.any(axis=0).all()
    assert (timeouts[:, [1, 3]] == dones[:, [1, 3]]).all()
    assert not timeouts[:, [0, 2, 4]].any()
    masks = storage.masks_of(np.flatnonzero(dones.reshape(-1)))
    assert masks is None or np.asarray(masks).all(), "of a last state that told none, everything is legal"
