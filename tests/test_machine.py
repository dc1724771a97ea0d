from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fasttrain import machine
from fasttrain.machine import bf16_units, free_memory, outgrows, process_age_s, usable_cores


@pytest.mark.parametrize(
    ("physical", "allowed", "expected"),
    [(8, 16, 8), (8, 2, 2), (None, 4, 4), (1, 1, 1), (0, 3, 3)],
    ids=["hyperthreads", "taskset", "unknown", "one", "nonsense"],
)
def test_physical_cores_but_only_those_allowed(monkeypatch, physical, allowed, expected):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical if not logical else 99)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    assert usable_cores() == expected
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert usable_cores() == 1, "a system without affinity, which does not say"


class Container:
    """A machine of 16 cores and 64 GiB, and the files that say what a process in a container of it may have."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(machine, "_CGROUPS", folder)
        monkeypatch.setattr(machine, "_OWN_CGROUPS", folder / "own")
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
        assert (usable_cores(), free_memory()) == (16, 64 << 30), "without control groups"

    def put(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    return Container(tmp_path, monkeypatch)


def test_no_more_cores_than_the_container_gets_the_time_of(container: Container):
    container.put({"own": "0::/\n", "cpu.max": "250000 100000\n"})
    assert usable_cores() == 3, "2.5 cores' time keeps three threads from waiting for each other"
    container.put({"cpu.max": "max 100000\n"})
    assert usable_cores() == 16


def test_a_quota_of_the_older_kind_and_below_another(container: Container):
    container.put({"own": "4:cpu,cpuacct:/pods/mine\n3:memory:/pods/mine\n0::/\n",
                   "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"})  # fmt: skip
    assert usable_cores() == 16
    container.put({"cpu/pods/cpu.cfs_quota_us": "400000\n", "cpu/pods/cpu.cfs_period_us": "100000\n"})
    assert usable_cores() == 4
    container.put({"memory/pods/memory.limit_in_bytes": f"{2 << 30}\n",
                   "memory/pods/memory.usage_in_bytes": f"{3 << 30}\n"})  # fmt: skip
    assert free_memory() == 0


def test_free_memory_is_the_containers(container: Container):
    container.put({"own": "0::/\n"})
    assert free_memory() == 64 << 30
    container.put({"memory.max": f"{8 << 30}\n", "memory.current": f"{5 << 30}\n"})
    assert free_memory() == 3 << 30
    container.put({"memory.stat": f"anon 1\ninactive_file {1 << 30}\n"})
    assert free_memory() == 4 << 30, "what files take can be dropped"
    container.put({"memory.max": "max\n"})
    assert free_memory() == 64 << 30


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx512_bf16 amx_bf16", "AMX"), ("avx512f avx512_bf16", "AVX512-BF16"), ("avx512f", "")]
)
def test_units_for_bfloat16(tmp_path: Path, flags: str, expected: str):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: amx_bf16 3000\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n")
    assert bf16_units(cpuinfo) == expected
    assert bf16_units(tmp_path / "nothing") == ""


def test_the_age_of_this_process(monkeypatch: pytest.MonkeyPatch):
    created = psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: created + 5)
    assert process_age_s() == pytest.approx(5)
    monkeypatch.setattr(time, "time", lambda: created - 3600)
    assert process_age_s() == 0, "the clock was set back"


def test_a_process_that_takes_the_last_memory_is_told_from_one_that_suffers(monkeypatch: pytest.MonkeyPatch):
    held = psutil.Process().memory_info().rss
    for free in (64 << 30, 2 * held):
        monkeypatch.setattr(machine, "free_memory", lambda free=free: free)
        assert outgrows(os.getpid()) == 0
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    assert outgrows(os.getpid()) > held // 2
    assert outgrows(2**30) == 0, "there is no such process"


CELL = (
    "import os; from fasttrain.machine import stop_after; parent = os.getppid()\n"
    "print(os.getpid(), flush=True); stop_after(parent, 0.01)"
)
STUDY = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CELL!r}])"


def test_a_process_stops_after_the_one_that_started_it_was_killed():
    with subprocess.Popen([sys.executable, "-c", STUDY], stdout=subprocess.PIPE, text=True) as study:
        cell = psutil.Process(int(study.stdout.readline()))
        assert cell.is_running(), "while that one is there"
        study.send_signal(signal.SIGKILL)
        assert study.communicate(timeout=60)[0] == "", "nobody holds that end any more"
