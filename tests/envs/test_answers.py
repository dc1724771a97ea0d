"""What an env may answer where Stable-Baselines3 is patient."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.answers import as_reward, first_info, last_observation
from fasttrain.errors import EnvError

BOX = spaces.Box(0, 9, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 4, 1), np.uint8)


@pytest.mark.parametrize(
    "reward", [1, 1.0, True, np.float32(1), np.array(1), np.array([[1.0]]), Decimal(1), Fraction(1), np.True_]
)
def test_any_number_is_a_reward(reward: Any):
    assert as_reward(reward) == 1.0
    assert type(as_reward(reward)) is float


@pytest.mark.parametrize("reward", ["1.5", np.str_("1"), b"1", None, [1.0], np.zeros(2), 1j, 10**400, np.array("1")])
def test_what_is_no_number_is_named(reward: Any):
    with pytest.raises(EnvError, match=f"the reward .*, a {type(reward).__name__}; return a number"):
        as_reward(reward)


@pytest.mark.parametrize(
    ("answer", "info"),
    [((0, {}), {}), ((0, None), {}), ([0, OrderedDict(a=1)], {"a": 1}), ((0, 3), None), (0, None), ((0,), None)],
)
def test_a_reset_may_give_no_info(answer: Any, info: Any):
    assert first_info(answer) == info


@pytest.mark.parametrize("space", [BOX, IMAGE, spaces.Discrete(3), spaces.Dict({"x": BOX, "y": spaces.MultiBinary(2)})])
@pytest.mark.parametrize("seen", [None, np.zeros(2), [], [[1], [2, 3]], {"x": None}, {}, "over", [object()]])
def test_only_a_truncated_episode_needs_its_last_observation(space: spaces.Space[Any], seen: Any):
    found = last_observation(space, seen, terminated=True)
    assert space.contains(found if isinstance(space, spaces.Dict) else space.dtype.type(found))  # type: ignore[union-attr]
    with pytest.raises(EnvError, match="the last observation.* of the episode .*; the episode was truncated"):
        last_observation(space, seen, terminated=False)


def test_one_that_fits_stays_what_it_is():
    for seen in (np.ones(3), [1, 2, 3], np.array([1, 2, 3])):
        assert last_observation(BOX, seen, False) is seen


def test_numbers_that_are_not_finite_fit_where_nobody_looks_for_them():
    seen = np.full(3, np.nan)
    assert last_observation(BOX, seen, False, finite=False) is seen
    assert not last_observation(BOX, seen, True).any()
