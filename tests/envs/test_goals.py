from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.goals import Goals
from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.errors import EnvSpecError
from plain_env import PlainEnv
from toys import ToyGymEnv


class Counting(PlainEnv):
    """Shows the steps, and whether they are more than two. Ends after five."""

    observation_space, length = spaces.Box(0, 9, (2,), np.float32), 5

    def __init__(self, action_space: spaces.Space[Any] | None = None) -> None:
        self.action_space = action_space or spaces.Discrete(2)
        self.got: list[Any] = []

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self.got.append(action)
        return super().step(action)

    def seen(self) -> Any:
        return np.array([self.time, self.time > 2], np.float32)

    def paid(self, action: Any) -> float:
        return float(self.time)


def played(env: Goals, actions: list[Any]) -> list[tuple[list[float], float]]:
    """The observation and the reward after the reset and each action."""
    seen = [(env.reset(seed=0)[0].tolist(), 0.0)]
    for action in actions:
        observation, reward, *_ = env.step(np.array(action))
        assert observation in env.observation_space
        seen.append((observation.tolist(), reward))
    return seen


def test_a_goal_is_due_at_the_beginning_and_after_every_two_steps() -> None:
    env = Goals(Counting(), 3, 2)
    assert env.action_space == spaces.MultiDiscrete([2, 3])
    assert played(env, [[1, 2], [1, 0], [0, 0], [0, 0], [1, 1], [1, 1], [0, 1]]) == [
        ([0, 0, 0, 0, 0], 0.0),  # a goal is due
        ([0, 0, 0, 0, 1], 0.0),  # it is goal 2
        ([1, 0, 0, 0, 1], 1.0),
        ([2, 0, 0, 0, 0], 2.0),
        ([2, 0, 1, 0, 0], 0.0),
        ([3, 1, 1, 0, 0], 3.0),
        ([4, 1, 0, 0, 0], 4.0),
        ([4, 1, 0, 1, 0], 0.0),
    ]
    assert env.unwrapped.got == [1, 0, 1, 1]  # type: ignore[attr-defined]
    assert env.reset()[0].tolist() == [0, 0, 0, 0, 0], "a new episode has no goal yet"


def test_a_goal_is_due_when_a_column_changes() -> None:
    seen = played(Goals(Counting(), 2, 0, [1]), [[0, 1]] * 5)
    assert [observation for observation, _ in seen[-2:]] == [[3, 1, 0, 0], [3, 1, 0, 1]]
    assert [observation[2:] for observation, _ in seen[1:4]] == [[0, 1]] * 3
    with pytest.raises(EnvSpecError, match="goal_every=phase: the observation has no column 2"):
        Goals(Counting(), 2, 0, [2])


def test_an_action_of_numbers_has_one_more() -> None:
    env = Goals(Counting(spaces.Box(-2.0, 1.0, (2,), np.float32)), 4, 1)
    assert env.action_space == spaces.Box(np.array([-2, -2, 0], np.float32), np.array([1, 1, 3], np.float32))
    assert played(env, [[0.5, 0.5, 3.0], [-1.5, 0.5, 0.0]])[1][0] == [0, 0, 0, 0, 0, 1]
    (got,) = env.unwrapped.got  # type: ignore[attr-defined]
    assert got.tolist() == [-1.5, 0.5]


def test_masks_are_the_envs_and_every_goal_is_legal() -> None:
    spec = EnvSpec(
        entry_point="toys:ToyGymEnv", kwargs={"index": 1}, needs_masks=True, goals=(2, 2, ()), action_repeat=2
    )
    env = make_env(spec)
    env.reset(seed=0)
    masks = env.get_wrapper_attr("action_masks")
    assert masks().tolist() == [*ToyGymEnv(1).action_masks().tolist(), True, True]
    env.step(np.array([0, 1]))
    assert env.get_wrapper_attr("describe_action")([3, 1]) == "3"
    assert env.step(np.array([3, 0]))[0].tolist() == [0, 2, 3, 0, 1], "the env's own action is repeated, no goal is"
    assert not masks()[2]
    env.step(np.array([5, 0]))
    assert env.get_wrapper_attr("describe_action")([3, 1]) == "sets goal 1"
    assert not make_env(EnvSpec(entry_point="toys:Corridor", goals=(2, 2, ()))).has_wrapper_attr("action_masks")


def test_spaces_without_a_place_for_goals_are_refused() -> None:
    with pytest.raises(EnvSpecError, match="goal_every goes with actions that are Discrete"):
        Goals(Counting(spaces.MultiBinary(3)), 2, 2)
    with pytest.raises(EnvSpecError, match="goal_every appends to an observation that is a Box with one axis"):
        Goals(gym.make("FrozenLake-v1"), 2, 2)
