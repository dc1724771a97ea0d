"""What is said at the end of the sequences that a recurrent policy learned from."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import pytest
from sb3_contrib import RecurrentPPO

import fasttrain
from fasttrain.algos.engine import EngineSettings
from fasttrain.runs.callbacks import sequences_line
from toys import seeded_vec, single_thread

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
