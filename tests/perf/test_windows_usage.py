from __future__ import annotations

import os
import subprocess
import sys
import time

from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes
from fasttrain.perf.windows import PerfMeter, usage


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


def test_a_stretch_too_short_to_measure_is_none():
    meter = PerfMeter(PhaseClock(), EnvTimes)
    meter.start()
    assert meter.overall(1, 0).cpu_share is None


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
