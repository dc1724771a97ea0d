"""scripts/bench_limits.py: what is made of the figures; the processes that give them are played."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import bench_limits

ADVICE = {"change": "num_envs=24", "class": "trade-off", "expected_gain": 0.5}
TOLD = {
    "share_of_limit": 0.9,
    "limit_steps_per_s": 1e5,
    "steps_per_s": 9e4,
    "alone_steps_per_s": {"env": 4e5, "policy": 4e5, "update": 2e5},
    "advice": [ADVICE],
}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second process of each kind is disturbed: half as fast."""
    counts: dict[str, int] = {}

    def disturbed(kind: str) -> int:
        counts[kind] = counts.get(kind, 0) + 1
        return 1 + counts[kind] % 2

    def training(case: Any, changes: Any = ()) -> float:
        return (120_000 if changes else 80_000) / disturbed(f"training{len(changes)}")

    seconds = {"env": 2e-6, "policy": 3e-6, "update": 5e-6}
    monkeypatch.setattr(bench_limits, "command", lambda word, overrides, result: TOLD)
    monkeypatch.setattr(bench_limits, "training", training)
    monkeypatch.setattr(bench_limits, "part_in_process", lambda name, part: seconds[part] * disturbed(part))


def test_disturbed_processes_do_not_count(processes: None, capsys: pytest.CaptureFixture[str]):
    found = bench_limits.run_case("limits-skullking", repeats=4)
    assert found["measured_share"]["best"] == pytest.approx(80_000 * 10e-6)
    assert found["ratio"] == pytest.approx(0.9 / 0.8)
    assert found["advice"] == "num_envs=24"
    assert found["real_gain"]["best"] == pytest.approx(0.5)
    assert found["real_over_expected"] == pytest.approx(1.0)
    bench_limits.show_case(found)
    assert "share of the limit: doctor 90 % [90, 90], measured 80 %: ratio 1.1" in capsys.readouterr().out


def test_no_advice_is_a_result(monkeypatch: pytest.MonkeyPatch):
    assert bench_limits.follow(bench_limits.CASES["limits-skullking"], [{**TOLD, "advice": []}], 1) == {"advice": None}


def test_blocks_are_counted_per_env_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_limits, "BLOCK_S", 0.0)
    values = iter([99.0, *[4.0] * 8, *[400.0] * 4])
    assert bench_limits.blocks(lambda: next(values), per_call=2) == 2.0
