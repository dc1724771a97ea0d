"""scripts/bench_recurrent.py: its envs hide what they should, and both sides do the same work. Measures nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conftest import RunCommand
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_recurrent")


def test_velocities_are_hidden(bench: ModuleType) -> None:
    env = bench.short()
    observation, _ = env.reset(seed=1)
    state = env.unwrapped.state
    np.testing.assert_array_equal(observation, np.float32([state[0], state[2]]))
    assert env.observation_space.contains(observation)


@pytest.mark.parametrize(("name", "least", "most"), [("short", 8, 499), ("long", 500, 500)])
def test_how_long_episodes_are(bench: ModuleType, name: str, least: int, most: int) -> None:
    env = getattr(bench, name)()
    env.reset(seed=1)
    steps, over = 0, False
    while not over:
        observation, _, terminated, truncated, _ = env.step(steps % 3 % 2)
        steps, over = steps + 1, terminated or truncated
    assert least <= steps <= most
    assert np.isfinite(observation).all()


def test_both_sides_do_the_same_work(bench: ModuleType, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_ENVS", 2)
    monkeypatch.setattr(bench, "NUM_STEPS", 64)
    work = {"units": 16, "batch_size": 64, "swings": False, "rollouts": 2}
    ours, theirs = bench.cartpole_ours(work), bench.cartpole_stock(work, 1)
    same = ("env_steps", "updates", "samples_per_update")
    assert [ours[key] for key in same] == [theirs[key] for key in same] == [256, 16, 64]
    assert ours["chosen"]["fused_update"] == "on"


def test_memory_and_none_do_the_same_work(
    bench: ModuleType, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"num_envs": 16, "rollout_size": 1024, "batch_size": 256, "n_epochs": 1}
    monkeypatch.setattr(bench, "TRAIN", {**bench.TRAIN, **small})
    monkeypatch.setattr(bench, "SKULLKING_ROLLOUTS", 2)
    found = [measurement() for measurement in bench.WORKS["recurrent-skullking-encoder"].values()]
    assert [[one["env_steps"], one["updates"]] for one in found] == [[2048, 8]] * 2
