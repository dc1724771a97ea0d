"""How windows take turns, and what is made of them; what each measures: test_rig.py."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain.studies.limits import Rates
from fasttrain.studies.rig import LEAST_ROUNDS, WINDOWS, measure, rates_of, ratios_of, typical, windows_of


class Idle:
    """Stands for a rig."""

    off_policy = False

    def activate(self) -> None:
        pass


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Windows in the order they were run."""
    called: list[tuple[str, Any]] = []

    def window(name: str) -> Any:
        def run(rig: Any, seconds: float) -> dict[str, float]:
            called.append((name, rig))
            return {name: 1e-6 * len(called)}

        return run

    for name in ("collect", "update"):
        monkeypatch.setitem(WINDOWS, name, window(name))
    return called


def test_parts_and_configurations_take_turns_and_the_first_does_not_count(order: list[tuple[str, Any]]):
    now: Any = Idle()
    changed: Any = Idle()
    samples: dict[str, dict[str, list[float]]] = {"now": {}, "changed": {}}
    told: list[str] = []
    measure({"now": now, "changed": changed}, ["collect", "update"], 60.0, samples, told.append, rounds=3)
    assert order == [("collect", now), ("collect", changed), ("update", now), ("update", changed)] * 3
    assert samples["now"]["collect"] == pytest.approx([5e-6, 9e-6])
    assert samples["changed"]["update"] == pytest.approx([8e-6, 12e-6])
    assert told[-1] == "update 3/3"


def test_what_takes_long_is_measured_twice_only(order: list[tuple[str, Any]]):
    rig: Any = Idle()
    samples: dict[str, dict[str, list[float]]] = {"now": {}}
    measure({"now": rig}, ["collect"], 1e-9, samples)
    assert len(order) == LEAST_ROUNDS
    assert len(samples["now"]["collect"]) == 2, "so long a window needs no warm-up"


def test_a_disturbed_window_does_not_count():
    assert typical([1.0, 1.0, 1.0, 9.0]) == 1.0
    rates = rates_of({"env": [2.0, 2.0], "train": [5.0], "logging": [0.0, 2.0, 2.0, 8.0]})
    assert rates == Rates(env=2.0, logging=2.0), "log lines fall due in some windows"
    assert ratios_of({"env": [3.0], "policy": [1.0]}, {"env": [2.0], "update": [1.0]}) == {"env": 1.5}


def test_parts_within_others_need_their_window_once():
    rig: Any = Idle()
    assert windows_of(rig, ["transport", "env", "storing", "replay", "logging"]) == ["collect", "train"]
