"""Who goes on and who ends; what an env does that forks is in tests/faults/test_forking.py."""

from __future__ import annotations

import os

import pytest

from fasttrain.vec.worker_memory import ForkGuard


def test_a_guard_ends_forks_alone(monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    guard = ForkGuard()
    guard.check()
    guard.check(SystemExit(3))
    assert codes == []
    guard.forked = True
    for error in (None, SystemExit(3), SystemExit(), SystemExit("why"), ValueError()):
        guard.check(error)
    assert codes == [1, 3, 0, 1, 1]
