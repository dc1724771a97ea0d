"""scripts/bench_recurrent.py: its envs hide what they should, and both sides do the same work. Measures nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

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


def test_all_do_the_same_work(bench: ModuleType, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_ENVS", 2)
    monkeypatch.setattr(bench, "NUM_STEPS", 64)
    work = {"units": 16, "batch_size": 64, "swings": False, "rollouts": 2}
    found = [bench.cartpole_ours(work), bench.cartpole_stock(work, 1), bench.cartpole_loop(work)]
    for each in found:
        assert (each["env_steps"], each["updates"], each["samples_per_update"]) == (256, 16, 64)
        assert 9 < each["quality"] < 60
    assert found[0]["chosen"]["fused_update"] == "on"


def test_every_opponent_but_the_one_to_be_installed_is_measured_without_being_asked_for(bench: ModuleType) -> None:
    benchmark = importlib.import_module("benchmark")
    asked_for = {name for work in bench.WORKS.values() for name in work} & benchmark.PEERS_ONLY
    assert asked_for == {"Sample Factory"}


def test_the_lean_loop_forgets_where_episodes_start(bench: ModuleType) -> None:
    net = importlib.import_module("bench_lstm_loop").Net(2, 4, 3, 1.0)
    seen, starts = torch.randn(6, 2, 2), torch.zeros(6, 2)
    starts[0, 1] = starts[3, 0] = 1.0
    begun = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    whole, after = net(seen, begun, starts)
    for env, cut in ((0, 3), (1, 0)):
        states = tuple(part[:, env : env + 1] for part in begun)
        for step in range(6):
            if step == cut:
                states = (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
            output, states = net.lstm(seen[step : step + 1, env : env + 1], states)
            assert torch.allclose(net.behind(output)[0, 0], whole[step, env], atol=1e-6)
        assert torch.allclose(states[1][:, 0], after[1][:, env], atol=1e-6)


def test_memory_and_none_do_the_same_work(
    bench: ModuleType, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"num_envs": 16, "rollout_size": 1024, "batch_size": 256, "n_epochs": 1}
    monkeypatch.setattr(bench, "TRAIN", {**bench.TRAIN, **small})
    monkeypatch.setattr(bench, "SKULLKING_ROLLOUTS", 2)
    found = [measurement() for measurement in bench.WORKS["recurrent-skullking-encoder"].values()]
    assert [[one["env_steps"], one["updates"]] for one in found] == [[2048, 8]] * 2
