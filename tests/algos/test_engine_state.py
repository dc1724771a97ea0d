"""What engines share: settings, what a round came to, counters, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from accelerated import filled, masked_model
from fasttrain.algos.engine import EngineSettings, Statistics, explained
from fasttrain.algos.guard import Guard
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
KINDS = pytest.mark.parametrize("kind", ["torch", "kernels"])


def test_a_word_stands_for_settings():
    assert EngineSettings.of("torch") == EngineSettings()
    assert EngineSettings.of("kernels") == EngineSettings(kind="kernels")
    settings = EngineSettings(amp_dtype=torch.bfloat16)
    assert EngineSettings.of(settings) is settings


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


def test_steps_that_were_not_taken_are_those_without_a_finite_norm():
    done = Statistics({}, np.array([1.0, np.nan, np.inf, 0.0]), steps=2, epochs=1)
    assert done.skipped == 2
    assert Statistics({}, np.zeros(0), steps=3, epochs=1).skipped == 0, "nobody watched"


@KINDS
def test_rounds_add_up(kind: str):
    engine = masked_model(EngineSettings(kind=kind)).engine
    for norms in (np.array([1.0, np.nan]), np.array([2.0])):
        done = Statistics({}, norms, steps=1, epochs=1)
        assert engine.counted(done) is done
    assert (engine.gradient_updates, engine.skipped_steps) == (2, 1)


@KINDS
def test_an_update_says_what_it_came_to(kind: str):
    """Both engines by the same names, a number for each minibatch; the divergence of the last epoch alone, as SB3's."""
    model = filled(masked_model(EngineSettings(kind=kind), clip_range_vf=0.2))
    done = model.update()
    assert set(done.terms) == {
        "loss", "policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction", "approx_kl",
        "explained_variance",
    }  # fmt: skip
    per_minibatch = {name: len(term) for name, term in done.terms.items()}
    assert per_minibatch == {**dict.fromkeys(done.terms, 8), "approx_kl": 4, "explained_variance": 1}
    assert (done.steps, done.epochs, done.stopped, done.blamed, done.expected_skips) == (8, 2, False, "", False)
    assert done.norms.shape == (8,)
    assert np.isfinite(done.norms).all()
    assert model.engine.gradient_updates == 8
    assert done.terms["explained_variance"] == explained(model.rollout_buffer.storage)["explained_variance"]


@KINDS
def test_an_update_that_stops_says_so(kind: str):
    model = filled(masked_model(EngineSettings(kind=kind), target_kl=1e-12, learning_rate=0.1))
    done = model.update()
    assert (done.steps, done.epochs, done.stopped) == (1, 1, True)
    assert len(done.terms["approx_kl"]) == 2, "the minibatch that stopped it is seen"
    assert done.norms.shape == (1,)


@KINDS
def test_without_a_guard_no_norm_is_kept(kind: str):
    model = filled(masked_model(EngineSettings(kind=kind)))
    model.engine.guard = None
    assert model.update().norms.shape == (0,)


@KINDS
def test_who_is_to_blame_is_named_and_the_weights_stay(kind: str):
    model = filled(masked_model(EngineSettings(kind=kind)))
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.rollout_buffer.storage._returns[:] = np.nan
    done = model.update()
    assert (done.steps, done.skipped, done.blamed) == (0, 8, "the loss")
    assert (model.engine.gradient_updates, model.engine.skipped_steps) == (0, 8)
    assert all(torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))


@KINDS
def test_another_engine_goes_on_from_its_state(kind: str):
    model, other = (filled(masked_model(EngineSettings(kind=kind), n_epochs=epochs)) for epochs in (2, 1))
    for each in (model, other):
        each.engine.guard = Guard("rollback")
        each.train()
    assert other.engine.gradient_updates == 4
    state, arrays = model.engine.state()
    assert arrays, "copies for a rollback"
    other.engine.load(json.loads(json.dumps(state)), arrays, other)
    assert other.engine.gradient_updates == model.engine.gradient_updates == 8
    assert other.engine.guard.state()[0] == model.engine.guard.state()[0]


@KINDS
def test_without_a_guard_there_are_the_counters(kind: str):
    engine = masked_model(EngineSettings(kind=kind)).engine
    engine.guard, engine.skipped_steps = None, 3
    state, arrays = engine.state()
    assert arrays == {}
    other = masked_model(EngineSettings(kind=kind)).engine
    other.load(state, arrays, None)
    assert other.skipped_steps == 3
