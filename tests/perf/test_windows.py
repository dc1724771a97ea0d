from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from fasttrain.perf.clock import PHASES, PhaseClock
from fasttrain.perf.report import EnvTimes
from fasttrain.perf.windows import COST_SHARE, MOST_WINDOWS, Mark, PerfMeter, WindowLog, usage


def mark(env_steps: int, seconds: float, updates: int = 0, cpu_s: float = 0.0, **more: float | None) -> Mark:
    """Half of the time acting, half in the update; opponents a quarter."""
    ns = round(seconds * 1e9)
    phases = {**dict.fromkeys(PHASES, 0), "action": ns // 2, "train": ns - ns // 2}
    opponents = EnvTimes(ns // 4)
    return Mark(env_steps, updates, phases, opponents, cpu_s, memory_bytes=100, **{"gpu_busy_ns": None, **more})


def test_a_row_is_what_came_since_the_one_before():
    log = WindowLog(mark(0, 0.0, gpu_busy_ns=0.0), now=50.0)
    log.add(mark(1000, 1.0, updates=4, cpu_s=0.5, gpu_busy_ns=0.2e9), now=51.0, cost_s=0.0)
    log.add(mark(5000, 3.0, updates=6, cpu_s=2.5, gpu_busy_ns=1.2e9), now=53.0, cost_s=0.0)
    first, second = log.rows()
    assert (first["env_steps"], first["wall_s"], first["steps_per_s"], first["updates"]) == (1000, 1.0, 1000.0, 4)
    assert (first["action_ms"], first["train_ms"], first["enemy_turn_ms"]) == (500.0, 500.0, 250.0)
    assert (first["cpu"], first["gpu"], first["memory_bytes"]) == (0.5, 0.2, 100)
    assert (second["env_steps"], second["wall_s"], second["steps_per_s"], second["updates"]) == (5000, 3.0, 2000.0, 6)
    assert (second["action_ms"], second["enemy_turn_ms"], second["cpu"], second["gpu"]) == (250.0, 125.0, 1.0, 0.5)
    assert {f"{phase}_ms" for phase in PHASES} < set(first)


def test_unknown_shares_are_none_and_a_child_that_ended_takes_nothing_away():
    log = WindowLog(mark(0, 0.0), now=0.0)
    log.add(mark(10, 0.03, cpu_s=0.03), now=0.03, cost_s=0.0)
    log.add(mark(20, 1.03, cpu_s=0.01), now=1.03, cost_s=0.0)
    assert [row["cpu"] for row in log.rows()] == [None, 0.0], "30 ms are too short for a clock of 10 ms"
    assert [row["gpu"] for row in log.rows()] == [None, None]


def test_a_window_is_due_after_a_second_and_pays_for_itself():
    log = WindowLog(mark(0, 0.0), now=10.0)
    assert not log.due(10.9)
    assert log.due(11.0)
    log.add(mark(100, 1.0), now=11.0, cost_s=0.001)
    assert log.due(12.0), "1 ms is half of what a second affords"
    log.add(mark(200, 2.0), now=12.0, cost_s=0.006)
    assert not log.due(14.9)
    assert log.due(12.0 + 0.006 / COST_SHARE)
    dear = WindowLog(mark(0, 0.0), now=10.0, cost_s=0.02)
    assert not dear.due(19.9)
    assert dear.due(20.0)


def test_merging_gives_what_measuring_at_half_the_rate_would_have_given():
    rng = random.Random(0)
    log, expected = WindowLog(mark(0, 0.0), now=0.0), WindowLog(mark(0, 0.0), now=0.0)
    env_steps, seconds = 0, 0.0
    for window in range(MOST_WINDOWS):
        env_steps += rng.randrange(1, 10_000)
        seconds += rng.uniform(0.9, 1.5)
        end = mark(env_steps, seconds, updates=env_steps // 7, cpu_s=seconds * 0.7)
        log.add(end, seconds, 0.0)
        if window % 2:
            expected.add(end, seconds, 0.0)
    assert len(log.rows()) == MOST_WINDOWS
    last = mark(env_steps + 500, seconds + 1)
    log.add(last, seconds + 1, 0.0)
    expected.add(last, seconds + 1, 0.0)
    assert log.rows() == expected.rows()
    assert len(log.rows()) == MOST_WINDOWS // 2 + 1
    assert log.interval_s == 2.0


def test_however_long_a_run_is_it_has_240_rows_at_most_that_sum_to_it():
    """Half an hour: rows are merged three times."""
    log, seconds, rate = WindowLog(mark(0, 0.0), now=0.0), 0.0, 3
    lengths, added = [], 0
    while seconds < 1800:
        seconds += 0.7
        if log.due(seconds):
            log.add(mark(round(rate * seconds), seconds), seconds, cost_s=0.001)
            added += 1
            if added % (MOST_WINDOWS // 6) == 0:  # it is full after 240 windows and after each 120 more
                lengths.append(len(log.rows()))
    most = max(lengths)
    assert sum(after < before for before, after in itertools.pairwise(lengths)) == 3
    log.finish(mark(round(rate * seconds), seconds))
    rows = log.rows()
    assert most == MOST_WINDOWS
    assert MOST_WINDOWS // 2 <= len(rows) <= MOST_WINDOWS
    steps = [after["env_steps"] - before["env_steps"] for before, after in itertools.pairwise(rows)]
    spent = sum(row["action_ms"] * n / 1e6 for row, n in zip(rows, [rows[0]["env_steps"], *steps], strict=True))
    assert spent == pytest.approx(seconds / 2, rel=1e-6)


def test_an_update_after_the_last_step_belongs_to_the_last_window():
    log = WindowLog(mark(0, 0.0), now=0.0)
    log.add(mark(100, 1.0), now=1.0, cost_s=0.0)
    log.add(mark(100, 2.0), now=2.0, cost_s=0.0)
    assert [row["wall_s"] for row in log.rows()] == [1.0], "no steps, no window"
    log.finish(mark(100, 3.0, updates=9))
    assert [(row["wall_s"], row["updates"]) for row in log.rows()] == [(3.0, 9)]
    none = WindowLog(mark(0, 0.0), now=0.0)
    none.finish(mark(0, 1.0))
    assert none.rows() == []


def test_the_meter_cuts_windows_by_time_as_part_of_phase_log(monkeypatch: pytest.MonkeyPatch):
    clock, enemy, now = PhaseClock(), [5_000], [100.0]
    meter = PerfMeter(clock, lambda: EnvTimes(enemy[0]))
    meter.windows = WindowLog(meter.windows.last, now[0])
    monkeypatch.setattr("fasttrain.perf.windows.time.perf_counter", lambda: now[0])
    meter.tick(500, 1)
    assert meter.windows.rows() == []
    assert clock.totals_ns["log"] == 0
    now[0] += 1.0
    enemy[0] += 2_000_000
    meter.tick(1000, 2)
    now[0] += 0.5
    meter.tick(1500, 3)
    total = meter.overall(2000, 4)
    rows = meter.windows.rows()
    assert [(row["env_steps"], row["updates"]) for row in rows] == [(1000, 2), (2000, 4)]
    assert [row["enemy_turn_ms"] for row in rows] == [2.0, 0.0], "what came before the training does not count"
    assert clock.totals_ns["log"] > 0
    assert rows[-1]["wall_s"] == total.wall_ns / 1e9
    assert rows[-1]["memory_bytes"] > 10 * 2**20


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
    meter = PerfMeter(PhaseClock(), lambda: EnvTimes(7), lambda: "buffer 3%")
    assert meter.line(10, 1).endswith("MB buffer 3%")
    meter.start()
    assert meter.overall(5, 0).env_steps == 5


def test_a_busy_loop_uses_cpu_and_a_sleep_does_not():
    meter = PerfMeter(PhaseClock(), EnvTimes)
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    busy = meter.overall(1, 0).cpu_share
    meter.start()
    time.sleep(0.3)
    idle = meter.overall(1, 0).cpu_share
    assert busy is not None
    assert idle is not None
    assert 0 <= idle < busy <= 1
    meter.start()
    assert meter.overall(1, 0).cpu_share is None, "too short to measure"


def test_usage_counts_cpu_time_and_memory_of_children():
    before, memory = usage()
    assert memory > 10 * 2**20
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            deadline = time.monotonic() + 20
            while usage()[0] - before < 0.2 / os.cpu_count() and time.monotonic() < deadline:
                time.sleep(0.05)
            cpu_s, with_child = usage()
        finally:
            child.kill()
    assert cpu_s - before >= 0.2 / os.cpu_count()
    assert with_child > memory + 2**20
    assert usage()[0] >= cpu_s - 1e-6, "of a child that has ended too"
