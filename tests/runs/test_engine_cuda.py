from __future__ import annotations

import importlib
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from conftest import RunCommand
from toys import RandomEnv

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")]
SMALL = ("algo.rollout_size=64", "batch_size=32")
CARTPOLE = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=2")
STEPS = ("checkup=off", "total_timesteps=256", "eval.episodes=2", "report=false")


class Frames(RandomEnv):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (36, 40, 3), np.uint8), spaces.Discrete(3))


FRAMES = ("env.entry_point=test_engine_cuda:Frames", "vec_env=dummy", "num_envs=2", "env.frame_stack=2")


@pytest.mark.parametrize(
    ("stock", "arguments"),
    [
        ("stable_baselines3:PPO", (*CARTPOLE, "algo=ppo", *SMALL)),
        ("stable_baselines3:PPO", (*FRAMES, "algo=ppo", *SMALL)),
        ("stable_baselines3:PPO", ("env.id=Pendulum-v1", *CARTPOLE[1:], "algo=ppo", *SMALL, "env.normalize=[obs]")),
        ("stable_baselines3:DQN", (*CARTPOLE, "algo=dqn", "warmup_steps=32", "algo.prioritized=true")),
        ("stable_baselines3:DQN", (*FRAMES, "algo=dqn", "warmup_steps=32", "algo.buffer_size=500")),
        ("stable_baselines3:SAC", ("env.id=Pendulum-v1", *CARTPOLE[1:], "algo=sac", "warmup_steps=32")),
        ("stable_baselines3:TD3", ("env.id=Pendulum-v1", *CARTPOLE[1:], "algo=td3", "warmup_steps=32")),
        ("sb3_contrib:RecurrentPPO", (*CARTPOLE, "algo=recurrent_ppo", *SMALL)),
        ("sb3_contrib:MaskablePPO", ("num_envs=8", *SMALL)),
        ("sb3_contrib:MaskablePPO", ("num_envs=8", *SMALL, "opponent=self")),
        ("sb3_contrib:MaskablePPO", ("num_envs=8", *SMALL, "vec_env=shared", "schedule=first_ready")),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)  # fmt: skip
@pytest.mark.parametrize("flags", [("use_amp=off",), ("use_amp=bfloat16", "pin_memory=true")], ids=["plain", "amp"])
def test_a_training_on_cuda(fasttrain: RunCommand, stock: str, arguments: tuple[str, ...], flags: tuple[str, ...]):
    done = fasttrain("+profile=speed", "device=cuda", "use_compile=off", *arguments, *flags, *STEPS)
    if flags[0] != "use_amp=off" and done.exit_code == 2:
        pytest.skip(done.err)
    done.ok()
    assert done.json("summary.json")["status"] == "done"
    module, _, name = stock.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(importlib.import_module(module), name).load(done.folder / "model.zip", device="cpu")
    assert all(torch.isfinite(weights).all() for weights in model.policy.parameters())
    fasttrain("resume", f"run={done.folder}", "total_timesteps=384").ok()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("arguments", [("algo=ppo", *SMALL), ("algo=dqn", "warmup_steps=32")], ids=["ppo", "dqn"])
def test_compiled_on_cuda(fasttrain: RunCommand, arguments: tuple[str, ...], mode: str):
    done = fasttrain("+profile=speed", "device=cuda", *CARTPOLE, *arguments, f"use_compile={mode}", *STEPS).ok()
    shown = {flag["flag"]: flag["effective"] for flag in done.json("plan.json")["flags"]}
    assert shown["use_compile"] == mode
