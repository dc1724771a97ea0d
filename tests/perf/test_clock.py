from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.perf.clock import PHASES, PhaseClock


@given(st.lists(st.sampled_from(PHASES), max_size=50))
def test_phases_sum_to_the_wall_time(visited: list[str]):
    clock = PhaseClock()
    begun = time.perf_counter_ns()
    clock.reset()
    for phase in visited:
        clock.enter(phase)
    total = sum(clock.snapshot().values())
    assert 0 <= total <= time.perf_counter_ns() - begun
    assert all(value >= 0 for value in clock.totals_ns.values())


def test_time_belongs_to_the_phase_that_was_entered(monkeypatch: pytest.MonkeyPatch):
    now = [0]
    monkeypatch.setattr("fasttrain.perf.clock.time.perf_counter_ns", lambda: now[0])
    clock = PhaseClock()
    clock.enter("action")
    now[0] = 5
    assert clock.enter("env_step") == "action"
    now[0] = 12
    with clock.phase("log"):
        now[0] = 20
    now[0] = 21
    totals = clock.snapshot()
    assert (totals["action"], totals["env_step"], totals["log"], totals["other"]) == (5, 8, 8, 0)
    clock.reset()
    now[0] = 30
    assert clock.snapshot()["env_step"] == 9


def test_the_phase_before_is_restored_after_an_error():
    clock = PhaseClock()
    clock.enter("action")
    with pytest.raises(ValueError, match="x"), clock.phase("eval"):
        raise ValueError("x")
    assert clock.enter("other") == "action"
    with pytest.raises(KeyError):
        clock.enter("acton")
