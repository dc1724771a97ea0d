"""What the plan says once the model is built, and that the flags reach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm

from conftest import RunCommand, configured
from fasttrain.accelerators.compiled import CompiledPPO
from fasttrain.algos.engine import EngineSettings
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.engine import learner_calls, settle_engine, settle_kernels
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve

SMALL = ("env.id=CartPole-v1", "algo=ppo", "engine=fast", "vec_env=dummy", "num_envs=4", "algo.rollout_size=64",
         "batch_size=32", "algo.n_epochs=1", "algo.net_arch=[4]")  # fmt: skip
FACTS, MACHINE = EnvFacts(False, 1e-5), Machine(2, False, False)


def settled(*arguments: str, **sources: str) -> tuple[RunSpec, BaseAlgorithm]:
    plan = resolve(configured(*SMALL, *arguments), sources, FACTS, MACHINE)
    env = build_vec_env(plan.config, 4, 0)
    model = build_algorithm(plan.config, env, PhaseClock())
    plan = settle_engine(settle_kernels(plan, model), model)
    model.learn(64)
    env.close()
    return plan, model


def row(plan: RunSpec, flag: str) -> tuple[Any, str]:
    return next((row.effective, row.reason) for row in plan.rows if row.flag == flag)


def test_flags_reach_the_model():
    _, model = settled("use_amp=on", "gradient_accumulation=2")
    expected = EngineSettings(amp_dtype=torch.bfloat16, gradient_accumulation=2)
    assert model.engine.settings == expected
    assert settled()[1].engine.settings == EngineSettings()


def test_adam_is_fused_where_no_kernels_serve_and_rounding_was_allowed():
    plan, model = settled("fused_update=auto", "algo.activation_fn=elu")
    assert model.engine.settings == EngineSettings(fused_adam=True)
    assert row(plan, "fused_update")[1].endswith("; Adam by torch's fused kernel")
    assert row(settle_engine(plan, model), "fused_update") == row(plan, "fused_update"), "resumed: said once"
    other = settled("fused_update=auto", "algo.policy_kwargs.optimizer_class=torch.optim:NAdam")[0]
    assert "Adam by torch's fused kernel" not in row(other, "fused_update")[1]
    assert settled("fused_update=off", "algo.activation_fn=elu")[1].engine.settings == EngineSettings()
    assert settled("fused_update=auto")[1].engine.kind == "kernels"


def test_compiling_is_told_and_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.accelerators.compiled.inductor", lambda *_: lambda function: function)
    plan, model = settled("use_compile=on")
    effective, reason = row(plan, "use_compile")
    assert effective == "default"
    assert reason.startswith("compiled in ")
    assert model.engine.warmup_s > 0
    assert model.engine.compiled is not None


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(CompiledPPO, "_compile_loss", fails)
    monkeypatch.setattr("fasttrain.accelerators.compiled.inductor", lambda *_: lambda function: function)
    plan, model = settled("use_compile=on")
    assert row(plan, "use_compile")[0] == "off" == plan.config.use_compile
    assert "torch.compile failed" in row(plan, "use_compile")[1]
    assert model.engine.gradient_updates == 2


def settled_dqn(*arguments: str) -> tuple[RunSpec, RunSpec, BaseAlgorithm]:
    config = configured("env.id=CartPole-v1", "algo=dqn", "vec_env=dummy", "num_envs=2", "algo.buffer_size=100",
                        "warmup_steps=10", "batch_size=8", *arguments)  # fmt: skip
    plan = resolve(config, {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 2, 0)
    model = build_algorithm(plan.config, env, PhaseClock())
    after = settle_engine(plan, model)
    model.learn(30)
    env.close()
    return plan, after, model


def test_the_stock_class_passes_through():
    plan, after, model = settled_dqn()
    assert type(model) is DQN
    assert after is plan


def test_dqn_is_compiled_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.accelerators.compiled.inductor", lambda *_: lambda function: function)
    _, plan, model = settled_dqn("engine=fast", "use_compile=on", "use_amp=on")
    assert row(plan, "use_compile")[1].startswith("compiled in ")
    assert model.engine.settings == EngineSettings(amp_dtype=torch.bfloat16, compile_mode="default")
    assert model.engine.warmup_s > 0
    monkeypatch.setattr("fasttrain.accelerators.compiled.network_values", None)
    assert "torch.compile failed" in row(settled_failing(), "use_compile")[1]


def settled_failing() -> RunSpec:
    config = configured("env.id=CartPole-v1", "algo=dqn", "engine=fast", "vec_env=dummy", "use_compile=on")
    plan = resolve(config, {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 8, 0)
    plan = settle_engine(plan, build_algorithm(plan.config, env, PhaseClock()))
    env.close()
    return plan


def test_a_run_says_how_it_computes(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "use_amp=on", "gradient_accumulation=2", "total_timesteps=128", "eval.episodes=2")
    assert done.exit_code == 0, done.err
    assert "use_amp" in done.out
    assert "each minibatch in 2 parts, one optimizer step" in done.out
    assert done.json("summary.json")["compile_s"] == 0.0
    assert done.json("plan.json")["config"]["use_amp"] == "bfloat16"


def test_a_recurrent_policy_has_kernels_where_they_know_every_layer():
    def names(*arguments: str) -> list[str]:
        plan, _ = settled("algo=recurrent_ppo", "fused_update=auto", "algo.lstm_hidden_size=16", *arguments)
        return [call.name for call in learner_calls(plan.config)]

    assert names() == ["act_rows", "compress", "train_epoch", "follow"]
    assert names("algo.n_lstm_layers=2") == []
