"""Whose decision an observation is, and what a policy sees of it and chooses."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.algos.owners import NOBODY, SEVERAL, Owners, View, Viewed, view_of
from fasttrain.errors import ConfigError
from toys import RandomEnv


def test_each_observation_has_one_owner() -> None:
    owners = Owners(["a", "b", "c"], [[-1], [-3, -2], None])
    shown = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 1]], np.float32)
    assert owners(shown).tolist() == [0, 1, 1, 2, SEVERAL]
    assert owners(np.stack([shown, shown])).shape == (2, 5)
    two = Owners(["a", "b"], [[0], [1]])
    assert two(shown[:, :2]).tolist() == [NOBODY, 0, 1, NOBODY, 1]
    assert [(number, rows) for number, rows in two.rows(np.zeros((2, 2)))] == [(0, slice(None))]
    with pytest.raises(ConfigError, match="belongs to several of a, b, c"):
        owners.check(owners(shown))
    with pytest.raises(ConfigError, match="belongs to none of a, b"):
        two.check(two(shown[:, :2]))


def test_a_view_has_the_same_columns_of_every_frame() -> None:
    view = view_of([0, 2], 3, 2, 0, False)
    assert view.seen(np.arange(12).reshape(2, 6)).tolist() == [[0, 2, 3, 5], [6, 8, 9, 11]]
    assert view_of(None, 3, 2, 0, False).is_whole


def test_actions_are_placed_among_those_of_the_game() -> None:
    space = spaces.MultiDiscrete([3, 4, 2])
    manager, worker = (view_of(None, 5, 1, 2, sets) for sets in (True, False))
    assert manager.placed(np.array([1, 0]), space).tolist() == [[0, 0, 1], [0, 0, 0]]
    assert worker.placed(np.array([[2, 3]]), space).tolist() == [[2, 3, 0]]
    legal = np.arange(9)
    assert (legal[manager.masks].tolist(), legal[worker.masks].tolist()) == ([7, 8], [*range(7)])
    assert View().placed(np.array([1]), space).tolist() == [1]


@pytest.mark.parametrize(
    ("game", "goal", "own"),
    [
        (spaces.MultiDiscrete([3, 4]), spaces.Discrete(4), spaces.Discrete(3)),
        (spaces.MultiDiscrete([3, 3, 4]), spaces.Discrete(4), spaces.MultiDiscrete([3, 3])),
        (spaces.Box(np.float32([-1, 0]), np.float32([1, 3])), spaces.Discrete(4), spaces.Box(-1, 1, (1,), np.float32)),
    ],
)
def test_a_model_is_built_for_the_spaces_of_its_view(game: spaces.Space, goal: spaces.Space, own: spaces.Space) -> None:
    venv = DummyVecEnv([lambda: RandomEnv(spaces.Box(-1, 1, (6,), np.float32), game)])
    manager, worker = (Viewed(venv, view_of([0], 6, 1, 4, sets)) for sets in (True, False))
    assert (manager.action_space, worker.action_space) == (goal, own)
    assert manager.observation_space == spaces.Box(-1, 1, (1,), np.float32)
