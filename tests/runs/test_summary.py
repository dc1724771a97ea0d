from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fasttrain.runs.summary import _stopped_by, _whole_run


def a_run(**more: Any) -> Any:
    progress = SimpleNamespace(env_steps=400, updates=20, before_s=3.0)
    return SimpleNamespace(progress=progress, resumed_at=[100], stop=SimpleNamespace(requested=False), **more)


def test_totals_of_a_resumed_run_are_those_of_the_whole():
    found = {"env_steps": 400, "wall_s": 5.0, "updates": 20, "update_ratio": 0.05, "resumed_at": [100]}
    assert _whole_run(a_run(), 2.0) == found


def test_a_rule_that_stopped_it_is_named():
    assert _stopped_by(a_run(course=SimpleNamespace(stopped=None))) == "horizon"
    assert _stopped_by(a_run(course=SimpleNamespace(stopped=SimpleNamespace(by="patience")))) == "patience"
