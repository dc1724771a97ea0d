from __future__ import annotations

import os
import re
import signal
from typing import Any

import gymnasium as gym
import pytest
from sb3_contrib import RecurrentPPO

import fasttrain
from conftest import RunCommand
from fasttrain.algos.engine import EngineSettings
from fasttrain.runs.callbacks import replay_line, sequences_line
from fasttrain.runs.stopping import REPEAT_S, StopFlag
from toys import seeded_vec, single_thread

OF_SLURM = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, *OF_SLURM])
def test_a_signal_asks_to_stop_and_the_handler_goes_back(number: signal.Signals):
    before = signal.getsignal(number)
    stop = StopFlag()
    with stop.listening():
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal there")
def test_a_terminal_that_closes_stops_the_run_unless_under_nohup(monkeypatch: pytest.MonkeyPatch):
    silenced: list[bool] = []
    monkeypatch.setattr("fasttrain.runs.stopping.silence_terminals", lambda: silenced.append(True))
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, stops in ((signal.SIG_IGN, False), (signal.SIG_DFL, True)):
            signal.signal(signal.SIGHUP, handler)
            stop = StopFlag()
            with stop.listening():
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.requested == bool(silenced) == stops
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_same_signal_twice_at_once_is_one_and_later_it_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    monkeypatch.setattr("fasttrain.runs.stopping.time.monotonic", lambda: now[0])
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    before = signal.getsignal(signal.SIGTERM)
    stop = StopFlag()
    with stop.listening():
        for now[0], expected in ((10.0, 0), (10.0 + REPEAT_S, 0), (10.1 + REPEAT_S, 1)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.requested, len(raised)) == (True, expected)
    assert signal.getsignal(signal.SIGTERM) is before


def test_fill_size_and_prefetching_are_said(fasttrain: RunCommand):
    done = fasttrain(
        "env.id=CartPole-v1", "algo=dqn", "engine=fast", "vec_env=dummy", "num_envs=4", "total_timesteps=400",
        "warmup_steps=100", "log_every=20", "algo.buffer_size=300", "batch_size=16", "prefetch=on", "eval.episodes=2",
    ).ok()  # fmt: skip
    summary, perf = done.json("summary.json"), done.json("perf.json")
    replay = summary["replay"]
    assert perf["replay"] == replay
    assert "buffer 100%" in perf["lines"][-1]
    assert "prefetch_hits" in perf["lines"][-1]
    assert (replay["transitions"], replay["capacity"]) == (300, 300)
    assert replay["memory_bytes"] == 300 * (2 * 16 + 8 + 3 * 4)
    assert "replay buffer: 300 of 300 transitions, 0 MB when full" in done.out
    assert replay["prefetch"]["hits"] + replay["prefetch"]["waits"] == summary["updates"]
    assert "prefetched batches" in done.out
    facts = {"transitions": 1000, "capacity": 5000, "memory_bytes": 2_000_000}
    assert replay_line(facts) == "replay buffer: 1,000 of 5,000 transitions, 2 MB when full"


one_thread = pytest.fixture(autouse=True)(single_thread)


def line_of(kind: Any, **settings: Any) -> str:
    arguments = {"n_steps": 64, "batch_size": 128, "n_epochs": 1, "seed": 3, "device": "cpu"} | settings
    env = seeded_vec(lambda: gym.make("CartPole-v1"))
    model = kind("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 16}, **arguments)
    assert sequences_line(model) == "", "nothing was collected"
    return sequences_line(model.learn(256))


def test_how_many_sequences_and_how_much_padding():
    padded = line_of(fasttrain.RecurrentPPO)
    kernels = line_of(fasttrain.RecurrentPPO, engine="kernels")
    grouped = line_of(fasttrain.RecurrentPPO, engine=EngineSettings(fused_adam=True))
    for line, same in ((padded, True), (kernels, False)):
        ours, share = re.findall(r"(\d+) %", line)  # of episodes of some 20 steps, 2 envs a minibatch
        assert 10 < int(share) < 80
        assert ours == (share if same else "0")
        assert 2 < float(line.split()[1]) < 16
    ours, share = (int(found) for found in re.findall(r"(\d+) %", grouped))
    assert 0 < ours <= share
    assert line_of(RecurrentPPO) == "", "stock's own buffer is not read"
