"""torch.compile around PPO and DQN: what is compiled, for which sizes; that it learns the same and fails harmlessly."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from accelerated import (
    SETTINGS,
    a_batch,
    box_model,
    counting,
    filled,
    loss_terms,
    masked_model,
    toy_dqn,
    weights,
    with_compiler,
)
from fasttrain.accelerators import compiled as of_compiled
from fasttrain.accelerators.compiled import Coefficients, CompiledPPO
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import MaskablePPO
from toys import toy_gym_vec

COMPILE = EngineSettings(compile_mode="default")
NUMBERS = Coefficients(*map(torch.tensor, (0.2, 0.1, 0.01, 0.5)))
NO_COMPILER = shutil.which("g++") is None and shutil.which("clang++") is None


def dqn(settings: EngineSettings = COMPILE, **changes: Any) -> Any:
    return toy_dqn(exploration_fraction=0.01, engine=settings, **changes)


MODELS = pytest.mark.parametrize(
    ("make", "names"), [(masked_model, ["outputs", "_plain_loss"]), (dqn, ["values", "terms"])], ids=["ppo", "dqn"]
)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own parts
        torch.compiler.reset()
        yield


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(amp_dtype=torch.bfloat16)])
def test_acting_and_loss_are_one_graph_each_and_see_new_weights(settings: EngineSettings):
    def frames() -> int:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def traced(function: Any) -> Any:
        """The compiler's front half: traces forward and backward as one graph each, and generates no code."""
        return torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)

    model = filled(masked_model(settings))
    batch, head, before = a_batch(model), model.engine_now().new_view(), frames()
    compiled = CompiledPPO(model.engine, traced)
    compiled.acting_sizes, compiled.batch_sizes = {5}, {20}
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if settings.amp_dtype is None else {"rtol": 0.02, "atol": 0.02}
    outputs = []
    with torch.no_grad():
        for _ in range(2):
            outputs.append([part.clone() for part in compiled.outputs(batch.observations[:5])])
            torch.testing.assert_close(tuple(outputs[-1]), head.outputs(batch.observations[:5]), **tolerance)
            for parameter in model.policy.parameters():
                parameter.mul_(1.5).add_(0.1)
    assert not any(map(torch.allclose, *outputs))
    found = []
    for terms in (compiled.loss(batch, NUMBERS, True), loss_terms(head, batch, NUMBERS)):
        gradients = torch.autograd.grad(terms["loss"], list(model.policy.parameters()))
        found.append((torch.stack([*terms.values()]).detach(), torch.cat([part.flatten() for part in gradients])))
    torch.testing.assert_close(*found, **tolerance)
    assert frames() - before == 2
    compiled.loss(batch, Coefficients(*map(torch.tensor, (0.1, 0.2, 0.02, 0.4))), True)
    assert frames() - before == 2, "a schedule must not compile anew"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler for CPU code")
@MODELS
def test_the_real_compiler_trains(make: Any, names: list[str]):
    from torch._dynamo.utils import counters

    counters.clear()
    ends = []
    for settings in (COMPILE, EngineSettings()):
        model = make(settings, policy_kwargs={"net_arch": [4]})
        engine = model.engine
        with torch._inductor.config.patch(compile_threads=1):  # type: ignore[attr-defined]
            model.learn(80)
        assert engine is model.engine, "the same from its making to its end"
        assert (engine.warmup_s > 0) is (settings is COMPILE)
        assert engine.compiled is None or engine.compiled.failure == ""
        ends.append(weights(model))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-4)


@MODELS
def test_acting_and_update_go_through_compiled_functions(make: Any, names: list[str]):
    acting, loss = names
    model = make(COMPILE)
    engine = with_compiler(model, counting(calls := []))
    model.collector.clock.reset()
    before, numbers, random = weights(model), np.random.get_state()[1].copy(), torch.get_rng_state()
    assert model.prepare(model.get_env()) == ""
    assert calls == names, "everything is compiled before training"
    assert torch.equal(weights(model), before)
    assert np.array_equal(np.random.get_state()[1], numbers)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.policy.parameters())
    assert not model.policy.optimizer.state
    spent = model.collector.clock.snapshot()
    assert sum(spent.values()) == spent["other"]
    assert engine.warmup_s > 0
    calls.clear()
    model.learn(160)
    if make is masked_model:
        assert engine.compiled.sizes == (20, 5)
        assert (calls.count(acting), calls.count(loss)) == (32, 4 * 4)
    else:
        assert engine.compiled.sizes == (16, 5)
        assert calls.count(loss) == model.engine.gradient_updates == 2 * 28
        assert 15 <= calls.count(acting) <= 28
    calls.clear()
    model.batch_size = 8
    model.learn(80, reset_num_timesteps=False)
    assert calls.count(loss) == 1 + (2 * 10 if make is masked_model else 2 * 16), "other sizes are compiled anew"


