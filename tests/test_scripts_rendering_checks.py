"""scripts/rendering_checks.py: what the README says of stored checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import rendering_checks


def test_the_matrix_has_quiet_and_busy_side_by_side():
    def cell(busy: bool) -> dict[str, Any]:
        rates = {"stock dummy 1": [50.0 if busy else 100.0, 1000.0, 10.0], "speed": [1.0, 2.0, 3.0]}
        ours = {"balance": 1.5, "speed": 2.0, "auto": 0.98}
        return {"task": "dict", "algo": "dqn", "busy": busy, "rates": rates, "best_stock": "stock dummy 1", **ours}

    text = rendering_checks.auto(lambda name: {"machine": "2 cores, x", "cells": [cell(True), cell(False)]})
    pairs = "100 / 50 | 1.50× / 1.50× | 2.00× / 2.00× | 98 % / 98 %"
    assert text.splitlines()[-1] == f"| DQN, Dict observations | {pairs} |"
    assert text.startswith("On 2 cores, 3 turns, on a quiet machine / with a process burning each core.")
    quiet = rendering_checks.auto(lambda name: {"machine": "2 cores, x", "cells": [cell(False)]})
    assert quiet.startswith("On 2 cores, 3 turns, on a quiet machine.")
    assert quiet.endswith("| 100 | 1.50× | 2.00× | 98 % |")


def test_wrong_inputs_are_counted_by_the_door_they_came_through():
    parts = {
        "settings": {"cases": 1000, "bad_count": 0},
        "hand": {"cases": 200, "bad_count": 0},
        "processes": {"cases": 50, "bad_count": 0},
    }
    text = " ".join(rendering_checks.wrong_inputs(lambda name: {"parts": parts}).split())
    assert "1,200 wrong inputs by calling the command and 50 as processes: none ended" in text
    parts["hand"]["bad_count"] = 2
    assert "processes: 2 ended" in " ".join(rendering_checks.wrong_inputs(lambda name: {"parts": parts}).split())


def test_stock_suites_name_what_fails():
    counts = {"stock": {"passed": 9, "failed": 1, "skipped": 0}, "ours": {"passed": 8, "failed": 2, "skipped": 0}}
    suite = {
        "version": "2.9.2",
        "files": {"a": counts, "b": counts},
        "exceptions": {"a::one": "meant"},
        "failed_with_stock": ["a::two"],
    }
    text = rendering_checks.stock_suites(lambda name: {"suites": {"stable_baselines3": suite}})
    assert "| stable-baselines3 2.9.2 | 2 | 18 passed, 2 failed | 16 passed, 4 failed |" in text
    assert text.endswith("- `a::one`: meant\n- `a::two` fails with stock's class too")
