"""A training too short for a tier's large batches says so; others say nothing."""

from __future__ import annotations

import pytest

from conftest import configured
from fasttrain.spec.checks import ENOUGH_UPDATES, too_short, updates_of


def test_the_default_job_needs_half_a_million_steps():
    short = configured("+profile=speed", "total_timesteps=200000")
    assert updates_of(short) == 781
    assert too_short(short).startswith(
        "short: 200,000 steps are 781 updates (stock: 31,250); below about 1,900, here 486,400"
    )
    assert too_short(configured("+profile=speed", "total_timesteps=500000")) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("+profile=baseline", "total_timesteps=5000"),  # stock's own batches, however short
        ("+profile=speed", "algo=dqn", "env.id=CartPole-v1", "total_timesteps=5000"),
        ("+profile=speed", "total_timesteps=200000", "batch_size=64", "algo.n_epochs=10"),
    ],
)
def test_others_say_nothing(arguments: tuple[str, ...]):
    assert too_short(configured(*arguments)) == ""


def test_the_bound_is_counted_in_updates():
    config = configured("+profile=speed", f"total_timesteps={ENOUGH_UPDATES * 1024 // 4}")
    assert updates_of(config) == ENOUGH_UPDATES
    assert too_short(config) == ""
