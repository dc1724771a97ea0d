"""Shares of engines over a stretch of time."""

from __future__ import annotations

import pytest

from fasttrain_engines.stats import Tally


def test_shares_are_those_of_the_time_between():
    before, now = Tally(), Tally()
    before.daemons = [{"daemon": 0, "seconds": 10.0, "busy_share": 0.2, "cpu_share": 0.5, "memory_mb": 1.0}]
    now.daemons = [
        {"daemon": 0, "seconds": 14.0, "busy_share": 0.4, "cpu_share": 0.1, "memory_mb": 3.0},
        {"daemon": 1, "seconds": 2.0, "busy_share": 0.5, "cpu_share": 0.5, "memory_mb": 2.0},
    ]
    old, new = now.daemons_since(before)
    assert old["busy_share"] == pytest.approx((5.6 - 2.0) / 4)
    assert (old["cpu_share"], old["memory_mb"]) == (0.0, 3.0), "another process, which begins at nothing"
    assert (new["seconds"], new["busy_share"]) == (2.0, 0.5)
