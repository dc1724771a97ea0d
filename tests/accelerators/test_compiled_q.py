"""DQN's eager path accelerated: what is compiled is called, bfloat16 is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from stable_baselines3.common.vec_env import VecNormalize

import fasttrain
from accelerated import counting, weights, with_compiler
from fasttrain.accelerators.compiled import example_batch
from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings
from toys import ToyGame, single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
COMPILE = EngineSettings(compile_mode="default")
GRAPHS = EngineSettings(compile_mode="reduce-overhead")
SETTINGS: dict[str, Any] = {
    "learning_starts": 20,
    "train_freq": 1,
    "gradient_steps": 2,
    "batch_size": 16,
    "buffer_size": 400,
    "exploration_fraction": 0.01,
    "learning_rate": 1e-3,
    "seed": 0,
    "device": "cpu",
}


def toy_model(settings: EngineSettings = EngineSettings(), env: Any = None, **changes: Any) -> DQN:  # noqa: B008 - frozen
    model = DQN("MlpPolicy", env or fasttrain.NativeVecEnv(ToyGame(5), seed=0), **{**SETTINGS, **changes})
    model.use_engine(settings)
    return model


def an_example(model: DQN) -> Any:
    return example_batch(model.replay(), 16)


def test_acting_and_update_go_through_compiled_functions():
    model = toy_model(COMPILE)
    with_compiler(model, counting(calls := []))
    before = weights(model).clone()
    assert model.prepare(model.env) == ""
    assert calls == ["values", "terms"], "everything is compiled before training"
    assert torch.equal(weights(model), before)
    calls.clear()
    model.learn(200)  # 40 vector steps, the first 4 at random
    updates = model.engine.gradient_updates
    assert calls.count("terms") == updates == 2 * 36
    assert 20 <= calls.count("values") <= 36
    assert model.engine.compiled.sizes == (16, 5)
    assert model.engine.warmup_s > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"prioritized": {}}, {"double_q": True}, {"n_steps": 3}, {"policy_kwargs": {"net_arch": []}}],
    ids=["plain", "prioritized", "double", "n steps", "linear"],
)
def test_compiled_learns_what_eager_learns(options: dict[str, Any]):
    ends = []
    for settings in (EngineSettings(), COMPILE):
        model = toy_model(settings, **options)
        if settings == COMPILE:
            with_compiler(model, lambda function: function)
        model.learn(200)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)  # torch's fused Adam under `accelerate`


def test_normalised_observations_are_what_is_compiled_for():
    model = toy_model(COMPILE, VecNormalize(toy_gym_vec()))
    with_compiler(model, counting(calls := []))
    model.learn(100)
    assert calls.count("terms") == 1 + model.engine.gradient_updates


def test_really_compiled():
    model = toy_model(COMPILE, policy_kwargs={"net_arch": [8]})
    torch._dynamo.utils.counters.clear()
    model.learn(60)
    assert not torch._dynamo.utils.counters["graph_break"], "the whole loss is one graph"
    engine = model.engine_now()
    assert engine.compiled.failure == ""
    batch = an_example(model)
    compiled = engine.compiled.terms_of(batch)
    assert compiled is not None
    eager = model.evaluate(batch)
    for part, expected in zip(compiled[0], eager, strict=True):
        torch.testing.assert_close(part, expected.detach(), rtol=1e-5, atol=1e-6)
    found, expected = compiled[1]["td_loss"], model.loss(batch, eager)["td_loss"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_does_not_compile_is_said_and_goes_eagerly():
    def compiler(_: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = toy_model(COMPILE)
    with_compiler(model, compiler)
    with pytest.warns(UserWarning, match="no compiler here; training goes on without"):
        model.learn(100)
    assert model.engine.gradient_updates == 2 * 16


def test_a_loss_that_is_set_on_the_model_later_is_what_learns():
    model = toy_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.learn(100)
    calls.clear()
    model.loss = lambda batch, evaluated: {"mine": evaluated.current.square().mean()}
    with pytest.warns(UserWarning, match="torch.compile: DQN.loss is set on the instance; training goes on without"):
        model.learn(100)
    assert calls == []
    assert "train/mine" in model.logger.name_to_value


def test_other_sizes_are_compiled_anew():
    model = toy_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.learn(100)
    model.batch_size = 8
    calls.clear()
    model.learn(100, reset_num_timesteps=False)
    assert calls.count("terms") == 1 + 2 * 20


def test_networks_compute_in_bfloat16_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch):
    model = toy_model(EngineSettings(amp_dtype=torch.bfloat16))
    seen = []
    model.q_net.q_net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model.learn(100)
    assert set(seen) == {torch.bfloat16}
    assert {part.dtype for part in model.evaluate(an_example(model))} == {torch.float32}
    assert {parameter.dtype for parameter in model.policy.parameters()} == {torch.float32}


def test_bfloat16_learns_nearly_the_same():
    ends = []
    for settings in (EngineSettings(), EngineSettings(amp_dtype=torch.bfloat16)):
        model = toy_model(settings)
        model.exploration_rate = model.exploration_initial_eps = model.exploration_final_eps = 1.0  # the same actions
        model.learn(200)
        ends.append(weights(model))
    assert not torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0.02)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


@needs_cuda
@pytest.mark.parametrize("settings", [GRAPHS, EngineSettings(pin_memory=True)], ids=["graphs", "pinned"])
def test_on_cuda(settings: EngineSettings):
    model = toy_model(settings, device="cuda", prioritized={})
    model.learn(400)
    assert model.engine_now().compiled is None or model.engine.compiled.failure == ""
    assert torch.isfinite(weights(model)).all()
