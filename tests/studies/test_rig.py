"""A run on the bench: its parts measured one by one leave it able to train on; windows take turns."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.envs import env_facts, this_machine
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve
from fasttrain_studies import rig as bench
from fasttrain_studies.limits import Rates
from fasttrain_studies.rig import (
    LEAST_ROUNDS,
    WARMUP,
    WINDOWS,
    IterationTimer,
    Rig,
    measure,
    rates_of,
    ratios_of,
    steady,
    typical,
)
from pig_games import overrides

CARTPOLE = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=4", "torch_threads=1", "algo.net_arch=[8]")
PPO = (*CARTPOLE, "algo=ppo", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=2")
DQN = (*CARTPOLE, "algo=dqn", "warmup_steps=200", "batch_size=16", "total_timesteps=400", "updates_per_step=2")
SPEED, BASELINE, WORKERS = "+profile=speed", "+profile=baseline", ("vec_env=shared", "num_workers=2")
KINDS = {
    "ours": (SPEED, *PPO),
    "stock": (BASELINE, *PPO),
    "recurrent": (BASELINE, *PPO, "algo=recurrent_ppo", "algo.lstm_hidden_size=8"),
    "our recurrent": (SPEED, *PPO, "algo=recurrent_ppo", "algo.lstm_hidden_size=16"),
    "our DQN": (SPEED, *DQN),
    "DQN in rounds": (SPEED, *DQN, "algo.train_freq=4", "updates_per_step=-1"),
    "stock DQN": (BASELINE, *DQN),
    "shared": (SPEED, *PPO, *WORKERS),
    "async": (SPEED, *PPO, *WORKERS, "schedule=first_ready"),
    "normalised": (SPEED, *DQN, "env.normalize=[obs]"),
    "native": (SPEED, "num_envs=8", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1"),
    "policies": (SPEED, "num_envs=8", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "policies="
                 "{manager: {decides: bid}, worker: {decides: play}}"),
    "engines": (SPEED, *overrides("--think-ms", "50"), "num_envs=4", "algo.rollout_size=64", "batch_size=32",
                "algo.n_epochs=1"),
}  # fmt: skip


def rig_of(folder: Path, *arguments: str) -> Rig:
    kept = {text.partition("=")[0]: text for text in arguments}  # the last of a key
    config = configured(*kept.values())
    return Rig(resolve(config, {"num_envs": "command line"}, env_facts(config), this_machine()), folder / "rig")


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_can_be_measured_and_training_goes_on(kind: str, tmp_path: Path, forked_workers: None):
    rig = rig_of(tmp_path, *KINDS[kind])
    rig.warm_up(0.05)
    samples: dict[str, list[float]] = {}
    names = bench.windows_of(rig, ["env", "policy", "update", "replay", "transport", "logging", "train"])
    before = rig.model.num_timesteps
    measure({"now": rig}, names, 0.02, {"now": samples}, rounds=2)
    wanted = {"env", "policy", "storing", "update", "logging", "train"} | ({"replay"} if rig.off_policy else set())
    wanted |= {"transport"} if kind == "shared" else set()
    assert set(samples) == wanted
    assert all(value > 0 for part in wanted - {"transport"} for value in samples[part])
    rates = rates_of(samples)
    assert (rates.transport or 0.0) <= (rates.env or 0.0)
    trained = rig.model.num_timesteps
    assert trained > before
    if kind == "async":
        assert rig.model.collector.schedule == "first_ready", "collecting in lockstep was for the window alone"
        flow = rig.flow(EnvFacts(False, None, cpu_share=0.25), Machine(8, False, False))
        assert (flow.groups, flow.cores, flow.env_cores) == (True, 8, 0.5)
    if kind == "engines":
        told, tries = rig.engines(0.3) or ("", [])
        found = re.match(r"4 games ÷ ([\d.]+) ms a decision = ([\d,]+) decisions/s; with a policy", told)
        assert found
        assert float(found[1]) >= 50
        assert tries == ["num_envs=8", "daemons.count=2", "daemons.games_per_daemon=4"]
        assert "The engines mostly wait" in told
    rig.train(0.01)
    assert rig.model.num_timesteps > trained
    assert all(torch.isfinite(parameter).all() for parameter in rig.model.policy.parameters())
    rig.close()


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Rig]:
    rig = rig_of(tmp_path, *KINDS["ours"], "log_every=4", "train_log_enabled=true")
    rig.warm_up(60.0)
    yield rig
    rig.close()


def test_measuring_parts_changes_neither_weights_nor_step_count_and_updates_in_full(ours: Rig):
    weights = [parameter.detach().clone() for parameter in ours.model.policy.parameters()]
    steps, before = ours.model.num_timesteps, ours.model.engine.gradient_updates
    WINDOWS["collect"](ours, 0.01)
    assert bench.update_window(ours, 0.0)["update"] > 0
    assert ours.model.num_timesteps == steps
    assert all(torch.equal(a, b) for a, b in zip(weights, ours.model.policy.parameters(), strict=True))
    assert np.array_equal(ours.model._last_obs, ours.run.env.buf_obs[None])
    assert ours.model.engine.gradient_updates - before == 2 * 64 // 32


def test_updates_are_counted_per_transition_of_their_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rig = rig_of(tmp_path, *KINDS["DQN in rounds"])
    monkeypatch.setattr(bench, "_dqn_updates", lambda _: 32.0)
    assert bench.update_window(rig, 0.0) == {"update": 32.0 / (4 * 4)}
    rig.close()


def test_a_slow_update_goes_on_with_one_epoch_counted_as_all(ours: Rig, monkeypatch: pytest.MonkeyPatch):
    epochs: list[int] = []

    def update(_: Any, work: Any) -> None:
        epochs.append(work.n_epochs)
        time.sleep(0.01)

    monkeypatch.setattr(ours.model.engine_now(), "update", update)
    bench.update_window(ours, 0.005)
    bench.update_window(ours, 0.005)
    assert epochs == [2, 1]
    assert ours.model.n_epochs == 2


def test_after_a_slow_iteration_already_the_first_update_has_one_epoch(ours: Rig, monkeypatch: pytest.MonkeyPatch):
    ours.warm_up(0.0)
    epochs: list[int] = []
    monkeypatch.setattr(ours.model.engine_now(), "update", lambda _, work: epochs.append(work.n_epochs))
    bench.update_window(ours, 0.0)
    assert epochs == [1]


def test_logging_is_what_the_runs_own_lines_take(ours: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.callbacks.log_figures", lambda *_: time.sleep(0.01))
    window = ours.train(0.05)
    assert 0.01 / 64 <= window["logging"] < window["train"], "a line at every rollout of 64 steps"


def test_what_a_run_says_goes_to_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rig = rig_of(tmp_path, *KINDS["stock"], "log_every=1")
    rig.warm_up(0.1)
    rig.close()
    assert capsys.readouterr().out == ""
    assert "[PERF]" in (tmp_path / "rig" / "said.txt").read_text(encoding="utf-8")


def test_the_steady_state_has_neither_warm_up_nor_exploring_nor_an_end():
    assert steady(configured(*DQN, "warmup_steps=9000")).warmup_steps == WARMUP
    now = steady(configured(*DQN, SPEED, "stop.max_minutes=1", "eval_every=10", "checkpoint_every=10"))
    assert (now.warmup_steps, now.eval_every, now.checkpoint_every, now.stop.max_minutes) == (200, 0, 0, None)
    assert now.algo.exploration_initial_eps == now.algo.exploration_final_eps


def test_iterations_are_counted_from_start_to_start():
    timer = IterationTimer(0.0, PhaseClock())
    timer.model = SimpleNamespace(num_timesteps=0)  # type: ignore[assignment]
    timer._on_rollout_start()
    assert timer._on_step()
    timer.model.num_timesteps = 64
    timer._on_rollout_start()
    assert timer.steps == 64
    assert not timer._on_step(), "one iteration is enough"


class Idle:
    """Stands for a rig."""

    off_policy, threads = False, "default"


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
    rigs: dict[str, Any] = {"now": Idle(), "changed": Idle()}
    samples: dict[str, dict[str, list[float]]] = {"now": {}, "changed": {}}
    told: list[str] = []
    measure(rigs, ["collect", "update"], 60.0, samples, told.append, rounds=3)
    assert order == [(part, rig) for part in ("collect", "update") for rig in rigs.values()] * 3
    assert samples["now"]["collect"] == pytest.approx([5e-6, 9e-6])
    assert samples["changed"]["update"] == pytest.approx([8e-6, 12e-6])
    assert told[-1] == "update 3/3"


def test_what_takes_long_is_measured_twice_only(order: list[tuple[str, Any]]):
    rig: Any = Idle()
    samples: dict[str, dict[str, list[float]]] = {"now": {}}
    measure({"now": rig}, ["collect"], 1e-9, samples)
    assert len(order) == LEAST_ROUNDS
    assert len(samples["now"]["collect"]) == 2, "so long a window needs no warm-up"


def test_a_disturbed_window_does_not_count_and_parts_within_others_need_theirs_once():
    assert typical([1.0, 1.0, 1.0, 9.0]) == 1.0
    rates = rates_of({"env": [2.0, 2.0], "train": [5.0], "logging": [0.0, 2.0, 2.0, 8.0]})
    assert rates == Rates(env=2.0, logging=2.0), "log lines fall due in some windows"
    assert ratios_of({"env": [3.0], "policy": [1.0]}, {"env": [2.0], "update": [1.0]}) == {"env": 1.5}
    rig: Any = Idle()
    assert bench.windows_of(rig, ["transport", "env", "storing", "replay", "logging"]) == ["collect", "train"]


def test_a_run_of_one_rollout_has_a_speed(tmp_path: Path):
    rig = rig_of(tmp_path, *CARTPOLE, "algo=ppo", "algo.n_steps=16", "batch_size=16", "total_timesteps=64")
    try:
        assert rig.train(0.01)["train"] > 0.0
    finally:
        rig.close()
