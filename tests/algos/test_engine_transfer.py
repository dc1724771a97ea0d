"""Page-locked copies: the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accelerated import SETTINGS, masked_model, weights
from fasttrain.algos.engine import EngineSettings, to_device
from fasttrain.algos.ppo import MaskablePPO
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of what goes through page-locked memory, in whose place there is ordinary one, which any machine has."""
    found: list[tuple[int, ...]] = []

    def pin(tensor: Any) -> Any:
        found.append(tuple(tensor.shape))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("keyed", [True, False])
def test_the_same_numbers_arrive(shapes: list[tuple[int, ...]], keyed: bool, masked: bool):
    observations = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    given, masks = {"a": observations, "b": np.arange(4)} if keyed else observations, observations > 0
    sent = [to_device(given, masks if masked else None, torch.device("cpu"), pinned) for pinned in (False, True)]
    assert len(shapes) == 1 + keyed + masked
    torch.testing.assert_close(*sent, rtol=0, atol=0, check_device=True)


def test_a_rollout_goes_through_page_locked_memory(shapes: list[tuple[int, ...]]):
    plain = masked_model(EngineSettings()).learn(80)
    model = masked_model(EngineSettings())
    model.engine.pinned = True  # type: ignore[attr-defined]
    model.learn(80)
    assert {*shapes} == {(5, 3), (5, 8)}
    assert torch.equal(weights(plain), weights(model))


def test_without_cuda_nothing_is_pinned():
    assert not masked_model(EngineSettings(pin_memory=True)).engine_now().pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_on_cuda_the_weights_are_those_of_plain_copies():
    ends = []
    for pinned in (False, True):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(EngineSettings(pin_memory=pinned))
        ends.append(weights(model.learn(160)))
        assert model.engine_now().pinned == pinned
    torch.testing.assert_close(*ends)
