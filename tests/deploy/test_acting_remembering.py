from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from conftest import RunCommand
from fasttrain_deploy import export as exporting
from fasttrain_deploy.acting import Arrays, RecurrentPath, largest_difference, random_inputs
from toys import RandomEnv, ToyGymEnv, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4)})
SMALL: dict[str, Any] = {"seed": 1, "device": "cpu", "n_steps": 8, "batch_size": 8}


def model_of(kind: Any, action: spaces.Space[Any], observation: spaces.Space[Any] = BOX, **kwargs: Any) -> Any:
    env = DummyVecEnv([lambda: RandomEnv(observation, action)])
    policy = "MultiInputLstmPolicy" if observation is DICT else "MlpLstmPolicy"
    return kind(policy, env, policy_kwargs={"lstm_hidden_size": 8, **kwargs}, **SMALL)


def masked() -> Any:
    env = DummyVecEnv([lambda: ToyGymEnv(0)])
    return fasttrain.MaskableRecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 8}, **SMALL)


POLICIES: dict[str, Callable[[], Any]] = {
    "masked": masked,
    "two layers": lambda: model_of(fasttrain.RecurrentPPO, spaces.Discrete(3), n_lstm_layers=2),
    "no bias": lambda: model_of(fasttrain.RecurrentPPO, spaces.MultiBinary(3), lstm_kwargs={"bias": False}),
    "shared": lambda: model_of(
        fasttrain.RecurrentPPO, spaces.MultiDiscrete([2, 3]), shared_lstm=True, enable_critic_lstm=False
    ),
    "no memory of the critic": lambda: model_of(
        sb3_contrib.RecurrentPPO, spaces.Box(-0.5, 0.5, (2,), np.float32), enable_critic_lstm=False
    ),
    "GRU, two layers": lambda: model_of(
        fasttrain.RecurrentPPO, spaces.Discrete(3), cell="gru", n_lstm_layers=2, enable_critic_lstm=False
    ),
    "dict": lambda: model_of(fasttrain.RecurrentPPO, spaces.Discrete(3), DICT),
}


@pytest.mark.parametrize(("name", "kind"), [*((name, "torchscript") for name in POLICIES), ("two layers", "onnx")])
def test_the_file_says_what_the_policy_says(name: str, kind: str, tmp_path: Path):
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="format=onnx needs onnx and onnxscript")
    model = POLICIES[name]()
    acting = RecurrentPath(model, model.observation_space, None).eval()
    report = exporting.export(acting, model, None, kind, tmp_path / "policy")
    assert report["max_difference"] <= 1e-5
    layers, keeps_cells = 2 if "two layers" in name else 1, "gru" not in name.lower()
    assert report["inputs"]["pi_h"] == report["outputs"]["next_pi_h"] == f"float32 (batch, {layers}, 8)"
    assert ("pi_c" in report["inputs"], "next_pi_c" in report["outputs"]) == (keeps_cells, keeps_cells)
    assert report["inputs"]["episode_starts"] == "bool (batch)"
    assert ("next_vf_h" in report["outputs"]) is model.policy.enable_critic_lstm


@pytest.mark.filterwarnings("ignore:`torch.jit.load`:DeprecationWarning")
def test_episodes_go_on_by_the_states_that_the_file_gives_back(tmp_path: Path):
    """40 steps of three envs whose episodes end at different times, each state from the step before."""
    model = masked()
    acting = RecurrentPath(model, model.observation_space, None).eval()
    exporting.export(acting, model, None, "torchscript", tmp_path / "policy")
    run = torch.jit.load(str(tmp_path / "policy"))
    random = np.random.default_rng(2)
    remembered: Arrays = {name: np.ones((3, 1, 8), np.float32) for name in acting.state_names}  # of nobody
    states, starts = None, np.ones(3, np.bool_)
    for step in range(40):
        inputs = random_inputs(acting, 3, seed=step) | remembered | {"episode_starts": starts}
        made = run(*(torch.from_numpy(inputs[name]) for name in acting.input_names))
        outputs = {name: output.detach().numpy() for name, output in zip(acting.output_names, made, strict=True)}
        actions, states = model.predict(
            inputs["observations"], states, starts, deterministic=True, action_masks=inputs["action_masks"]
        )
        np.testing.assert_array_equal(outputs["actions"], actions)
        np.testing.assert_allclose(outputs["next_pi_c"].swapaxes(0, 1), states[1], atol=1e-5)
        remembered = {name: outputs[f"next_{name}"] for name in acting.state_names}
        starts = random.random(3) < 0.1


def test_a_forgotten_start_or_state_is_seen():
    model = masked()
    acting = RecurrentPath(model, model.observation_space, None).eval()
    inputs = random_inputs(acting, 9, seed=1)

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            outputs = acting(*(torch.from_numpy(inputs[name]) for name in acting.input_names))
        return {name: output.numpy() for name, output in zip(acting.output_names, outputs, strict=True)}

    assert largest_difference(acting, model, None, inputs, run(inputs)) < 1e-5
    assert 0 < inputs["episode_starts"].sum() < 9
    for wrong in ({"episode_starts": ~inputs["episode_starts"]}, {"vf_h": 0 * inputs["vf_h"]}):
        assert largest_difference(acting, model, None, inputs, run(inputs | wrong)) > 1e-3, list(wrong)


def test_the_command(fasttrain: RunCommand):
    trained = fasttrain(
        "+profile=speed", "env.entry_point=toys:ToyGymEnv", "env.kwargs.index=0", "algo=maskable_recurrent_ppo",
        "algo.lstm_hidden_size=16", "num_envs=2", "total_timesteps=128", "algo.rollout_size=64", "batch_size=32",
        "algo.n_epochs=1", "eval.episodes=2", "vec_env=dummy", "env.normalize=[obs]", "fused_update=off", "checkup=off",
    ).ok()  # fmt: skip
    done = fasttrain("export", f"run={trained.folder}", "format=torchscript").ok()
    assert "action_masks bool (batch, 8), episode_starts bool (batch), pi_h float32 (batch, 1, 16)" in done.out
    assert done.json("export.json")["max_difference"] <= 1e-5
