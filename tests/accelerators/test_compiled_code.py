"""Compiled acting and loss: what is compiled, for which sizes, and that nothing is copied."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accelerated import SETTINGS, a_batch, box_model, counting, filled, loss_terms, masked_model, weights
from fasttrain.accelerators.compiled import Coefficients, CompiledPPO, inductor, num_rows, untouched
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import MaskablePPO
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
NUMBERS = Coefficients(*map(torch.tensor, (0.2, 0.1, 0.01, 0.5)))
NO_COMPILER = shutil.which("g++") is None and shutil.which("clang++") is None


def traced(function: Any) -> Any:
    """The compiler's front half: traces forward and backward as one graph each, and generates no code."""
    return torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)


def frames() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own parts
        torch.compiler.reset()
        yield


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(amp_dtype=torch.bfloat16)])
def test_acting_and_loss_are_one_graph_each(settings: EngineSettings):
    model = filled(masked_model(settings))
    batch = a_batch(model)
    head = model.engine_now().new_view()
    compiled = CompiledPPO(model.engine, traced)
    compiled.acting_sizes, compiled.batch_sizes = {5}, {20}
    before = frames()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if settings.amp_dtype is None else {"rtol": 0.02, "atol": 0.02}
    with torch.no_grad():
        for ours, theirs in zip(compiled.outputs(batch.observations[:5]), head.outputs(batch.observations[:5]),
                                strict=True):  # fmt: skip
            torch.testing.assert_close(ours, theirs, **tolerance)
    found = []
    for terms in (compiled.loss(batch, NUMBERS, True), loss_terms(head, batch, NUMBERS)):
        gradients = torch.autograd.grad(terms["loss"], list(model.policy.parameters()))
        found.append(
            (torch.stack([*terms.values()]).detach(), torch.cat([gradient.flatten() for gradient in gradients]))
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    assert frames() - before == 2
    compiled.loss(batch, Coefficients(*map(torch.tensor, (0.1, 0.2, 0.02, 0.4))), True)
    assert frames() - before == 2, "a schedule must not compile anew"


def test_compiled_code_sees_new_weights():
    model = filled(masked_model(EngineSettings()))
    compiled = CompiledPPO(model.engine, traced)
    compiled.acting_sizes = {5}
    observations = a_batch(model).observations[:5]
    with torch.no_grad():
        before = [part.clone() for part in compiled.outputs(observations)]
        for parameter in model.policy.parameters():
            parameter.mul_(1.5).add_(0.1)
        after = compiled.outputs(observations)
        expected = compiled.view.outputs(observations)
    for old, new, eager in zip(before, after, expected, strict=True):
        assert not torch.allclose(old, new)
        torch.testing.assert_close(new, eager)


def test_other_sizes_go_the_eager_way():
    model = filled(masked_model(EngineSettings()))
    calls: list[str] = []
    compiled = CompiledPPO(model.engine, counting(calls))
    compiled.acting_sizes, compiled.batch_sizes = {5}, {20}
    batch = a_batch(model, 80)
    compiled.outputs(batch.observations[:4])
    compiled.loss(batch, NUMBERS, True)
    assert calls == []
    compiled.outputs(batch.observations[:5])
    compiled.loss(a_batch(model, 20), NUMBERS, True)
    assert calls == ["outputs", "_plain_loss"]


def test_a_policy_that_acts_by_its_own_methods_acts_eagerly():
    model = filled(box_model(EngineSettings()))
    compiled = CompiledPPO(model.engine, counting(calls := []))
    compiled.batch_sizes = {16}
    assert torch.isfinite(compiled.loss(a_batch(model, 16), NUMBERS, True)["loss"])
    assert calls == ["_plain_loss"]


def test_another_policy_is_not_served():
    ours, other = masked_model(EngineSettings()), masked_model(EngineSettings())
    compiled = CompiledPPO(ours.engine, counting([]))
    assert compiled.serves(view_of(ours.policy, ours.action_space))
    assert not compiled.serves(view_of(other.policy, ours.action_space))
    ours.policy.forward = ours.policy.forward
    assert not compiled.serves(view_of(ours.policy, ours.action_space)), "it acts in a way of its own now"


@pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler for CPU code")
def test_the_real_compiler_trains():
    model = masked_model(EngineSettings(compile_mode="default"), policy_kwargs={"net_arch": [4]})
    engine = model.engine
    before = frames()
    model.learn(160)
    assert engine.compiled.failure == ""
    assert frames() - before == 2
    assert engine is model.engine, "the same from its making to its end"
    assert engine.warmup_s > 0
    eager = masked_model(EngineSettings(), policy_kwargs={"net_arch": [4]}).learn(160)
    torch.testing.assert_close(weights(model), weights(eager), rtol=0, atol=1e-4)


def test_graphs_come_with_the_mode_and_what_they_put_out_is_kept(monkeypatch: pytest.MonkeyPatch):
    modes, marks, memory = [], [], torch.zeros(2)

    def compiled(function: Any, mode: str, dynamic: bool) -> Any:
        modes.append(mode)
        return lambda number: (memory.fill_(number), None)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    for mode in ("default", "reduce-overhead", "max-autotune"):
        inductor(mode, graphs=False)(len)
    graphed = inductor("reduce-overhead", graphs=True)(len)
    assert modes == ["default", "default", "max-autotune-no-cudagraphs", "reduce-overhead"]
    first, second = graphed(1.0), graphed(2.0)
    assert (first[0].tolist(), second[0].tolist(), first[1], len(marks)) == ([1.0, 1.0], [2.0, 2.0], None, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
@pytest.mark.parametrize("parts", [1, 2])
def test_cuda_graphs_train_as_eager_does(parts: int):
    ends = []
    for mode in (None, "reduce-overhead"):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(EngineSettings(compile_mode=mode, gradient_accumulation=parts))
        model.learn(240)
        assert model.engine.compiled is None or model.engine.compiled.failure == ""
        ends.append(weights(model).cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-3)


def test_the_policy_is_left_untouched():
    model = masked_model(EngineSettings())
    policy = model.policy
    policy.norm = nn.BatchNorm1d(3)
    policy.set_training_mode(False)
    next(policy.parameters()).grad = kept = torch.ones_like(next(policy.parameters()))
    before, random = weights(model), torch.get_rng_state()
    running = policy.norm.running_mean.clone()
    with untouched(policy):
        policy.set_training_mode(True)
        policy.norm(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
    assert torch.equal(weights(model), before)
    assert torch.equal(policy.norm.running_mean, running)
    assert next(policy.parameters()).grad is kept
    assert policy.norm.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert not policy.training


def test_rows_of_any_observations():
    assert num_rows(torch.zeros(4, 2)) == 4
    assert num_rows({"a": torch.zeros(3)}) == 3
