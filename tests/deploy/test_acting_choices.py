"""What a model would choose first, second and third."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import DQN, PPO

from fasttrain.algos.dqn import DQN as FastDQN  # noqa: N811 - a class named like a constant
from fasttrain.algos.q_networks import BranchingDQNPolicy
from fasttrain.deploy.acting import Choice, best_choices


class Space(gym.Env[np.ndarray, Any]):
    """Nothing happens; what counts are the spaces."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action_space

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(3, np.float32), 0.0, False, False, {}

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


def test_probabilities_of_the_policy_best_first() -> None:
    model = ppo(PPO, FIVE)
    found = best_choices(model, OBSERVATIONS, None)
    with torch.no_grad():
        distribution: Any = model.policy.get_distribution(torch.from_numpy(OBSERVATIONS)).distribution
    expected = distribution.probs[0].numpy()
    assert [choice.action for choice in found] == np.argsort(-expected)[:3].tolist()
    assert [choice.rating for choice in found] == pytest.approx(np.sort(expected)[::-1][:3])
    assert found[0].text == f"{100 * expected.max():.0f} %"
    assert found[0].action == model.predict(OBSERVATIONS, deterministic=True)[0][0]


@pytest.mark.parametrize(
    ("rating", "text"), [(1.0, "100 %"), (0.016, "2 %"), (0.0044, "0.4 %"), (0.00012, "0.01 %"), (1e-9, "under 0.01 %")]
)
def test_small_probabilities_are_told_apart(rating: float, text: str) -> None:
    assert Choice(0, rating, "probability").text == text


def test_illegal_actions_are_no_choices() -> None:
    model = ppo(MaskablePPO, FIVE)
    masks = np.array([[False, True, False, False, True]])
    found = best_choices(model, OBSERVATIONS, masks)
    assert {choice.action for choice in found} == {1, 4}
    assert sum(choice.rating for choice in found) == pytest.approx(1)
    (only,) = best_choices(model, OBSERVATIONS, np.eye(5, dtype=np.bool_)[[2]])
    assert (only.action, only.rating) == (2, pytest.approx(1))


def test_sub_actions_multiply() -> None:
    model = ppo(PPO, HEADS)
    found = best_choices(model, OBSERVATIONS, None)
    with torch.no_grad():
        distribution: Any = model.policy.get_distribution(torch.from_numpy(OBSERVATIONS)).distribution
    heads = [part.probs[0].numpy() for part in distribution]
    every = {
        places: float(np.prod([head[place] for head, place in zip(heads, places, strict=True)]))
        for places in itertools.product(range(3), range(2), range(4))
    }
    best = sorted(every, key=lambda places: -every[places])[:3]
    assert [tuple(choice.action) for choice in found] == best
    assert [choice.rating for choice in found] == pytest.approx([every[places] for places in best])


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


def test_q_values_of_sub_actions_are_their_mean() -> None:
    model = FastDQN(BranchingDQNPolicy, Space(HEADS), **SMALL)
    found = best_choices(model, OBSERVATIONS, None)
    with torch.no_grad():
        heads = torch.split(model.q_net(torch.from_numpy(OBSERVATIONS))[0], [3, 2, 4])
    assert found[0].action.tolist() == [int(head.argmax()) for head in heads]
    assert found[0].rating == pytest.approx(float(np.mean([head.max() for head in heads])), abs=1e-6)


def test_no_choices_of_continuous_actions_and_of_policies_that_remember() -> None:
    assert best_choices(ppo(PPO, gym.spaces.Box(-1, 1, (2,))), OBSERVATIONS, None) == []
    assert best_choices(ppo(RecurrentPPO, FIVE, "MlpLstmPolicy"), OBSERVATIONS, None) == []
