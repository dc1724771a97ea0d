"""scripts/bench_auto.py: who is measured, and what is made of it; the processes that measure are played."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import bench_auto

RATES = {
    "balance": 900.0,
    "speed": 1200.0,
    "stock dummy all": 1000.0,
    "stock subproc all": 500.0,
    "vec_env=dummy": 1250.0,
    "vec_env=shared": 1000.0,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom a cell measured."""
    names: list[str] = []

    def measure(name: str, task: str, algo: str) -> dict[str, Any]:
        names.append(name)
        return {"rate": RATES[name], "chosen": {"name": name}}

    monkeypatch.setattr(bench_auto, "measure", measure)
    return names


def test_ours_against_the_best_of_stock_and_of_the_explicit_choices(asked: list[str]):
    cell = bench_auto.run_cell("cartpole", "ppo", busy=False, repeats=3)
    assert (cell["best_stock"], cell["best_explicit"]) == ("stock dummy all", "vec_env=dummy")
    assert (cell["balance"], cell["speed"], cell["auto"]) == (0.9, 1.2, 0.96)
    assert cell["chosen"]["speed"] == 3 * [{"name": "speed"}]
    assert asked.count("speed") == asked.count("vec_env=shared") == 3
    # Far behind the best of their kind: asked once.
    assert asked.count("stock subproc all") == 1


def test_runs_whose_plans_came_to_the_same_are_one_side():
    groups = {"ours": ["balance", "speed"], "stock": ["stock"], "explicit": ["vec_env=dummy", "vec_env=shared"]}
    rates = {
        "balance": [9.0],
        "speed": [10.0, 12.0],
        "stock": [5.0],
        "vec_env=dummy": [20.0, 11.0],
        "vec_env=shared": [11.0],
    }
    plans = {"balance": ["b"], "speed": ["d", "d"], "vec_env=dummy": ["d", "d"], "vec_env=shared": ["s"]}
    found = bench_auto.judged(groups, rates, plans)
    assert (found["speed"], found["auto"], found["balance"]) == (11.5 / 5, 1.0, 9.0 / 5)


@pytest.mark.parametrize(("changes", "missed"), [({}, True), ({"balance": 1.0}, False), ({"auto": 0.89}, True)])
def test_a_missed_bound_is_marked(asked: list[str], changes: dict[str, float], missed: bool):
    cell = bench_auto.run_cell("cartpole", "ppo", busy=False, repeats=1)
    assert bench_auto.line({**cell, **changes}).endswith("!") is missed


def test_cells_that_were_not_asked_for_stay(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_auto, "TASKS", {"cartpole": bench_auto.TASKS["cartpole"]})
    assert bench_auto.run(1, tmp_path, only=None) == 1  # balance is below stock
    again = {name: 2 * rate if name == "balance" else rate for name, rate in RATES.items()}
    monkeypatch.setattr(bench_auto, "measure", lambda name, *_: {"rate": again[name], "chosen": name})
    bench_auto.run(1, tmp_path, only="ppo cartpole busy")
    cells = json.loads((tmp_path / "auto.json").read_text(encoding="utf-8"))["cells"]
    found = {(cell["algo"], cell["busy"]): cell["balance"] for cell in cells}
    assert found == {("ppo", False): 0.9, ("dqn", False): 0.9, ("ppo", True): 1.8, ("dqn", True): 0.9}


@pytest.mark.parametrize("name", ["computes-100us", "waits-2ms", "dict", "pictures"])
def test_the_envs_keep_to_their_spaces(name: str):
    env = bench_auto.TASKS[name].env()
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    observation, reward, terminated, truncated, _ = env.step(np.int64(0))
    assert env.observation_space.contains(observation)
    assert isinstance(reward, float)
    assert not terminated
    assert not truncated
