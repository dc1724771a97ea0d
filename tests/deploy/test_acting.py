from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import DQN, PPO
from test_export import masked, model_of

from fasttrain.algos.dqn import DQN as FastDQN  # noqa: N811 - a class named like a constant
from fasttrain.algos.q_networks import BranchingDQNPolicy
from fasttrain_deploy.acting import ActingPath, Choice, best_choices, largest_difference, random_inputs
from plain_env import PlainEnv

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def run(acting: ActingPath, inputs: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        outputs = acting(*(torch.from_numpy(array) for array in inputs.values()))
    return {name: output.numpy() for name, output in zip(acting.output_names, outputs, strict=True)}


def test_logits_are_those_before_masking_and_actions_are_legal():
    model = masked()
    acting = ActingPath(model, model.observation_space, None)
    inputs = random_inputs(acting, 200, seed=0)
    assert {name: (array.dtype, array.shape) for name, array in inputs.items()} == {
        "observations": (np.float32, (200, 3)), "action_masks": (bool, (200, 8)),
    }  # fmt: skip
    outputs = run(acting, inputs)
    assert [(name, array.shape) for name, array in outputs.items()] == [
        ("actions", (200,)), ("logits", (200, 8)), ("values", (200,)),
    ]  # fmt: skip
    free = run(acting, {**inputs, "action_masks": np.ones((200, 8), bool)})
    np.testing.assert_array_equal(outputs["logits"], free["logits"])
    assert inputs["action_masks"][np.arange(200), outputs["actions"]].all()
    assert (outputs["actions"] != free["actions"]).any(), "the masks must matter for this test to see anything"


def test_a_wrong_output_is_seen():
    model = masked()
    acting = ActingPath(model, model.observation_space, None)
    inputs = random_inputs(acting, 9, seed=0)
    outputs = run(acting, inputs)
    assert largest_difference(acting, model, None, inputs, outputs) < 1e-6
    for name, changed, least in (
        ("values", outputs["values"] + 1e-3, 1e-5),
        ("logits", outputs["logits"] * np.linspace(1, 1.5, 8, dtype=np.float32), 1e-5),
        ("actions", (outputs["actions"] + 1) % 8, 1e-5),
        ("values", outputs["values"][:1], np.finfo(float).max),
        ("logits", outputs["logits"] * np.nan, np.finfo(float).max),
    ):
        assert largest_difference(acting, model, None, inputs, {**outputs, name: changed}) > least, name


@pytest.mark.parametrize("action", [spaces.Box(-0.1, 0.1, (2,)), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])])
def test_actions_are_predicts(action: spaces.Space[Any]):
    masks = random_inputs(ActingPath(masked(spaces.MultiDiscrete([2, 3])), BOX, None), 500, seed=0)["action_masks"]
    assert masks[:, :2].any(axis=1).all()
    assert masks[:, 2:].any(axis=1).all(), "every sub-action has a choice"
    model = model_of(PPO, "MlpPolicy", BOX, action)
    model.policy.action_net.weight.data *= 100  # actions that differ, and means beyond the bounds of the Box
    acting = ActingPath(model, BOX, None)
    inputs = random_inputs(acting, 50, seed=0)
    outputs = run(acting, inputs)
    np.testing.assert_allclose(
        outputs["actions"], model.predict(inputs["observations"], deterministic=True)[0], atol=1e-6
    )
    assert len(np.unique(outputs["actions"], axis=0)) > 1


class Space(PlainEnv):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space

    def action_masks(self) -> np.ndarray:
        return np.ones(5, np.bool_)


OBSERVATIONS = np.array([[0.5, -0.2, 0.9]], np.float32)
FIVE = gym.spaces.Discrete(5)
HEADS = gym.spaces.MultiDiscrete([3, 2, 4])
SMALL: dict[str, Any] = {"device": "cpu", "seed": 3}


def ppo(kind: Any, space: gym.Space[Any], policy: str = "MlpPolicy") -> Any:
    model = kind(policy, Space(space), n_steps=2, batch_size=2, **SMALL)
    if hasattr(model.policy.action_net, "weight"):
        torch.nn.init.normal_(model.policy.action_net.weight)  # SB3 begins with all but equal probabilities
    return model


def test_probabilities_of_the_policy_best_first_and_of_sub_actions_their_product() -> None:
    model = ppo(PPO, HEADS)
    found = best_choices(model, OBSERVATIONS, None)
    with torch.no_grad():
        distribution: Any = model.policy.get_distribution(torch.from_numpy(OBSERVATIONS)).distribution
    heads = [part.probs[0].numpy() for part in distribution]
    every = {places: float(heads[0][places[0]] * heads[1][places[1]] * heads[2][places[2]])
             for places in itertools.product(range(3), range(2), range(4))}  # fmt: skip
    best = sorted(every, key=lambda places: -every[places])[:3]
    assert [tuple(choice.action) for choice in found] == best
    assert [choice.rating for choice in found] == pytest.approx([every[places] for places in best])
    assert found[0].action.tolist() == model.predict(OBSERVATIONS, deterministic=True)[0][0].tolist()


def test_illegal_actions_are_no_choices_and_small_probabilities_are_told_apart() -> None:
    model = ppo(MaskablePPO, FIVE)
    masks = np.array([[False, True, False, False, True]])
    found = best_choices(model, OBSERVATIONS, masks)
    assert {choice.action for choice in found} == {1, 4}
    assert sum(choice.rating for choice in found) == pytest.approx(1)
    (only,) = best_choices(model, OBSERVATIONS, np.eye(5, dtype=np.bool_)[[2]])
    assert (only.action, only.rating) == (2, pytest.approx(1))
    texts = {1.0: "100 %", 0.016: "2 %", 0.0044: "0.4 %", 0.00012: "0.01 %", 1e-9: "under 0.01 %"}
    assert [Choice(0, rating, "probability").text for rating in texts] == [*texts.values()]


@pytest.mark.parametrize("kind", [DQN, FastDQN])
def test_q_values(kind: Any) -> None:
    model = kind("MlpPolicy", Space(FIVE), **SMALL)
    masks = np.array([[True, True, False, True, True]])
    found = best_choices(model, OBSERVATIONS, masks)
    with torch.no_grad():
        values = model.q_net(torch.from_numpy(OBSERVATIONS))[0].numpy()
    order = [action for action in np.argsort(-values) if action != 2][:3]
    assert [choice.action for choice in found] == order
    assert [choice.rating for choice in found] == pytest.approx(values[order])
    assert (found[0].kind, found[0].text) == ("Q-value", f"{values[order[0]]:+.3f}")


def test_q_values_of_sub_actions_are_their_mean_and_what_has_no_choices() -> None:
    model = FastDQN(BranchingDQNPolicy, Space(HEADS), **SMALL)
    found = best_choices(model, OBSERVATIONS, None)
    with torch.no_grad():
        heads = torch.split(model.q_net(torch.from_numpy(OBSERVATIONS))[0], [3, 2, 4])
    assert found[0].action.tolist() == [int(head.argmax()) for head in heads]
    assert found[0].rating == pytest.approx(float(np.mean([head.max() for head in heads])), abs=1e-6)
    assert best_choices(ppo(PPO, gym.spaces.Box(-1, 1, (2,))), OBSERVATIONS, None) == []
    assert best_choices(ppo(RecurrentPPO, FIVE, "MlpLstmPolicy"), OBSERVATIONS, None) == []
