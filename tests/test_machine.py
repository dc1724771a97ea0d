"""What this machine offers."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from fasttrain.machine import bf16_units, usable_cores


@pytest.mark.parametrize(
    ("physical", "allowed", "expected"),
    [(8, 16, 8), (8, 2, 2), (None, 4, 4), (1, 1, 1), (0, 3, 3)],
    ids=["hyperthreads", "taskset", "unknown", "one", "nonsense"],
)
def test_physical_cores_but_only_those_allowed(
    monkeypatch: pytest.MonkeyPatch, physical: int | None, allowed: int, expected: int
):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical if not logical else 99)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    assert usable_cores() == expected


def test_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx512f avx512_bf16 amx_bf16", "AMX"),
        ("fpu avx512f avx512_bf16", "AVX512-BF16"),
        ("fpu avx2 avx512f", ""),
    ],
)
def test_units_for_bfloat16(tmp_path: Path, flags: str, expected: str):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: amx_bf16 3000\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert bf16_units(cpuinfo) == expected


def test_units_of_a_system_that_does_not_say(tmp_path: Path):
    assert bf16_units(tmp_path / "nothing") == ""
