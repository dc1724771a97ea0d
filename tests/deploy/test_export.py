from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from conftest import RunCommand
from fasttrain.algos.dqn import DQN as FastDQN  # noqa: N811 - a class named like a constant
from fasttrain.algos.q_networks import BranchingDQNPolicy
from fasttrain.errors import FastTrainError
from fasttrain_deploy import export as exporting
from fasttrain_deploy.acting import ActingPath
from fasttrain_deploy.export import export
from messages import assert_says, wrong_inputs
from toys import RandomEnv, ToyGymEnv, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)  # channels last, as most envs show them
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4), "picture": IMAGE})
TINY_CNN = {"features_extractor_kwargs": {"features_dim": 8}}
FLOOR = {"n_steps": 2, "batch_size": 2}


def model_of(kind: Any, policy: Any, observation: spaces.Space[Any], action: spaces.Space[Any], **kwargs: Any) -> Any:
    env = DummyVecEnv([lambda: RandomEnv(observation, action)])
    return kind(policy, env, seed=1, device="cpu", policy_kwargs=kwargs)


def masked(action: spaces.Space[Any] | None = None) -> BaseAlgorithm:
    env = DummyVecEnv([lambda: ToyGymEnv(0) if action is None else RandomEnv(BOX, action)])
    return sb3_contrib.MaskablePPO("MlpPolicy", env, seed=1, device="cpu", **FLOOR)


POLICIES: dict[str, Callable[[], BaseAlgorithm]] = {
    "masked": masked,
    "masked multi-discrete": lambda: masked(spaces.MultiDiscrete([2, 3])),
    "box": lambda: model_of(PPO, "MlpPolicy", BOX, spaces.Box(-0.5, 0.5, (2,), np.float32)),
    "multi-binary": lambda: model_of(PPO, "MlpPolicy", BOX, spaces.MultiBinary(3)),
    "separate extractors": lambda: model_of(
        PPO, "MlpPolicy", BOX, spaces.Discrete(3), share_features_extractor=False, net_arch={"pi": [8], "vf": [4, 4]}
    ),
    "unbounded float64": lambda: model_of(
        PPO, "MlpPolicy", spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Discrete(3)
    ),
    "image": lambda: model_of(PPO, "CnnPolicy", IMAGE, spaces.Discrete(3), **TINY_CNN),
    "dict": lambda: model_of(
        PPO, "MultiInputPolicy", DICT, spaces.Discrete(3), features_extractor_kwargs={"cnn_output_dim": 8}
    ),
    "dqn": lambda: model_of(DQN, "MlpPolicy", BOX, spaces.Discrete(3)),
    "masked dqn": lambda: model_of(FastDQN, "MlpPolicy", BOX, spaces.Discrete(3)),
    "masked dqn of several heads": lambda: model_of(FastDQN, BranchingDQNPolicy, BOX, spaces.MultiDiscrete([3, 2])),
}
SHOWN: dict[str, spaces.Space[Any]] = {"image": IMAGE, "dict": DICT}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "torchscript") for name in POLICIES),
     *((name, "onnx") for name in ("masked multi-discrete", "dict"))],
)  # fmt: skip
def test_the_file_says_what_the_policy_says(name: str, kind: str, tmp_path: Path):
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="format=onnx needs onnx and onnxscript")
    model = POLICIES[name]()
    acting = ActingPath(model, SHOWN.get(name, model.observation_space), None).eval()
    acting.masked |= name.startswith("masked")
    warns = logging.getLogger("torch.onnx._internal.exporter._registration").isEnabledFor(logging.WARNING)
    report = export(acting, model, None, kind, tmp_path / "policy")
    assert logging.getLogger("torch.onnx._internal.exporter._registration").isEnabledFor(logging.WARNING) == warns
    assert report["max_difference"] <= 1e-5
    assert list(report["inputs"]) == acting.input_names
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert ("action_masks" in report["inputs"]) == name.startswith("masked")
    if name == "dict":
        assert report["inputs"] == {
            "observations.box": "float32 (batch, 3)",
            "observations.kind": "int64 (batch)",
            "observations.picture": "uint8 (batch, 36, 40, 3)",
        }


def test_normalised_observations_are_normalised_inside(tmp_path: Path):
    env = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    model = PPO("MlpPolicy", env, seed=1, device="cpu", n_steps=64, batch_size=64, n_epochs=1).learn(64)
    acting = ActingPath(model, model.observation_space, env).eval()
    report = export(acting, model, env, "torchscript", tmp_path / "policy")
    assert report["max_difference"] <= 1e-5
    plain = ActingPath(model, model.observation_space, None).eval()
    raw = torch.ones(1, 3)
    assert not torch.allclose(plain(raw)[2], acting(raw)[2], atol=1e-3)