def test_the_rest_of_an_epoch_and_other_sizes_go_the_eager_way():
    model = masked_model(COMPILE, batch_size=30)  # 30, 30, 20
    with_compiler(model, counting(calls := []))
    model.learn(80)
    assert calls.count("_plain_loss") == 1 + 2 * 2
    assert model.engine.gradient_updates == 2 * 3
    calls.clear()
    model.env, model.n_envs, model._last_obs = toy_gym_vec(3), 3, None  # what SB3's `set_env` refuses
    for compiling in (1, 0):
        model.learn(48, reset_num_timesteps=False)
        assert calls.count("outputs") == compiling + 16
        calls.clear()


def test_micro_batches_are_compiled_by_their_sizes():
    model = masked_model(EngineSettings(compile_mode="default", gradient_accumulation=3))
    engine = with_compiler(model, counting(calls := []))
    model.prepare(model.env)
    assert engine.compiled.batch_sizes == {6, 7}
    calls.clear()
    model.learn(80)
    assert calls.count("_plain_loss") == 3 * 2 * 4


@pytest.mark.parametrize(
    ("make", "options"),
    [(masked_model, {}), (dqn, {}), (dqn, {"prioritized": {}, "policy_kwargs": {"net_arch": []}}),
     (dqn, {"double_q": True, "n_steps": 3})],
)  # fmt: skip
def test_compiled_learns_what_eager_learns(make: Any, options: dict[str, Any]):
    eager, model = make(EngineSettings(), **options).learn(160), make(COMPILE, **options)
    with_compiler(model, lambda function: function)
    torch.testing.assert_close(weights(model.learn(160)), weights(eager), rtol=0, atol=1e-5)  # torch's fused Adam


