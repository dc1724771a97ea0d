from __future__ import annotations

from fasttrain.runs.parts import Interval


def test_interval_is_due_once_per_multiple():
    interval = Interval(100)
    assert [count for count in range(0, 450, 30) if interval.due(count)] == [120, 210, 300, 420]
    assert not any(Interval(0).due(count) for count in range(1000))
    interval = Interval(10)
    assert [interval.due(count) for count in (95, 99, 100)] == [True, False, True], "jumped over: due once"
