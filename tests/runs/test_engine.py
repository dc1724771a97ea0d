from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm

from conftest import RunCommand, configured
from fasttrain.accelerators import compiled
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import train
from fasttrain.runs.engine import learner_calls, pick_device, settle_engine, settle_kernels
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain_kernels.jit import njit
from fasttrain_kernels.kernel_cache import KernelCall

PPO = ("env.id=CartPole-v1", "algo=ppo", "engine=fast", "vec_env=dummy", "num_envs=4", "algo.rollout_size=64",
       "batch_size=32", "algo.n_epochs=1", "algo.net_arch=[4]")  # fmt: skip
STOCK_DQN = ("env.id=CartPole-v1", "algo=dqn", "vec_env=dummy", "num_envs=4", "algo.buffer_size=100", "batch_size=8",
             "warmup_steps=10")  # fmt: skip


def settled(*arguments: str, base: tuple[str, ...] = PPO) -> tuple[RunSpec, BaseAlgorithm]:
    plan = resolve(configured(*base, *arguments), {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 4, 0)
    model = build_algorithm(plan.config, env, PhaseClock())
    plan = settle_engine(settle_kernels(plan, model), model)
    model.learn(64)
    env.close()
    return plan, model


def row(plan: RunSpec, flag: str) -> tuple[Any, str]:
    return next((row.effective, row.reason) for row in plan.rows if row.flag == flag)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.accelerators.compiled.inductor", lambda *_: lambda function: function)


def test_flags_reach_the_model_and_the_stock_class_passes_through():
    _, model = settled("use_amp=on", "gradient_accumulation=2")
    assert model.engine.settings == EngineSettings(amp_dtype=torch.bfloat16, gradient_accumulation=2)
    assert settled()[1].engine.settings == EngineSettings()
    plan, model = settled(base=STOCK_DQN)
    assert type(model) is DQN
    assert settle_engine(plan, model) is plan


def test_adam_is_fused_where_no_kernels_serve_and_rounding_was_allowed():
    plan, model = settled("fused_update=auto", "algo.activation_fn=gelu")
    assert model.engine.settings == EngineSettings(fused_adam=True, channels_last=True)
    assert row(plan, "fused_update")[1].endswith("; Adam by torch's fused kernel")
    assert row(settle_engine(plan, model), "fused_update") == row(plan, "fused_update"), "resumed: said once"
    other = settled("fused_update=auto", "algo.policy_kwargs.optimizer_class=torch.optim:NAdam")[0]
    assert "Adam by torch's fused kernel" not in row(other, "fused_update")[1]
    assert settled("fused_update=off", "algo.activation_fn=gelu")[1].engine.settings == EngineSettings()
    assert settled("fused_update=auto")[1].engine.kind == "kernels"
    pictures = ("env.id=null", "env.entry_point=stable_baselines3.common.envs:FakeImageEnv", "algo.net_arch=null")
    images, model = settled("fused_update=auto", *pictures)
    assert row(images, "fused_update")[1].endswith("kernel; convolutions with channels last in memory")
    assert row(settle_engine(images, model), "fused_update") == row(images, "fused_update"), "resumed: said once"


@pytest.mark.parametrize("base", [PPO, (*STOCK_DQN, "engine=fast")], ids=["ppo", "dqn"])
def test_kernels_may_use_all_cores_or_as_many_threads_as_asked(base: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.engine.usable_cores", lambda: 4)
    threads = [settled("fused_update=on", asked, base=base)[1].engine.settings.threads
               for asked in ("torch_threads=auto", "torch_threads=1", "torch_threads=9")]  # fmt: skip
    assert threads == [4, 1, 4]


@pytest.mark.parametrize("base", [PPO, (*STOCK_DQN, "engine=fast")], ids=["ppo", "dqn"])
def test_compiling_is_told_and_timed(no_compiler: None, base: tuple[str, ...]):
    plan, model = settled("use_compile=on", "use_amp=on", base=base)
    effective, reason = row(plan, "use_compile")
    assert effective == "default"
    assert reason.startswith("compiled in ")
    assert model.engine.warmup_s > 0
    assert model.engine.compiled is not None
    assert model.engine.settings == EngineSettings(amp_dtype=torch.bfloat16, compile_mode="default")


def test_a_compiler_that_fails_is_told(no_compiler: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "example_rows", Mock(side_effect=RuntimeError("no C++ compiler")))
    monkeypatch.setattr(compiled, "network_values", None)
    for base in (PPO, (*STOCK_DQN, "engine=fast")):
        plan, model = settled("use_compile=on", base=base)
        assert row(plan, "use_compile")[0] == "off" == plan.config.use_compile
        assert "torch.compile failed" in row(plan, "use_compile")[1]
        assert model.engine.gradient_updates > 0


def test_a_recurrent_policy_has_kernels_where_they_know_every_layer():
    def names(*arguments: str) -> list[str]:
        plan, _ = settled("algo=recurrent_ppo", "fused_update=auto", "algo.lstm_hidden_size=16", *arguments)
        return [call.name for call in learner_calls(plan.config)]

    assert names() == ["act_rows", "compress", "train_epoch", "follow"]
    assert names("algo.n_lstm_layers=2") == []


@pytest.mark.parametrize(
    ("count", "device", "policy", "found"),
    [
        (0, "auto", "CnnPolicy", "cpu"),
        (2, "auto", "CnnPolicy", "cuda"),
        (2, "auto", "MlpPolicy", "cpu"),
        (2, "cuda", "MlpPolicy", "cuda"),
        (2, "cuda:1", "MlpPolicy", "cuda:1"),
        (0, "cuda", "MlpPolicy", "device=cuda: this machine .* has no CUDA"),
        (0, "cuda:x", "MlpPolicy", "device=cuda:x: this machine .* has no CUDA"),
        (2, "cuda:2", "MlpPolicy", "device=cuda:2: this machine has cuda:0, cuda:1"),
        (2, "cuda:01", "MlpPolicy", "device=cuda:01: this machine has cuda:0, cuda:1"),
    ],
)
def test_which_device(monkeypatch: pytest.MonkeyPatch, count: int, device: str, policy: str, found: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if " " not in found:
        assert pick_device(device, policy) == found
        return
    with pytest.raises(ConfigError, match=found):
        pick_device(device, policy)


def test_a_missing_device_is_told_before_workers_start(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "build_vec_env", lambda *_: pytest.fail("workers have started"))
    fasttrain("env.id=CartPole-v1", "algo=ppo", "device=cuda:7", "checkup=off").refused("device=cuda:7")


LIGHT = """
import sys, torch, fasttrain.runs.train
from fasttrain.runs.engine import leave_compiler_out
assert "scipy.stats" not in sys.modules  # a second
leave_compiler_out()
weights = torch.nn.Parameter(torch.ones(2))
adam = torch.optim.Adam([weights], lr=0.5)
adam.load_state_dict(adam.state_dict())
weights.sum().backward()
adam.step()
print("torch._dynamo" in sys.modules)
print([round(weight, 3) for weight in weights.tolist()], weights.requires_grad)
adam.zero_grad()
print([round(number, 3) for number in torch.compile(lambda x: x + 1, backend="eager")(weights).tolist()])
leave_compiler_out()
"""


def test_an_optimizer_is_built_and_stepped_without_the_compiler_and_works_with_it_later(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.stdout.split("\n") == ["False", "[0.5, 0.5] True", "[1.5, 1.5]", ""], done.stderr


@njit
def nothing(x: Any) -> Any:
    return x


def test_the_kernels_of_a_run_are_compiled_and_said(fasttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.engine.learner_calls", lambda _: [])  # 15 s of compiling; the game's are shown
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    calls = lambda _: [KernelCall(nothing, (np.zeros(1),))]  # noqa: E731
    monkeypatch.setattr("fasttrain_games.skullking.game.SkullKingGame.kernel_calls", calls)
    monkeypatch.setattr("fasttrain.runs.engine.env_facts", lambda _: EnvFacts(native=True, step_s=None))
    warmup = ("warmup", "+profile=speed", "env=skullking", "num_envs=4")
    assert "1 of 1 kernels compiled in" in fasttrain(*warmup).ok().out
    assert "all 1 kernels were there" in fasttrain(*warmup).out
    assert not list(tmp_path.glob("outputs/*")), "it is no run, and leaves no folder of one"


def test_a_run_without_kernels_says_so(fasttrain: Any):
    done = fasttrain("warmup", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=1").ok()
    assert "this run has no compiled kernels" in done.out
