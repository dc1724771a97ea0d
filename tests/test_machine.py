"""What this machine offers."""

from __future__ import annotations

import os

import psutil
import pytest

from fasttrain.machine import usable_cores


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
