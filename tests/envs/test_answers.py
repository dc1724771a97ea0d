from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.answers import AnswerError, as_reward, check_reset, last_observation, misfits, reset_inner
from fasttrain.errors import EnvError

BOX = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
NESTED = spaces.Dict(near=BOX, far=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))))


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


def test_a_number_that_float32_cannot_hold_is_no_reward():
    with pytest.raises(EnvError, match=r"the reward -1e\+300, which is too large for float32"):
        as_reward(np.float64(-1e300))
    assert (as_reward(3.4e38), as_reward(float("-inf"))) == (3.4e38, float("-inf"))  # nan_guard looks for the latter


@pytest.mark.parametrize("answer", [np.zeros(2), {"a": 1, "b": 2}, (np.zeros(2), [1]), (np.zeros(2),), "ab"])
def test_an_answer_of_two_parts_is_not_taken_for_observation_and_info(answer: Any):
    env = SimpleNamespace(reset=lambda **_: answer)
    with pytest.raises(AnswerError, match=r"reset\(\) must return \(observation, info\), it returned "):
        reset_inner(env, 0, None)


@pytest.mark.parametrize(
    ("answer", "info"), [((0, {}), {}), ((0, None), {}), ([0, OrderedDict(a=1)], {"a": 1})]
)  # fmt: skip
def test_a_reset_may_give_no_info(answer: Any, info: Any):
    assert check_reset(answer) == info


@pytest.mark.parametrize("space", [BOX, IMAGE, spaces.Discrete(3), spaces.Dict({"x": BOX, "y": spaces.MultiBinary(2)})])
@pytest.mark.parametrize("seen", [None, np.zeros(2), [], [[1], [2, 3]], {"x": None}, {}, "over", [object()]])
def test_only_a_truncated_episode_needs_its_last_observation(space: spaces.Space[Any], seen: Any):
    found = last_observation(space, seen, terminated=True)
    assert space.contains(found if isinstance(space, spaces.Dict) else space.dtype.type(found))
    with pytest.raises(EnvError, match="the last observation.* of the episode .*; the episode was truncated"):
        last_observation(space, seen, terminated=False)


def test_one_that_fits_stays_what_it_is():
    for seen in (np.ones(3), [1, 2, 3], np.array([1, 2, 3])):
        assert last_observation(BOX, seen, False) is seen


def test_numbers_that_are_not_finite_fit_where_nobody_looks_for_them():
    seen = np.full(3, np.nan)
    assert last_observation(BOX, seen, False, finite=False) is seen
    assert not last_observation(BOX, seen, True).any()


@pytest.mark.parametrize(
    ("space", "value", "code", "text"),
    [
        (BOX, np.zeros(4), "wrong_shape", "the observation has shape (4,), declared (3,)"),
        (BOX, 0.5, "odd_shape", "has shape (), declared (3,)"),
        (BOX, [[1], [1, 2]], "wrong_shape", "is not an array"),
        (BOX, ["a", "b", "c"], "wrong_shape", "holds <U1"),
        (BOX, [0, 0, np.nan], "observation_not_finite", "is nan at index 2"),
        (BOX, [0, -1.5, 4], "out_of_bounds", "is 4 at index 2, declared -1 to 1"),
        (IMAGE, [[0, 1], [256, 2]], "out_of_bounds", "is 256 at index (1, 0), declared 0 to 255"),
        (IMAGE, [[0, 1], [0.25, 2]], "wrong_dtype", "holds fractions (0.25), declared uint8"),
        (spaces.Discrete(4, start=1), 5, "out_of_bounds", "is 5, declared 1 to 4"),
        (spaces.Discrete(4), np.array([3]), "odd_shape", "has shape (1,), declared ()"),
        (spaces.MultiDiscrete([2, 5]), [1, 5], "out_of_bounds", "is 5 at index 1, declared 0 to 4"),
        (spaces.MultiBinary(2), [0, 2], "out_of_bounds", "is 2 at index 1, declared 0 to 1"),
        (NESTED, np.zeros(3), "wrong_shape", "is a ndarray, declared Dict"),
        (NESTED, {"near": np.zeros(3)}, "wrong_shape", "the observation['far'] is declared and missing"),
        (NESTED, {"near": np.zeros(2), "far": (1, [0, 1])}, "wrong_shape", "the observation['near'] has shape (2,)"),
        (NESTED, {"near": np.zeros(3), "far": (4, [0, 1])}, "out_of_bounds", "the observation['far'][0] is 4"),
        (NESTED, {"near": np.zeros(3), "far": (1,)}, "wrong_shape", "the observation['far'] is no tuple of 2 parts"),
        (spaces.Text(3), "too long", "wrong_shape", "is not in Text"),
    ],
)
def test_a_misfit_is_named(space: spaces.Space[Any], value: Any, code: str, text: str) -> None:
    ((found_code, where, what, _),) = misfits(space, value)
    assert found_code == code
    assert text in f"{where} {what}"


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, np.zeros(3)),  # float64: rounded when stored, which is usual
        (BOX, [0, 1, -1]),
        (spaces.Box(0, np.float32(0.7), (1,), np.float32), [0.7]),  # exceeds float32(0.7) by 1e-8
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [1e30]),
        (IMAGE, [[0.0, 1.0], [255.0, 2.0]]),
        (IMAGE, np.full((2, 2), 255, np.int64)),
        (spaces.Discrete(4), np.int64(3)),
        (spaces.Discrete(4), 3),
        (spaces.MultiBinary(2), [True, False]),
        (NESTED, {"near": np.zeros(3, np.float32), "far": (1, [0, 1]), "more": None}),
        (spaces.Text(9), "short"),
    ],
)
def test_what_fits_is_not_named(space: spaces.Space[Any], value: Any) -> None:
    assert list(misfits(space, value)) == []
