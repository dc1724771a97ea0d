"""Settings put to work: warm-up, fallback, chunks, and that what acts has what was learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from fasttrain.algos.overlap import OverlappedUpdate

from accelerated import box_model, counting, filled, masked_model, weights
from fasttrain.algos.ppo import warm_up
from fasttrain.engines.compiling import Coefficients
from fasttrain.engines.engine import EngineSettings
from fasttrain.engines.heads import ChunkedHead
from fasttrain.engines.torch import TorchEngine
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
COMPILE = EngineSettings(compile_mode="default")


def with_compiler(model: Any, compiler: Any) -> TorchEngine:
    model.engine = TorchEngine(model.policy, model.engine.settings, compiler)
    return model.engine


def test_acting_and_update_go_through_compiled_functions():
    model = masked_model(COMPILE)
    accelerator = with_compiler(model, counting(calls := []))
    warm_up(model, model.env)
    assert calls == ["outputs", "_plain_loss"], "everything is compiled before training"
    calls.clear()
    model.learn(80)
    assert calls.count("outputs") == 16
    assert calls.count("_plain_loss") == 2 * 4
    assert accelerator.warm
    assert accelerator.warmup_s > 0


def test_the_rest_of_an_epoch_goes_the_eager_way():
    model = masked_model(COMPILE, batch_size=30)  # 30, 30, 20
    with_compiler(model, counting(calls := []))
    warm_up(model, model.env)
    calls.clear()
    model.learn(80)
    assert calls.count("_plain_loss") == 2 * 2
    assert model.engine.gradient_updates == 2 * 3


def test_other_sizes_are_compiled_anew():
    model = masked_model(COMPILE)
    accelerator = with_compiler(model, counting(calls := []))
    model.learn(80)
    accelerator.graphed_update = object()  # of the old size
    calls.clear()
    model.batch_size = 16
    model.learn(80, reset_num_timesteps=False)
    assert calls.count("_plain_loss") == 1 + 2 * 5
    assert accelerator.graphed_update is None
    calls.clear()
    model.env, model.n_envs, model._last_obs = toy_gym_vec(3), 3, None  # what SB3's `set_env` refuses
    model.learn(48, reset_num_timesteps=False)
    assert calls.count("outputs") == 1 + 16
    calls.clear()
    model.learn(48, reset_num_timesteps=False)
    assert calls.count("outputs") == 16, "the same sizes: nothing to compile"


def test_an_update_beside_collecting_is_compiled_anew_for_other_sizes():
    model = masked_model(EngineSettings())
    model.learn(80)
    learner = OverlappedUpdate(model, 1)._prepared()
    learner.engine.settings = COMPILE
    accelerator = with_compiler(learner, counting([]))
    accelerator.warm_up(learner, ())
    assert not accelerator.needs_warm_up(learner, ())
    learner.batch_size = 16
    assert accelerator.needs_warm_up(learner, ())


def test_warming_up_changes_nothing_but_the_clocks_other():
    model = filled(masked_model(COMPILE))
    with_compiler(model, counting([]))
    model.collector.clock.reset()
    before, state, random = weights(model), np.random.get_state()[1].copy(), torch.get_rng_state()
    storage = model.rollout_buffer
    assert warm_up(model, model.env) == ""
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
    accelerator = with_compiler(model, fails)
    with pytest.warns(UserWarning, match="torch.compile failed: RuntimeError: no C.. compiler found; training goes on"):
        model.learn(160)
    assert accelerator.compiled is None
    assert accelerator.failure == "torch.compile failed: RuntimeError: no C++ compiler found"
    assert model.engine.gradient_updates == 16
    torch.testing.assert_close(weights(model), weights(masked_model(EngineSettings()).learn(160)), rtol=0, atol=1e-6)


def test_kernels_need_no_compiler():
    model = masked_model(COMPILE)
    with_compiler(model, counting(calls := []))
    model.use_engine("kernels")
    model.learn(80)
    assert calls == []


@pytest.mark.parametrize(("size", "expected"), [(2, [2, 2, 1]), (5, [5]), (None, [5])])
def test_envs_per_forward(size: int | None, expected: list[int]):
    model = masked_model(EngineSettings(inference_batch_size=size))
    head = model.engine_now().acting_head(model.action_space)
    assert isinstance(head, ChunkedHead) == (size is not None)
    rows: list[int] = []
    rated: list[int] = []
    model.policy.action_net.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    model.policy.value_net.register_forward_hook(lambda _module, inputs, _output: rated.append(len(inputs[0])))
    filled(model)
    assert rows == expected * 16
    assert len(rated) >= len(expected) * 17
    assert rated[-len(expected) :] == expected, "the last states are rated, no action is drawn for them"


@pytest.mark.parametrize("make", [masked_model, box_model])
def test_chunks_change_nothing_but_rounding_and_draws(make: Any):
    ends = [weights(make(EngineSettings(inference_batch_size=size)).learn(160)) for size in (None, 2)]
    if make is masked_model:  # drawn from the same random stream, one row after the other
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)
    assert torch.isfinite(ends[1]).all()


def test_gsde_keeps_a_noise_per_env():
    sde = {"use_sde": True, "sde_sample_freq": 4}
    ends = [weights(box_model(EngineSettings(inference_batch_size=size), **sde).learn(160)) for size in (None, 2)]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


def test_chunks_are_compiled_by_their_sizes():
    model = masked_model(EngineSettings(compile_mode="default", inference_batch_size=2))
    accelerator = with_compiler(model, counting(calls := []))
    warm_up(model, model.env)
    assert accelerator.compiled.acting_sizes == {1, 2}
    calls.clear()
    filled(model)
    assert calls.count("outputs") == 3 * 16


def test_micro_batches_are_compiled_by_their_sizes():
    model = masked_model(EngineSettings(compile_mode="default", gradient_accumulation=3))
    accelerator = with_compiler(model, counting(calls := []))
    warm_up(model, model.env)
    assert accelerator.compiled.batch_sizes == {6, 7}
    calls.clear()
    model.learn(80)
    assert calls.count("_plain_loss") == 3 * 2 * 4


def test_scalars_stay_where_they_are():
    model = masked_model(COMPILE)
    accelerator = with_compiler(model, counting([]))
    numbers = Coefficients(0.2, None, 0.0, 0.5)
    assert accelerator.coefficients(numbers) is numbers, "nothing is compiled yet"
    warm_up(model, model.env)
    first = accelerator.coefficients(numbers)
    second = accelerator.coefficients(Coefficients(0.1, None, 0.3, 0.5))
    assert first.clip_range is second.clip_range
    assert second.clip_range.item() == pytest.approx(0.1)
    assert second.clip_range_vf is None
    assert second.ent_coef.item() == pytest.approx(0.3)


def test_a_graph_without_a_compiler_has_scalars_too(monkeypatch: pytest.MonkeyPatch):
    model = masked_model(EngineSettings(compile_mode="reduce-overhead"))
    accelerator = model.engine_now()
    monkeypatch.setattr(type(accelerator), "graphs", True)
    given = accelerator.coefficients(Coefficients(0.2, None, 0.0, 0.5))
    assert isinstance(given.clip_range, torch.Tensor), "a number would be fixed in the graph, a schedule lost"


def test_kept_while_policy_and_settings_are_the_same():
    model = masked_model(EngineSettings())
    accelerator = model.engine_now()
    assert model.engine_now() is accelerator
    model.use_engine(EngineSettings(gradient_accumulation=2))
    assert model.engine_now() is not accelerator


def test_no_graphs_without_cuda():
    model = masked_model(EngineSettings(compile_mode="reduce-overhead"))
    assert not model.engine_now().graphs


def test_the_zip_knows_nothing_of_it(tmp_path):
    model = box_model(EngineSettings(gradient_accumulation=2, amp_dtype=torch.bfloat16)).learn(64)
    model.save(tmp_path / "model")
    stock = stable_baselines3.PPO.load(tmp_path / "model", device="cpu")
    assert not hasattr(stock, "_fast")
    observation = np.zeros(3, np.float32)
    ours, theirs = (one.predict(observation, deterministic=True)[0] for one in (model, stock))
    assert np.array_equal(ours, theirs)
