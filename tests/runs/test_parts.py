from __future__ import annotations

from fasttrain.runs.parts import Interval


def test_interval_is_due_once_per_multiple():
    interval = Interval(100)
    assert [count for count in range(0, 450, 30) if interval.due(count)] == [120, 210, 300, 420]


def test_interval_of_zero_is_never_due():
    assert not any(Interval(0).due(count) for count in range(1000))


def test_an_interval_that_was_jumped_over_is_due_once():
    interval = Interval(10)
    assert interval.due(95)
    assert not interval.due(99)
    assert interval.due(100)
