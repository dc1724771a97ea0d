from __future__ import annotations

from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes
from fasttrain.perf.windows import PerfMeter


def test_lines_cover_what_came_since_the_last_and_overall_everything():
    enemy = [100]
    clock = PhaseClock()
    meter = PerfMeter(clock, lambda: EnvTimes(enemy[0]))
    with clock.phase("action"):
        pass
    enemy[0] += 1_000_000
    first = meter.line(env_steps=1000, updates=4)
    second = meter.line(env_steps=3000, updates=4)
    assert "(enemy_turn_ms" not in first, "opponents' time without env_step would not add up"
    assert "update_ratio 0.00400" in first
    assert "update_ratio 0.00000" in second
    overall = meter.overall(env_steps=3000, updates=4)
    assert overall.env_steps == 3000
    assert overall.envs.opponents_ns == 1_000_000
    assert overall.wall_ns > 0
    assert meter.lines == [first, second]


def test_start_forgets():
    meter = PerfMeter(PhaseClock(), lambda: EnvTimes(7), lambda: "buffer 3%")
    assert meter.line(10, 1).endswith("MB buffer 3%")
    meter.start()
    assert meter.overall(5, 0).env_steps == 5
