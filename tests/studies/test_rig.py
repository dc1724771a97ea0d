"""A run on the bench: its parts measured one by one leave it able to train on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.envs import env_facts, this_machine
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve
from fasttrain.studies import rig as bench
from fasttrain.studies.rig import WARMUP, Beat, Rig, steady
from pig_games import overrides
from toys import single_thread

CARTPOLE = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=4", "torch_threads=1", "algo.net_arch=[8]")
PPO = (*CARTPOLE, "algo=ppo", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=2")
DQN = (*CARTPOLE, "algo=dqn", "warmup_steps=200", "batch_size=16", "total_timesteps=400", "updates_per_step=2")
KINDS = {
    "ours": ("+profile=speed", *PPO),
    "stock": ("+profile=baseline", *PPO),
    "recurrent": ("+profile=baseline", *PPO, "algo=recurrent_ppo", "algo.lstm_hidden_size=8"),
    "our recurrent": ("+profile=speed", *PPO, "algo=recurrent_ppo", "algo.lstm_hidden_size=16"),
    "our DQN": ("+profile=speed", *DQN),
    "DQN in rounds": ("+profile=speed", *DQN, "algo.train_freq=4", "updates_per_step=-1"),
    "stock DQN": ("+profile=baseline", *DQN),
    "shared": ("+profile=speed", *PPO, "vec_env=shared", "num_workers=2"),
    "async": ("+profile=speed", *PPO, "vec_env=shared", "num_workers=2", "schedule=first_ready"),
    "normalised": ("+profile=speed", *DQN, "env.normalize=[obs]"),
    "native": ("+profile=speed", "num_envs=8", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1"),
    "engines": ("+profile=speed", *overrides(), "num_envs=4", "algo.rollout_size=64", "batch_size=32",
                "algo.n_epochs=1"),
}  # fmt: skip
single = pytest.fixture(single_thread, autouse=True)


def rig_of(folder: Path, *arguments: str) -> Rig:
    kept = {text.partition("=")[0]: text for text in arguments}  # the last of a key
    config = configured(*kept.values())
    return Rig(resolve(config, {"num_envs": "command line"}, env_facts(config), this_machine()), folder / "rig")


@pytest.fixture(params=sorted(KINDS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = rig_of(tmp_path, *KINDS[request.param])
    yield rig
    rig.close()


def test_every_part_can_be_measured_and_training_goes_on(rig: Rig):
    rig.warm_up(0.2)
    samples: dict[str, list[float]] = {}
    names = bench.windows_of(rig, ["env", "policy", "update", "replay", "transport", "logging", "train"])
    before = rig.model.num_timesteps
    bench.measure({"now": rig}, names, 0.06, {"now": samples}, rounds=3)
    wanted = {"env", "policy", "storing", "update", "logging", "train"}
    wanted |= {"replay"} if rig.off_policy else set()
    in_step = rig.shared is not None and rig.config.schedule == "lockstep"
    wanted |= {"transport"} if in_step else set()
    assert set(samples) == wanted
    assert all(value > 0 for part in wanted - {"transport"} for value in samples[part])
    rates = bench.rates_of(samples)
    assert rates.update is not None
    if rates.transport is not None and rates.env is not None:
        assert rates.transport <= rates.env
    trained = rig.model.num_timesteps
    assert trained > before
    rig.train(0.01)
    assert rig.model.num_timesteps > trained
    assert all(torch.isfinite(parameter).all() for parameter in rig.model.policy.parameters())


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Rig]:
    rig = rig_of(tmp_path, *KINDS["ours"])
    rig.warm_up(0.1)
    yield rig
    rig.close()


def test_measuring_parts_changes_neither_weights_nor_step_count(ours: Rig):
    weights = [parameter.detach().clone() for parameter in ours.model.policy.parameters()]
    steps = ours.model.num_timesteps
    for name in ("collect", "update"):
        bench.WINDOWS[name](ours, 0.01)
    assert ours.model.num_timesteps == steps
    now = list(ours.model.policy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert np.array_equal(ours.model._last_obs, ours.run.env.buf_obs[None])


def test_the_update_does_all_its_minibatches(ours: Rig):
    before = ours.model.engine.gradient_updates
    window = bench.update_window(ours, 0.0)
    assert ours.model.engine.gradient_updates - before == 2 * 64 // 32
    assert window["update"] > 0


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


def test_workers_that_run_ahead_count_by_their_mean(tmp_path: Path):
    rig = rig_of(tmp_path, *KINDS["async"])
    rig.warm_up(0.1)
    window = bench.collect_window(rig, 0.05)
    assert set(window) == {"env", "policy", "storing"}
    assert all(value > 0 for value in window.values())
    assert rig.model.collector.schedule == "first_ready", "collecting in lockstep was for the window alone"
    rig.close()


def test_what_limits_games_with_engines_is_told_with_what_to_try(tmp_path: Path):
    arguments = list(KINDS["engines"])
    rig = rig_of(tmp_path, *arguments, *overrides("--think-ms", "50"))
    told, tries = rig.engines(0.3)
    rig.close()
    found = re.match(r"4 games ÷ ([\d.]+) ms a decision = ([\d,]+) decisions/s; with a policy", told)
    assert found
    assert float(found[1]) >= 50
    assert tries == ["num_envs=8", "daemons.count=2", "daemons.games_per_daemon=4"]
    assert "The engines mostly wait" in told


def test_logging_is_what_the_runs_own_lines_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rig = rig_of(tmp_path, *KINDS["ours"], "log_every=4", "train_log_enabled=true")
    rig.warm_up(0.1)
    monkeypatch.setattr("fasttrain.runs.callbacks.RunCallback._write_logs", lambda _: time.sleep(0.01))
    window = rig.train(0.05)
    assert 0.01 / 64 <= window["logging"] < window["train"], "a line at every rollout of 64 steps"
    rig.close()


def test_what_a_run_says_goes_to_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rig = rig_of(tmp_path, *KINDS["stock"], "log_every=1")
    rig.warm_up(0.1)
    rig.close()
    assert capsys.readouterr().out == ""
    assert "[PERF]" in (tmp_path / "rig" / "said.txt").read_text(encoding="utf-8")


def test_the_steady_state_has_neither_warm_up_nor_exploring_nor_an_end():
    config = configured(*DQN, "+profile=speed", "stop.max_minutes=1", "eval_every=10", "checkpoint_every=10")
    now = steady(configured(*[text for text in DQN if "warmup" not in text], "warmup_steps=9000"))
    assert now.warmup_steps == WARMUP
    now = steady(config)
    assert (now.warmup_steps, now.eval_every, now.checkpoint_every, now.stop.max_minutes) == (200, 0, 0, None)
    assert now.algo.exploration_initial_eps == now.algo.exploration_final_eps


def test_iterations_are_counted_from_start_to_start():
    class Model:
        num_timesteps = 0

    beat = Beat(0.0, PhaseClock())
    beat.model = Model()  # type: ignore[assignment]
    beat._on_rollout_start()
    assert beat._on_step()
    beat.model.num_timesteps = 64
    beat._on_rollout_start()
    assert beat.steps == 64
    assert not beat._on_step(), "one iteration is enough"


def test_how_parts_go_together_is_read_from_the_configuration(tmp_path: Path):
    rig = rig_of(tmp_path, *KINDS["async"])
    flow = rig.flow(EnvFacts(False, None, cpu_share=0.25), Machine(8, False, False))
    rig.close()
    assert (flow.groups, flow.cores, flow.env_cores) == (True, 8, 0.5)
