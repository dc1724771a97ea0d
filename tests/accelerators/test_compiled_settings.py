"""What both PyTorch engines share: for whom they were made, what is left to compile, how Adam steps, the scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerated import filled, masked_model, one_step, with_compiler
from fasttrain.accelerators.compiled import repeated
from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.step import TorchStep
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)


def model_of(kind: str, settings: EngineSettings = EngineSettings()) -> Any:  # noqa: B008 - frozen
    if kind == "ppo":
        return masked_model(settings)
    return DQN("MlpPolicy", toy_gym_vec(), buffer_size=100, device="cpu", seed=0, engine=settings)


BOTH = pytest.mark.parametrize("kind", ["ppo", "dqn"])


@BOTH
def test_it_fits_the_policy_it_was_made_for_where_that_lay_then(kind: str):
    engine = model_of(kind).engine
    assert engine.fits(engine.policy)
    assert not engine.fits(model_of(kind).policy)
    assert not engine.fits(engine.policy.to("meta")), "made for the CPU"


@BOTH
def test_what_does_not_compile_is_told_and_not_tried_again(kind: str):
    def fails(_: Any) -> Any:
        def call(*_: Any) -> Any:
            raise ZeroDivisionError("of the compiler's\nand more")

        return call

    model = model_of(kind, EngineSettings(compile_mode="default"))
    with_compiler(model, fails)
    assert model.prepare(model.env) == "torch.compile failed: ZeroDivisionError: of the compiler's"
    model.batch_size += 1
    assert model.prepare(model.env) == ""


@BOTH
@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (EngineSettings(), "foreach"),
        (EngineSettings(pin_memory=True), "foreach"),
        (EngineSettings(fused_adam=True), "fused"),
        (EngineSettings(gradient_accumulation=2), "fused"),
    ],
)
def test_adam_steps_by_stocks_operations_or_by_its_fused_kernel(kind: str, settings: EngineSettings, flag: str):
    engine = model_of(kind, settings).engine
    (group,) = engine.policy.optimizer.param_groups
    before = dict(group)
    with TorchStep(engine, 1.0).stepping():
        assert {name for name in ("foreach", "fused") if group[name]} == {flag}
    assert dict(group) == before


def test_the_gradient_scaler_is_part_of_a_checkpoint():
    half = EngineSettings(amp_dtype=torch.float16)
    model = filled(masked_model(half))
    model.engine_now().scaler._init_scale = 1e30
    model.train()
    assert model.engine.skipped_steps > 0
    state, arrays = model.engine.state()
    other, plain = masked_model(half), masked_model(EngineSettings())
    other.engine.load(state, arrays, other)
    assert other.engine.scaler.state_dict() == model.engine.scaler.state_dict()
    plain.engine.load(state, arrays, plain)
    assert (plain.engine.scaler, plain.engine.state()[0]["scaler"]) == (None, None)


def test_steps_are_watched_where_there_is_a_guard_or_a_scaler():
    for settings, guarded, watched in (
        (EngineSettings(), True, 1),
        (EngineSettings(), False, 0),
        (EngineSettings(amp_dtype=torch.float16), False, 1),
    ):
        model = filled(masked_model(settings))
        model.engine.guard = model.engine.guard if guarded else None
        _, done = one_step(model)
        assert (len(done.norms), done.blamed) == (watched, "")


def test_the_first_gradient_that_is_not_finite_is_blamed():
    model = filled(masked_model(EngineSettings()))
    biases = iter((model.policy.value_net.bias, model.policy.action_net.bias))

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf

    hook = next(biases).register_hook(spoilt)
    model.policy.action_net.bias.register_hook(lambda gradient: hook.remove() or gradient)
    _, done = one_step(model)
    assert done.blamed == "the gradient of parameter value_net.bias"
    assert done.skipped == 1


def test_rows_over_and_over():
    assert repeated(torch.tensor([1, 2, 3]), 5).tolist() == [1, 2, 3, 1, 2]
    cut = repeated({"a": torch.tensor([1, 2, 3])}, 2)
    assert cut["a"].tolist() == [1, 2]
