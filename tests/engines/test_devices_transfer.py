"""Pinned staging: the same numbers through buffers that are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerated import SETTINGS, masked_model, weights
from fasttrain.algos.ppo import MaskablePPO
from fasttrain.engines.devices import PinnedTransfer
from fasttrain.engines.engine import EngineSettings
from fasttrain.engines.torch import Transfer
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)


class Pinned(PinnedTransfer):
    """With ordinary memory, which any machine has."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []
        super().__init__(torch.device("cpu"), self._make)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.made.append((shape, dtype))
        return torch.empty(shape, dtype=dtype)


def test_the_same_numbers_arrive():
    plain, pinned = Transfer(torch.device("cpu")), Pinned()
    observations = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    keyed = {"a": observations, "b": np.arange(4)}
    masks = observations > 0
    assert torch.equal(plain.observations(observations), pinned.observations(observations))
    for key, part in plain.observations(keyed).items():
        assert torch.equal(part, pinned.observations(keyed)[key])
    assert torch.equal(plain.masks(masks), pinned.masks(masks))
    actions = torch.tensor([3, 1, 2, 0])
    assert np.array_equal(plain.actions(actions), pinned.actions(actions))


def test_buffers_are_kept_and_actions_are_the_callers():
    pinned = Pinned()
    first = pinned.actions(torch.tensor([1, 2]))
    second = pinned.actions(torch.tensor([3, 4]))
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])
    for _ in range(3):
        pinned.observations(np.zeros((2, 3), np.float32))
        pinned.observations(np.zeros((1, 3), np.float32))  # a group of workers
    assert pinned.made == [((2,), torch.int64), ((2, 3), torch.float32), ((1, 3), torch.float32)]


def test_a_rollout_goes_through_the_buffers():
    plain = masked_model(EngineSettings()).learn(80)
    model = masked_model(EngineSettings())
    transfer = model.engine_now().transfer = Pinned()
    model.learn(80)
    assert {shape for shape, _ in transfer.made} == {(5, 3), (5, 8), (5,)}
    assert torch.equal(weights(plain), weights(model))


def test_without_cuda_nothing_is_pinned():
    model = masked_model(EngineSettings(pin_memory=True))
    assert type(model.engine_now().transfer) is Transfer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_on_cuda_the_buffers_are_page_locked():
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
    model.use_engine(EngineSettings(pin_memory=True))
    model.learn(160)
    transfer = model.engine_now().transfer
    assert isinstance(transfer, PinnedTransfer)
    assert all(buffer.is_pinned() for buffer in transfer._buffers.values())