@MODELS
def test_no_compiler_no_harm(make: Any, names: list[str]):
    def fails(_function: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("\nno C++ compiler found\nlong story")

        return call

    eager, model = make(EngineSettings()).learn(160), make(COMPILE)
    engine = with_compiler(model, fails)
    with pytest.warns(UserWarning, match="no C.. compiler found; training continues without torch.compile"):
        model.learn(160)
    assert engine.compiled.failure == "torch.compile failed: RuntimeError: no C++ compiler found"
    assert model.engine.gradient_updates == eager.engine.gradient_updates
    torch.testing.assert_close(weights(model), weights(eager), rtol=0, atol=1e-5)
    model.batch_size += 1
    assert model.prepare(model.get_env()) == "", "it is told once"


@MODELS
def test_a_loss_of_the_users_is_what_learns(make: Any, names: list[str]):
    model = make(COMPILE)
    with_compiler(model, counting(calls := []))
    model.learn(80)
    calls.clear()
    model.loss = lambda batch, evaluated: {"mine": sum(part.square().mean() for part in evaluated[:1])}
    with pytest.warns(UserWarning, match="torch.compile: .*.loss is set on the instance; training continues without"):
        model.learn(80)
    assert calls == []
    assert "train/mine" in model.logger.name_to_value


def test_kernels_need_no_compiler():
    model = masked_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.use_engine("kernels")
    model.learn(80)
    assert calls == []


def test_normalised_observations_are_what_is_compiled_for():
    model = dqn(env=VecNormalize(toy_gym_vec()))
    with_compiler(model, counting(calls := []))
    model.learn(60)
    assert calls.count("terms") == 1 + model.engine.gradient_updates


def test_compiled_code_takes_coefficients_as_tensors():
    model = masked_model(COMPILE)
    engine, work = with_compiler(model, counting([])), model.work()
    assert engine.compiled.loss_of(model, work) is None, "nothing is compiled yet"
    model.prepare(model.env)
    second = engine.compiled.loss_of(model, work._replace(clip_range=0.1, ent_coef=0.3)).keywords["coefficients"]
    assert second.clip_range.item() == pytest.approx(0.1)
    assert second.clip_range_vf is None
    assert second.ent_coef.item() == pytest.approx(0.3)


def test_a_policy_that_acts_by_its_own_methods_acts_eagerly_and_another_is_not_served():
    model = filled(box_model(EngineSettings()))
    compiled = CompiledPPO(model.engine, counting(calls := []))
    compiled.batch_sizes = {16}
    assert torch.isfinite(compiled.loss(a_batch(model, 16), NUMBERS, True)["loss"])
    assert calls == ["_plain_loss"]
    ours, other = masked_model(EngineSettings()), masked_model(EngineSettings())
    compiled = CompiledPPO(ours.engine, counting([]))
    assert compiled.serves(view_of(ours.policy, ours.action_space))
    assert not compiled.serves(view_of(other.policy, ours.action_space))
    ours.policy.forward = ours.policy.forward
    assert not compiled.serves(view_of(ours.policy, ours.action_space)), "it acts in a way of its own now"


def test_graphs_come_with_the_mode_and_what_they_put_out_is_kept(monkeypatch: pytest.MonkeyPatch):
    modes, marks, memory = [], [], torch.zeros(2)

    def compiled(function: Any, mode: str, dynamic: bool) -> Any:
        modes.append(mode)
        return lambda number: (memory.fill_(number), None)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    for mode in ("default", "reduce-overhead", "max-autotune"):
        of_compiled.inductor(mode, graphs=False)(len)
    graphed = of_compiled.inductor("reduce-overhead", graphs=True)(len)
    assert modes == ["default", "default", "max-autotune-no-cudagraphs", "reduce-overhead"]
    first, second = graphed(1.0), graphed(2.0)
    assert (first[0].tolist(), second[0].tolist(), first[1], len(marks)) == ([1.0, 1.0], [2.0, 2.0], None, 2)


@pytest.mark.cuda
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


@pytest.mark.cuda
@pytest.mark.parametrize("settings", [EngineSettings(compile_mode="reduce-overhead"), EngineSettings(pin_memory=True)])
def test_dqn_on_cuda(settings: EngineSettings):
    model = dqn(settings, device="cuda", prioritized={}).learn(400)
    assert model.engine_now().compiled is None or model.engine.compiled.failure == ""
    assert torch.isfinite(weights(model)).all()


def test_the_policy_is_left_untouched():
    policy = masked_model(EngineSettings()).policy
    policy.norm = nn.BatchNorm1d(3)
    policy.set_training_mode(False)
    next(policy.parameters()).grad = kept = torch.ones_like(next(policy.parameters()))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    random = torch.get_rng_state()
    with of_compiled.untouched(policy):
        policy.set_training_mode(True)
        policy.norm(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert next(policy.parameters()).grad is kept
    assert policy.norm.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert not policy.training


def test_networks_of_dqn_compute_in_bfloat16_and_nothing_else_does():
    exact = dqn(EngineSettings(), exploration_final_eps=1.0).learn(100)  # the same actions
    model, seen = dqn(EngineSettings(amp_dtype=torch.bfloat16), exploration_final_eps=1.0), []
    model.q_net.q_net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model.learn(100)
    assert set(seen) == {torch.bfloat16}
    assert {part.dtype for part in model.evaluate(of_compiled.example_batch(model.replay(), 16))} == {torch.float32}
    assert {parameter.dtype for parameter in model.policy.parameters()} == {torch.float32}
    assert not torch.equal(weights(model), weights(exact))
    torch.testing.assert_close(weights(model), weights(exact), rtol=0, atol=0.02)


def test_rows_of_any_observations():
    assert of_compiled.num_rows(torch.zeros(4, 2)) == 4
    assert of_compiled.num_rows({"a": torch.zeros(3)}) == 3
    assert of_compiled.repeat_rows(torch.tensor([1, 2, 3]), 5).tolist() == [1, 2, 3, 1, 2]
    assert of_compiled.repeat_rows({"a": torch.tensor([1, 2, 3])}, 2)["a"].tolist() == [1, 2]
