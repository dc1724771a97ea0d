"""Actions in words, in both envs and both modes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fasttrain_games.skirmish.env import SkirmishEnv
from fasttrain_games.skirmish.words import action_in_words, choice_in_words, move_in_words, target_in_words
from reference.skirmish_python.env import SkirmishPythonEnv

ENVS = pytest.mark.parametrize("kind", [SkirmishEnv, SkirmishPythonEnv])


def test_moves_and_targets():
    assert [move_in_words(move) for move in (0, 1, 2, 3, 4, 24)] == [
        "stays", "half a move N", "a full move N", "an advance N", "half a move NE", "an advance NW",
    ]  # fmt: skip
    assert target_in_words(0, 0, 1) == "shoots nobody"
    assert target_in_words(2, 0, 1) == "shoots b"
    assert target_in_words(1, 1, 2) == "charges 1", "the opponent's enemies have numbers"


@ENVS
def test_heads(kind: Any):
    env = kind(opponent="random")
    env.reset(seed=3)
    moves = np.array([2, 0, 24, 0, 0, 0, 3, 1])
    assert env.describe_action(moves) == "1 a full move N, 3 an advance NW, smokescreen for 2"
    assert env.describe_action(np.zeros(8, int)) == "stays"
    assert [env.describe_choice(part, 1) for part in (0, 2, 5, 6, 7)] == [
        "1 half a move N", "3 half a move N", "3 shoots a", "re-roll", "for 2",
    ]  # fmt: skip
    env.step(np.zeros(8, int))  # the shooting phase comes
    assert env.describe_action(np.array([0, 0, 0, 0, 2, 0, 0, 0])) == "2 shoots b"
    assert env.describe_action(np.zeros(8, int)) == "nothing"


@ENVS
def test_units(kind: Any):
    env = kind(opponent="random", action_mode="units")
    env.reset(seed=3)
    assert env.describe_action(2) == "1 a full move N"
    env.step(np.int64(0))
    assert env.describe_choice(0, 0) == "2 stays"


def test_every_legal_action_has_words():
    env = SkirmishEnv(opponent="greedy")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        mask, options = env.action_masks(), env._game.options
        heads = np.split(mask, np.cumsum(options.head_sizes)[:-1])
        action = np.array([rng.choice(np.flatnonzero(head)) for head in heads])
        assert env.describe_action(action) == action_in_words(options, env.view(), action.tolist())
        assert all(choice_in_words(options, env.view(), part, int(value)) for part, value in enumerate(action))
        if env.step(action)[2]:
            env.reset()
