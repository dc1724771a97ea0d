"""What engines share: settings, what a round came to, counters, what a checkpoint keeps, and page-locked copies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from accelerated import SETTINGS, filled, masked_model, weights
from fasttrain.algos.engine import EngineSettings, to_device
from fasttrain.algos.guard import Guard
from fasttrain.algos.ppo import MaskablePPO
from fasttrain.algos.step import explained_variance_term
from fasttrain.errors import EnvError
from toys import toy_gym_vec

KINDS = pytest.mark.parametrize("kind", ["torch", "kernels"])


def model_of(kind: str, **changes: Any) -> Any:
    return filled(masked_model(EngineSettings(kind=kind), **changes))


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"pin_memory": True, "threads": 4}, True),  # neither changes how a number is made
        ({"kind": "kernels"}, False),
        ({"fused_adam": True}, False),
        ({"compile_mode": "default"}, False),
        ({"amp_dtype": torch.bfloat16}, False),
        ({"gradient_accumulation": 2}, False),
    ],
)
def test_numbers_are_stocks_while_nothing_asks_for_others(changes: dict[str, Any], exact: bool):
    assert EngineSettings(**changes).exact == exact


@KINDS
def test_an_update_says_what_it_came_to(kind: str):
    """Both engines by the same names, a number for each minibatch; the divergence of the last epoch alone, as SB3's."""
    model = model_of(kind, clip_range_vf=0.2)
    done = model.update()
    per_minibatch = {name: len(term) for name, term in done.terms.items()}
    names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction")
    assert per_minibatch == {**dict.fromkeys(names, 8), "approx_kl": 4, "explained_variance": 1}
    assert (done.steps, done.epochs, done.stopped, done.blamed, done.expected_skips) == (8, 2, False, "", False)
    assert done.norms.shape == (8,)
    assert np.isfinite(done.norms).all()
    assert model.engine.gradient_updates == 8
    assert (
        done.terms["explained_variance"] == explained_variance_term(model.rollout_buffer.storage)["explained_variance"]
    )
    model.engine.guard = None
    assert model.update().norms.shape == (0,), "nobody asks for them"


@KINDS
def test_an_update_that_stops_says_so(kind: str):
    done = model_of(kind, target_kl=1e-12, learning_rate=0.1).update()
    assert (done.steps, done.epochs, done.stopped) == (1, 1, True)
    assert len(done.terms["approx_kl"]) == 2, "the minibatch that stopped it is seen"
    assert done.norms.shape == (1,)


@KINDS
def test_who_is_to_blame_is_named_and_the_weights_stay(kind: str):
    model = model_of(kind)
    before = weights(model)
    model.rollout_buffer.storage.returns[:] = np.nan
    done = model.update()
    assert (done.steps, done.skipped, done.blamed) == (0, 8, "the loss")
    assert (model.engine.gradient_updates, model.engine.skipped_steps) == (0, 8)
    assert torch.equal(weights(model), before)


@KINDS
def test_another_engine_goes_on_from_its_state(kind: str):
    model, other = (model_of(kind, n_epochs=epochs) for epochs in (2, 1))
    for each in (model, other):
        each.engine.guard = Guard("rollback")
        each.train()
    assert other.engine.gradient_updates == 4
    state, arrays = model.engine.state()
    assert arrays, "copies for a rollback"
    other.engine.load(json.loads(json.dumps(state)), arrays, other)
    assert other.engine.gradient_updates == model.engine.gradient_updates == 8
    assert other.engine.guard.state()[0] == model.engine.guard.state()[0]
    model.engine.guard, model.engine.skipped_steps = None, 3
    state, arrays = model.engine.state()
    assert arrays == {}
    other.engine.load(state, arrays, None)
    assert other.engine.skipped_steps == 3, "without a guard there are the counters"


def test_torchs_own_words_get_the_place(monkeypatch: pytest.MonkeyPatch):
    engine = masked_model(EngineSettings()).engine
    good, bad = np.zeros((1, 3), np.float32), np.full((1, 3), np.nan, np.float32)

    def fail_with(message: str) -> None:
        def act(*_: Any) -> Any:
            raise RuntimeError(message)

        monkeypatch.setattr(engine.view, "act", act)

    fail_with("probability tensor contains either `inf`, `nan` or element < 0")
    with pytest.raises(EnvError, match="its weights are too large"):
        engine.act(good, None)
    with pytest.raises(EnvError, match="the observation of env 0 is not finite"):
        engine.act(bad, None)
    engine.guard = None
    with pytest.raises(RuntimeError, match="probability tensor"):
        engine.act(bad, None)
    fail_with("shapes")
    with pytest.raises(RuntimeError, match="shapes"):
        engine.act(good, None)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of what goes through page-locked memory, in whose place there is ordinary one, which any machine has."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: found.append(tuple(one.shape)) or one.clone())
    return found


@pytest.mark.parametrize(("keyed", "masked"), [(True, True), (False, False)])
def test_the_same_numbers_arrive_by_page_locked_memory(shapes: list[tuple[int, ...]], keyed: bool, masked: bool):
    observations = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    given, masks = {"a": observations, "b": np.arange(4)} if keyed else observations, observations > 0
    sent = [to_device(given, masks if masked else None, torch.device("cpu"), pinned) for pinned in (False, True)]
    assert len(shapes) == 1 + keyed + masked
    torch.testing.assert_close(*sent, rtol=0, atol=0, check_device=True)


def test_a_rollout_goes_through_page_locked_memory(shapes: list[tuple[int, ...]]):
    plain = masked_model(EngineSettings()).learn(80)
    model = masked_model(EngineSettings())
    model.engine.pinned = True  # type: ignore[attr-defined]
    assert torch.equal(weights(plain), weights(model.learn(80)))
    assert {*shapes} == {(5, 3), (5, 8)}
    assert not masked_model(EngineSettings(pin_memory=True)).engine_now().pinned, "it is on the CPU"


@pytest.mark.cuda
def test_on_cuda_the_weights_are_those_of_plain_copies():
    ends = []
    for pinned in (False, True):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(EngineSettings(pin_memory=pinned))
        ends.append(weights(model.learn(160)))
        assert model.engine_now().pinned == pinned
    torch.testing.assert_close(*ends)
