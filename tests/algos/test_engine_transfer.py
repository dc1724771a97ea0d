"""Page-locked copies: the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accelerated import SETTINGS, masked_model, weights
from fasttrain.algos.engine import EngineSettings, Transfer
from fasttrain.algos.ppo import MaskablePPO
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)


def pinned_transfer(monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, list[tuple[int, ...]]]:
    """With ordinary memory, which any machine has; and the shapes of what went through it."""
    shapes: list[tuple[int, ...]] = []
    transfer = Transfer(torch.device("cpu"))
    transfer.pinned = True

    def pin(tensor: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return transfer, shapes


def test_the_same_numbers_arrive(monkeypatch: pytest.MonkeyPatch):
    plain, (pinned, _) = Transfer(torch.device("cpu")), pinned_transfer(monkeypatch)
    observations = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    keyed = {"a": observations, "b": np.arange(4)}
    masks = observations > 0
    assert torch.equal(plain.observations(observations), pinned.observations(observations))
    for key, part in plain.observations(keyed).items():
        assert torch.equal(part, pinned.observations(keyed)[key])
    assert torch.equal(plain.masks(masks), pinned.masks(masks))


def test_a_rollout_goes_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch):
    plain = masked_model(EngineSettings()).learn(80)
    model = masked_model(EngineSettings())
    model.engine_now().transfer, shapes = pinned_transfer(monkeypatch)
    model.learn(80)
    assert {*shapes} == {(5, 3), (5, 8)}
    assert torch.equal(weights(plain), weights(model))


def test_without_cuda_nothing_is_pinned():
    assert not masked_model(EngineSettings(pin_memory=True)).engine_now().transfer.pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_on_cuda_the_weights_are_those_of_plain_copies():
    ends = []
    for pinned in (False, True):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(EngineSettings(pin_memory=pinned))
        ends.append(weights(model.learn(160)))
        assert model.engine_now().transfer.pinned == pinned
    torch.testing.assert_close(*ends)
