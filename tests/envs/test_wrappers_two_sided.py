"""Whose turn it is travels in the info, and a negative action leaves the env as it is."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from duels import Duel
from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.wrappers import TwoSided
from fasttrain.errors import EnvSpecError


def test_turns_are_told():
    env = TwoSided(Duel())
    _, info = env.reset()
    assert info == {"opponents_turn": False}
    observation, reward, ended, _, info = env.step(2)
    assert (observation.tolist(), reward, ended, info) == ([1, 2, 1], 2.0, False, {"opponents_turn": True})


def test_a_negative_action_changes_nothing():
    env = TwoSided(Duel())
    env.reset()
    before = env.step(2)[0]
    for action in (-1, np.int64(-1), np.array([-1, -1])):
        after, reward, ended, cut, info = env.step(action)
        np.testing.assert_array_equal(after, before)
        assert (reward, ended, cut, info) == (0.0, False, False, {"opponents_turn": True})
    assert env.unwrapped.seen == [(0, False, 2)]


def test_an_env_with_one_side_is_refused():
    with pytest.raises(EnvSpecError, match="cannot be played against oneself: it has no property opponents_turn"):
        TwoSided(gymnasium.make("CartPole-v1"))


def test_a_property_that_raises_is_shown_with_its_own_exception():
    class Broken(Duel):
        @property
        def opponents_turn(self) -> bool:
            return self.board.turn  # type: ignore[attr-defined, no-any-return]

        def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
            return np.zeros(3, np.float32), {}

    env = TwoSided(gymnasium.wrappers.TimeLimit(Broken(), 9))
    with pytest.raises(AttributeError, match="no attribute 'board'"):
        env.reset()


def test_actions_that_may_be_negative_are_refused():
    class Continuous(Duel):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    with pytest.raises(EnvSpecError, match="cannot be played against oneself: Box"):
        TwoSided(Continuous())


def test_the_spec_puts_it_outermost():
    env = make_env(EnvSpec(entry_point="duels:Duel", two_sided=True, lean_info=True))
    assert isinstance(env, TwoSided)
    assert env.reset()[1] == {"opponents_turn": False}