def test_a_file_that_disagrees_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = masked()
    acting = ActingPath(model, model.observation_space, None).eval()
    save = torch.jit.save

    def save_another(*given: Any) -> None:
        weight = acting.net.value_net.weight.data
        weight += 0.01
        save(*given)
        weight -= 0.01

    monkeypatch.setattr(torch.jit, "save", save_another)
    (tmp_path / "policy").write_text("an older one")
    with pytest.raises(FastTrainError, match="policy disagrees with the policy by .*deleted") as caught:
        export(acting, model, None, "torchscript", tmp_path / "policy")
    assert caught.value.exit_code == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an older one"]


SMALL = ("total_timesteps=64", "algo.rollout_size=32", "batch_size=32", "algo.n_epochs=1", "eval.episodes=2",
         "vec_env=dummy", "num_envs=2", "checkup=off")  # fmt: skip
MASKED = ("+profile=exact", "env.entry_point=toys:ToyGymEnv", "env.kwargs.index=0", *SMALL)


@pytest.mark.parametrize("typed", wrong_inputs("export"))
def test_wrong_input_is_one_line(trained: RunCommand, fasttrain: RunCommand, typed: str):
    run = str(trained(*MASKED).folder)
    done = fasttrain("export", *typed.replace("RUN", run).split())
    done.refused()
    assert_says("export", typed, done.err.replace(run, "RUN"))


@pytest.mark.filterwarnings("ignore:`torch.jit.load`:DeprecationWarning")
def test_the_command(trained: RunCommand, fasttrain: RunCommand):
    made = trained(*MASKED)
    plan = made.json("plan.json")
    for key in ("format", "model", "output"):  # as older versions wrote it
        del plan["config"][key]
    (made.folder / "plan.json").write_text(json.dumps(plan))
    done = fasttrain("export", f"run={made.folder}", "format=torchscript").ok()
    assert "observations float32 (batch, 3), action_masks bool (batch, 8)" in done.out
    assert "max difference from the policy" in done.out
    report = done.json("export.json")
    assert report["max_difference"] <= 1e-5
    path = made.folder / "model.torchscript.pt"
    assert report["file"] == str(path)
    model = sb3_contrib.MaskablePPO.load(made.folder / "model.zip", device="cpu")
    observations, masks = np.eye(3, dtype=np.float32), np.ones((3, 8), bool)
    np.testing.assert_array_equal(
        torch.jit.load(str(path))(torch.from_numpy(observations), torch.from_numpy(masks))[0],
        model.predict(observations, deterministic=True, action_masks=masks)[0],
    )
    shutil.copy(made.folder / "model.zip", made.folder / "best_model.zip")
    fasttrain("export", f"run={made.folder}", "format=torchscript", "model=best", "output=here.pt").ok()
    assert Path("here.pt").is_file()


CAMERA = """
import gymnasium as gym, numpy as np
from toys import RandomEnv
class Camera(RandomEnv):
    def __init__(self):
        super().__init__(gym.spaces.Box(0, 255, (36, 40, 3), np.uint8), gym.spaces.Discrete(3))
"""


def test_images_as_the_env_shows_them(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "camera.py").write_text(CAMERA)
    made = fasttrain("env.entry_point=camera:Camera", "algo=ppo", *SMALL).ok()
    done = fasttrain("export", f"run={made.folder}", "format=torchscript").ok()
    assert "observations uint8 (batch, 36, 40, 3)" in done.out


def test_what_cannot_be_exported(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    made = fasttrain("env.id=CartPole-v1", "algo=qrdqn", "total_timesteps=64", "warmup_steps=32", "num_envs=1",
                     "vec_env=dummy", "eval.episodes=2").ok()  # fmt: skip
    fasttrain("export", f"run={made.folder}", "format=torchscript").refused(
        "fasttrain: error: qrdqn cannot be exported: this kind of network is not supported; load model.zip "
        "by sb3_contrib.QRDQN\n"
    )
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    monkeypatch.setattr("fasttrain.terminal.own_program", lambda name: f"my/{name}")
    fasttrain("export", "run=somewhere", "format=onnx").refused(
        "fasttrain: error: format=onnx needs onnx and onnxscript: my/pip install 'fasttrain[onnx]'; "
        "format=torchscript needs nothing\n"
    )
