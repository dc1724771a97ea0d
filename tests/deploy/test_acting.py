from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.deploy.acting import ActingPath, largest_difference, random_inputs
from toys import RandomEnv, ToyGymEnv

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def masked() -> Any:
    env = DummyVecEnv([lambda: ToyGymEnv(0)])
    return sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=2, batch_size=2, seed=1, device="cpu")


def model_of(kind: Any, observation: spaces.Space[Any], action: spaces.Space[Any]) -> Any:
    env = DummyVecEnv([lambda: RandomEnv(observation, action)])
    return kind("MlpPolicy", env, seed=1, device="cpu")


def run(acting: ActingPath, inputs: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        outputs = acting(*(torch.from_numpy(array) for array in inputs.values()))
    return {name: output.numpy() for name, output in zip(acting.output_names, outputs, strict=True)}


def test_names_and_shapes():
    model = masked()
    acting = ActingPath(model, model.observation_space, None)
    assert acting.input_names == ["observations", "action_masks"]
    inputs = random_inputs(acting, 5, seed=0)
    assert {name: (array.dtype, array.shape) for name, array in inputs.items()} == {
        "observations": (np.float32, (5, 3)),
        "action_masks": (bool, (5, 8)),
    }
    outputs = run(acting, inputs)
    assert [(name, array.shape) for name, array in outputs.items()] == [
        ("actions", (5,)), ("logits", (5, 8)), ("values", (5,)),
    ]  # fmt: skip


def test_logits_are_those_before_masking_and_actions_are_legal():
    model = masked()
    acting = ActingPath(model, model.observation_space, None)
    inputs = random_inputs(acting, 200, seed=0)
    outputs = run(acting, inputs)
    free = run(acting, {**inputs, "action_masks": np.ones((200, 8), bool)})
    np.testing.assert_array_equal(outputs["logits"], free["logits"])
    assert inputs["action_masks"][np.arange(200), outputs["actions"]].all()
    assert (outputs["actions"] != free["actions"]).any(), "the masks must matter for this test to see anything"


def test_random_masks_leave_every_sub_action_a_choice():
    model = sb3_contrib.MaskablePPO(
        "MlpPolicy", DummyVecEnv([lambda: RandomEnv(BOX, spaces.MultiDiscrete([2, 3]))]), device="cpu"
    )
    masks = random_inputs(ActingPath(model, BOX, None), 500, seed=0)["action_masks"]
    assert masks[:, :2].any(axis=1).all()
    assert masks[:, 2:].any(axis=1).all()
    assert not masks.all()


def test_a_wrong_output_is_seen():
    model = masked()
    acting = ActingPath(model, model.observation_space, None)
    inputs = random_inputs(acting, 9, seed=0)
    outputs = run(acting, inputs)
    assert largest_difference(acting, model, None, inputs, outputs) < 1e-6
    for name, changed in {
        "values": outputs["values"] + 1e-3,
        "logits": outputs["logits"] * np.linspace(1, 1.5, 8, dtype=np.float32),
        "actions": (outputs["actions"] + 1) % 8,
    }.items():
        assert largest_difference(acting, model, None, inputs, {**outputs, name: changed}) > 1e-5, name
    missing = {**outputs, "values": outputs["values"][:1]}
    assert largest_difference(acting, model, None, inputs, missing) == float("inf")
    broken = {**outputs, "logits": outputs["logits"] * np.nan}
    assert largest_difference(acting, model, None, inputs, broken) == float("inf")


@pytest.mark.parametrize("action", [spaces.Box(-0.1, 0.1, (2,)), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])])
def test_actions_are_predicts(action: spaces.Space[Any]):
    model = model_of(PPO, BOX, action)
    model.policy.action_net.weight.data *= 100  # actions that differ, and means beyond the bounds of the Box
    acting = ActingPath(model, BOX, None)
    inputs = random_inputs(acting, 50, seed=0)
    outputs = run(acting, inputs)
    np.testing.assert_allclose(
        outputs["actions"], model.predict(inputs["observations"], deterministic=True)[0], atol=1e-6
    )
    assert len(np.unique(outputs["actions"], axis=0)) > 1


def test_q_values_of_dqn():
    model = model_of(DQN, spaces.Discrete(4), spaces.Discrete(3))
    acting = ActingPath(model, spaces.Discrete(4), None)
    inputs = {"observations": np.arange(4)}
    outputs = run(acting, inputs)
    assert list(outputs) == ["actions", "q_values"]
    np.testing.assert_array_equal(outputs["actions"], model.predict(inputs["observations"], deterministic=True)[0])
