"""Our replay buffers as instances of SB3's, with the window that stock's would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.stock import NStepStorage, replay_class, window_of

BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "n_steps", "asked", "stock"),
    [
        (BOX, 1, None, ReplayBuffer),
        (BOX, 3, None, NStepReplayBuffer),
        (BOX, 1, NStepReplayBuffer, NStepReplayBuffer),
        (BOX, 3, ReplayBuffer, ReplayBuffer),
        (spaces.Dict({"a": BOX}), 1, None, DictReplayBuffer),
        (spaces.Dict({"a": BOX}), 1, DictReplayBuffer, DictReplayBuffer),
    ],
)
def test_it_is_an_instance_of_what_stock_takes(space: Any, n_steps: int, asked: Any, stock: Any):
    buffer = replay_class(space, n_steps, asked)(8, space, spaces.Discrete(2))
    assert isinstance(buffer, ReplayStorage)
    assert isinstance(buffer, stock)
    assert isinstance(buffer, NStepReplayBuffer) == (stock is NStepReplayBuffer)


def test_windows_are_the_algorithms_unless_a_class_was_asked_for():
    assert window_of(4, 0.9, None) == {"n_steps": 4, "gamma": 0.9}
    assert window_of(4, 0.9, ReplayBuffer) == {"n_steps": 1, "gamma": 0.9}
    assert window_of(4, 0.9, NStepReplayBuffer) == {"n_steps": 3, "gamma": 0.99}, "stock's own defaults"


@pytest.mark.parametrize("n_steps", [1, 3])
def test_samples_are_those_of_stocks_buffer(n_steps: int):
    stock, ours = (
        kind(12, BOX, spaces.Discrete(4), "cpu", 2, n_steps=n_steps, gamma=0.9)
        for kind in (NStepReplayBuffer, NStepStorage)
    )
    rng = np.random.default_rng(1)
    for _ in range(9):
        seen, following = rng.standard_normal((2, 2, 2)).astype(np.float32)
        step = seen, following, rng.integers(0, 4, (2, 1)), rng.standard_normal(2), rng.random(2) < 0.2, [{}, {}]
        for buffer in (stock, ours):
            buffer.add(*step)
    np.random.seed(4)
    expected = stock.sample(20)
    np.random.seed(4)
    found = ours.sample(20)
    for name, tensor in expected._asdict().items():
        assert torch.equal(getattr(found, name), tensor), name
