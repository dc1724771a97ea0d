"""Settings put to work: warm-up, fallback, chunks, and that what acts has what was learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch

from accelerated import box_model, counting, filled, masked_model, weights, with_compiler
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import EnvError
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
COMPILE = EngineSettings(compile_mode="default")


def test_acting_and_update_go_through_compiled_functions():
    model = masked_model(COMPILE)
    engine = with_compiler(model, counting(calls := []))
    model.prepare(model.env)
    assert calls == ["outputs", "_plain_loss"], "everything is compiled before training"
    calls.clear()
    model.learn(80)
    assert calls.count("outputs") == 16
    assert calls.count("_plain_loss") == 2 * 4
    assert engine.compiled.sizes == (20, 5)
    assert engine.warmup_s > 0


def test_the_rest_of_an_epoch_goes_the_eager_way():
    model = masked_model(COMPILE, batch_size=30)  # 30, 30, 20
    with_compiler(model, counting(calls := []))
    model.prepare(model.env)
    calls.clear()
    model.learn(80)
    assert calls.count("_plain_loss") == 2 * 2
    assert model.engine.gradient_updates == 2 * 3


def test_other_sizes_are_compiled_anew():
    model = masked_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.learn(80)
    calls.clear()
    model.batch_size = 16
    model.learn(80, reset_num_timesteps=False)
    assert calls.count("_plain_loss") == 1 + 2 * 5
    calls.clear()
    model.env, model.n_envs, model._last_obs = toy_gym_vec(3), 3, None  # what SB3's `set_env` refuses
    model.learn(48, reset_num_timesteps=False)
    assert calls.count("outputs") == 1 + 16
    calls.clear()
    model.learn(48, reset_num_timesteps=False)
    assert calls.count("outputs") == 16, "the same sizes: nothing to compile"


def test_warming_up_changes_nothing_but_the_clocks_other():
    model = filled(masked_model(COMPILE))
    with_compiler(model, counting([]))
    model.collector.clock.reset()
    before, state, random = weights(model), np.random.get_state()[1].copy(), torch.get_rng_state()
    storage = model.rollout_buffer
    assert model.prepare(model.env) == ""
    assert torch.equal(weights(model), before)
    assert np.array_equal(np.random.get_state()[1], state)
    assert torch.equal(torch.get_rng_state(), random)
    assert storage.full
    assert all(parameter.grad is None for parameter in model.policy.parameters())
    assert not model.policy.optimizer.state
    spent = model.collector.clock.snapshot()
    assert sum(spent.values()) == spent["other"]


def test_the_same_training_with_a_compiler_that_changes_nothing():
    eager = masked_model(EngineSettings()).learn(160)
    model = masked_model(COMPILE)
    with_compiler(model, counting([]))
    model.learn(160)
    torch.testing.assert_close(weights(model), weights(eager), rtol=0, atol=1e-6)


def test_no_compiler_no_harm():
    def fails(_function: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("\nno C++ compiler found\nlong story")

        return call

    model = masked_model(COMPILE)
    engine = with_compiler(model, fails)
    with pytest.warns(UserWarning, match="torch.compile failed: RuntimeError: no C.. compiler found; training goes on"):
        model.learn(160)
    assert engine.compiled.failure == "torch.compile failed: RuntimeError: no C++ compiler found"
    assert model.engine.gradient_updates == 16
    torch.testing.assert_close(weights(model), weights(masked_model(EngineSettings()).learn(160)), rtol=0, atol=1e-6)


def test_kernels_need_no_compiler():
    model = masked_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.use_engine("kernels")
    model.learn(80)
    assert calls == []


def test_micro_batches_are_compiled_by_their_sizes():
    model = masked_model(EngineSettings(compile_mode="default", gradient_accumulation=3))
    engine = with_compiler(model, counting(calls := []))
    model.prepare(model.env)
    assert engine.compiled.batch_sizes == {6, 7}
    calls.clear()
    model.learn(80)
    assert calls.count("_plain_loss") == 3 * 2 * 4


def test_compiled_code_takes_coefficients_as_tensors():
    model = masked_model(COMPILE)
    engine, work = with_compiler(model, counting([])), model.work()
    assert engine.compiled.loss_of(model, work) is None, "nothing is compiled yet"
    model.prepare(model.env)
    second = engine.compiled.loss_of(model, work._replace(clip_range=0.1, ent_coef=0.3)).keywords["coefficients"]
    assert second.clip_range.item() == pytest.approx(0.1)
    assert second.clip_range_vf is None
    assert second.ent_coef.item() == pytest.approx(0.3)


def test_kept_while_policy_and_settings_are_the_same():
    model = masked_model(EngineSettings())
    engine = model.engine_now()
    assert model.engine_now() is engine
    model.use_engine(EngineSettings(gradient_accumulation=2))
    assert model.engine_now() is not engine


def test_the_zip_knows_nothing_of_it(tmp_path):
    model = box_model(EngineSettings(gradient_accumulation=2, amp_dtype=torch.bfloat16)).learn(64)
    model.save(tmp_path / "model")
    stock = stable_baselines3.PPO.load(tmp_path / "model", device="cpu")
    assert not hasattr(stock, "engine")
    assert not hasattr(stock, "collector")
    observation = np.zeros(3, np.float32)
    ours, theirs = (one.predict(observation, deterministic=True)[0] for one in (model, stock))
    assert np.array_equal(ours, theirs)


def failing(message: str) -> Any:
    def act(*_: Any) -> Any:
        raise RuntimeError(message)

    return act


def test_torchs_own_words_get_the_place(monkeypatch: pytest.MonkeyPatch):
    engine = masked_model(EngineSettings()).engine
    good, bad = np.zeros((1, 3), np.float32), np.full((1, 3), np.nan, np.float32)
    monkeypatch.setattr(engine.view, "act", failing("probability tensor contains either `inf`, `nan` or element < 0"))
    with pytest.raises(EnvError, match="its weights are too large"):
        engine.act(good, None)
    with pytest.raises(EnvError, match="the observation of env 0 is not finite"):
        engine.act(bad, None)
    engine.guard = None
    with pytest.raises(RuntimeError, match="probability tensor"):
        engine.act(bad, None)


def test_other_errors_of_torch_pass_as_they_are(monkeypatch: pytest.MonkeyPatch):
    engine = masked_model(EngineSettings()).engine
    monkeypatch.setattr(engine.view, "act", failing("shapes"))
    with pytest.raises(RuntimeError, match="shapes"):
        engine.act(np.zeros((1, 3), np.float32), None)
