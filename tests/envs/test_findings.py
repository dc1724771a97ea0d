from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.findings import (
    AnswerCheck,
    fingerprint,
    not_picklable,
    single_valued,
)
from fasttrain.envs.probe import Moment

BOX = spaces.Box(-1, 1, (3,), np.float32)


def moment(action: Any = None, observation: Any = None, **changes: Any) -> Moment:
    observation = np.zeros(3, np.float32) if observation is None else observation
    usual = Moment(action, observation, 0.0, False, False, {}, None, False)
    return usual._replace(**changes)


def test_a_misfit_is_counted_and_its_worst_case_shown() -> None:
    witness = AnswerCheck(BOX, spaces.Discrete(2))
    witness(moment())
    for value in (1.5, 3.0, 2.0, 0.0):
        witness(moment(1, np.array([0, value, 0])))
    (finding,) = witness.findings()
    assert str(finding).startswith(
        "the observation is 3 at index 1, declared -1 to 1 (step 2 of episode 1), in 3 of 5 answers; widen the Box"
    )


@pytest.mark.parametrize(
    ("space", "mask", "told"),
    [
        (spaces.Discrete(2), [0, 0], "allows none of 2 actions"),
        (spaces.Discrete(2), [0, 1], ""),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 0, 0], "allows none of 5 actions in head [1]"),
        (spaces.MultiDiscrete([2, 3]), [0, 0, 0, 0, 1], "allows none of 5 actions in head [0]"),
        (spaces.MultiBinary(3), [1, 0, 0, 0, 0, 1], "allows none of 6 actions in head [1]"),
    ],
)
def test_a_mask_that_allows_nothing_is_told_with_its_head(space: Any, mask: list[int], told: str) -> None:
    witness = AnswerCheck(BOX, space)
    witness(moment(mask=np.array(mask, np.bool_)))
    found = [text.partition(" (reset")[0] for text in map(str, witness.findings())]
    assert found == ["the action mask " + told] * bool(told)


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
    assert fingerprint(np.array([np.nan])) == fingerprint(np.array([np.nan]))


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
