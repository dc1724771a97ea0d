"""What does not fit its space is named with index and figures; what fits is not."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.findings import (
    REMEDIES,
    WARNINGS,
    Witness,
    empty_heads,
    fingerprint,
    found,
    misfits,
    not_picklable,
    single_valued,
)
from fasttrain.envs.probe import Moment

BOX = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
NESTED = spaces.Dict(near=BOX, far=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))))


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


def moment(action: Any = None, observation: Any = None, **changes: Any) -> Moment:
    observation = np.zeros(3, np.float32) if observation is None else observation
    usual = Moment(action, observation, 0.0, False, False, {}, None, False)
    return usual._replace(**changes)


def test_a_misfit_is_counted_and_its_worst_case_shown() -> None:
    witness = Witness(BOX, spaces.Discrete(2))
    witness(moment())
    for value in (1.5, 3.0, 2.0, 0.0):
        witness(moment(1, np.array([0, value, 0])))
    (finding,) = witness.findings()
    assert str(finding).startswith(
        "the observation is 3 at index 1, declared -1 to 1 (step 2 of episode 1), in 3 of 5 answers; widen the Box"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
        (np.zeros(2), np.array([0, 1e-300])),
        ({"a": np.zeros(1), "b": 1}, {"a": np.zeros(1), "b": 2}),
        ((1, 2, True), (1, 2, False)),
        ((np.zeros(1), 2), (np.ones(1), 2)),
        ("left", "right"),
        (3, 4),
    ],
)
def test_fingerprints_differ_where_the_values_do(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)
    hash(fingerprint(one))


def test_fingerprints_of_nan_are_equal() -> None:
    assert fingerprint(float("nan")) == fingerprint(float("nan"))
    assert fingerprint(np.array([np.nan])) == fingerprint(np.array([np.nan]))


@pytest.mark.parametrize(
    ("space", "mask", "heads"),
    [
        (spaces.Discrete(2), [0, 0], [0]),
        (spaces.Discrete(2), [0, 1], []),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 0, 0], [1]),
        (spaces.MultiDiscrete([2, 3]), [0, 0, 0, 0, 1], [0]),
        (spaces.MultiBinary(3), [1, 0, 0, 0, 0, 1], [1]),
    ],
)
def test_empty_heads(space: spaces.Space[Any], mask: list[int], heads: list[int]) -> None:
    assert empty_heads(space, np.array(mask, np.bool_)) == heads


class Sulking:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({}, ""),
        ({"a": 1, "b": [np.zeros(3)]}, ""),
        ({"a": 1, "lock": threading.Lock()}, "info['lock'] holds a _thread.lock (TypeError"),
        ({"call": lambda: 0}, "info['call'] holds a builtins.function"),
        ({"sulks": Sulking()}, "info['sulks'] holds a test_findings.Sulking (ValueError: invalid literal"),
    ],
)
def test_not_picklable(info: dict[str, Any], text: str) -> None:
    assert not_picklable(info).startswith(text)
    assert bool(not_picklable(info)) == bool(text)


def test_single_valued() -> None:
    assert single_valued(spaces.Discrete(1))
    assert single_valued(spaces.Dict(a=spaces.Discrete(1), b=spaces.Box(2, 2, (3,))))
    assert single_valued(spaces.MultiDiscrete([1, 1]))
    assert not single_valued(spaces.MultiDiscrete([1, 2]))
    assert not single_valued(BOX)


def test_severity_and_remedy_are_the_codes_unless_given() -> None:
    assert found("never_done", "x").severity == "warning"
    assert found("bad_mask", "x", "do that").severity == "error"
    assert found("stale_mask", "x", severity="warning").severity == "warning"
    assert str(found("empty_mask", "x", "do that")) == "x; do that"
    assert set(WARNINGS) <= set(REMEDIES)
