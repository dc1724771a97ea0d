from __future__ import annotations

import os
import subprocess
import sys
import time

from fasttrain.perf.utilization import Utilization, usable_cores


def test_a_busy_loop_uses_cpu_and_a_sleep_does_not():
    utilization = Utilization()
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    busy = utilization.cpu_share()
    utilization.reset()
    time.sleep(0.3)
    idle = utilization.cpu_share()
    assert busy is not None
    assert idle is not None
    assert 0 <= idle < busy


def test_a_stretch_too_short_to_measure_is_none():
    assert Utilization().cpu_share() is None


def test_memory_and_cores_are_plausible():
    assert Utilization().memory_bytes() > 10 * 2**20
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_usage_counts_cpu_time_and_memory_of_children():
    utilization = Utilization()
    before, memory = utilization.usage()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            deadline = time.monotonic() + 20
            while utilization.usage()[0] - before < 0.2 / os.cpu_count() and time.monotonic() < deadline:
                time.sleep(0.05)
            cpu_s, with_child = utilization.usage()
        finally:
            child.kill()
    assert cpu_s - before >= 0.2 / os.cpu_count()
    assert with_child > memory + 2**20
