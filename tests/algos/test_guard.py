"""Counting, speaking, giving up: with a model that is little but a policy. What it does to training: tests/faults."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fasttrain.algos.guard import COPY_EVERY, Guard
from fasttrain.errors import ConfigError, DivergedError

BAD, HALF, GOOD = np.array([np.nan, np.inf]), np.array([1.0, np.nan]), np.array([1.0, 1.0])


def a_model() -> Any:
    policy: Any = nn.Linear(2, 2)
    policy.optimizer = torch.optim.Adam(policy.parameters())
    policy(torch.ones(1, 2)).sum().backward()
    policy.optimizer.step()
    return SimpleNamespace(policy=policy, num_timesteps=1000, max_grad_norm=0.5)


def a_guard(**settings: Any) -> tuple[Guard, list[str]]:
    lines: list[str] = []
    return Guard(say=lines.append, **settings), lines


def why() -> str:
    return "the moon is not finite"


def test_skipped_updates_are_counted_and_told_whenever_they_have_doubled():
    guard, lines = a_guard()
    for norms in (GOOD, np.zeros(0)):
        guard.note(a_model(), norms, why)
    assert (lines, guard.skipped, guard.in_a_row, guard.state()[0]["copies"]) == ([], 0, 0, 0), (
        "copies are for a rollback"
    )
    for _ in range(9):
        guard.note(a_model(), HALF, why)
    assert guard.skipped == 9
    assert lines == [
        "[GUARD] step 1,000: 1 of 2 updates skipped: the moon is not finite; weights and optimizer are as they were "
        f"({count} skipped so far)"
        for count in (1, 2, 4, 8)
    ]


def test_only_rounds_that_brought_nothing_end_the_run():
    guard, _ = a_guard(max_skipped=2)
    for norms in (BAD, BAD, HALF, BAD, BAD, GOOD, BAD, BAD):
        guard.note(a_model(), norms, why)
    with pytest.raises(DivergedError, match=r"in 3 rounds in a row, at step 1000: the moon"):
        guard.note(a_model(), BAD, why)


def test_what_is_expected_is_counted_without_a_word():
    guard, lines = a_guard(max_skipped=1)
    guard.note(a_model(), HALF, why, expected=True)
    assert (lines, guard.skipped) == ([], 1)
    guard.note(a_model(), BAD, why, expected=True)
    with pytest.raises(DivergedError):
        guard.note(a_model(), BAD, why, expected=True)


def test_in_a_script_a_line_is_a_warning():
    with pytest.warns(RuntimeWarning, match="GUARD.*the moon"):
        Guard().note(a_model(), HALF, why)


def test_a_rollback_goes_to_weights_that_many_good_updates_came_after():
    (guard, _), model = a_guard(at_limit="rollback", max_skipped=1), a_model()
    for weight, updates in ((0.0, 1), (1.0, COPY_EVERY), (2.0, COPY_EVERY), (3.0, 1)):  # copied: 0, 1 and 2
        nn.init.constant_(model.policy.weight, weight)
        guard.note(model, np.ones(updates), why)
    for _ in range(2):
        guard.note(model, BAD, why)
    assert guard.rollbacks == 1
    assert torch.all(model.policy.weight == 1.0)


def test_a_guard_goes_on_where_another_was():
    one, _ = a_guard(at_limit="rollback", max_skipped=3)
    model = a_model()
    for norm in (1.0, 2.0, 3.0):
        one.note(model, np.array([norm, norm]), why)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    for _ in range(3):
        one.note(model, BAD, why)
    state, arrays = one.state()
    state, arrays = json.loads(json.dumps(state)), {name: array.copy() for name, array in arrays.items()}
    assert (state["skipped"], state["in_a_row"], state["rolled_back"]) == (6, 3, False)

    other, lines = a_guard(at_limit="rollback", max_skipped=3)
    later = a_model()
    other.load(state, arrays, later)
    assert other.state()[0] == state
    other.note(later, BAD, why)
    assert other.rollbacks == 1
    assert "back to the last good weights" in lines[0]
    for name, value in later.policy.state_dict().items():
        assert torch.equal(value, before[name]), name
    wrong = {name: np.zeros((3, 3), np.float32) for name in arrays}
    with pytest.raises(ConfigError, match="this run needs"):
        a_guard()[0].load(state, wrong, a_model())
