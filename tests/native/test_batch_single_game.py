from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import ConfigError
from fasttrain.native.batch import SingleGame
from fasttrain.spec.plain import from_dict, to_dict
from fasttrain_games.skirmish.env import SkirmishEnv
from fasttrain_games.skullking.env import SkullKingEnv

ENVS: dict[str, Any] = {"skullking": SkullKingEnv, "skirmish": lambda **more: SkirmishEnv(action_mode="units", **more)}
both = pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)


def play(env: SingleGame[Any, Any], rng: np.random.Generator, steps: int) -> list[tuple[Any, ...]]:
    """Any action of the space, legal or not; the next game when one ends."""
    seen: list[tuple[Any, ...]] = []
    for _ in range(steps):
        action = int(rng.integers(env.action_space.n))
        observation, reward, ended, cut, info = env.step(action)
        seen.append((observation.tolist(), reward, ended, cut, info, env.action_masks().tolist()))
        if ended:
            seen.append((env.reset()[0].tolist(),))
    return seen


@both
def test_the_state_goes_through_plain_values_into_another_env(make: Any) -> None:
    one, other = make(), make()
    one.reset(seed=3)
    play(one, np.random.default_rng(0), 30)
    other.reset(seed=8)
    play(other, np.random.default_rng(1), 50)
    other.set_state(from_dict(to_dict(one.get_state())))
    assert play(other, np.random.default_rng(2), 300) == play(one, np.random.default_rng(2), 300)


@both
def test_a_copy_by_pickle_plays_on_alike(make: Any) -> None:
    one = make()
    one.reset(seed=1)
    play(one, np.random.default_rng(0), 5)
    other = pickle.loads(pickle.dumps(one))
    assert play(other, np.random.default_rng(2), 100) == play(one, np.random.default_rng(2), 100)


@both
def test_observations_and_masks_are_the_callers_own(make: Any) -> None:
    env = make()
    first, _ = env.reset(seed=0)
    mask = env.action_masks()
    before = first.copy(), mask.copy()
    env.step(int(np.flatnonzero(mask)[-1]))
    assert np.array_equal(first, before[0])
    assert np.array_equal(mask, before[1])


@both
def test_illegal_actions_are_counted_across_a_state(make: Any) -> None:
    one, other = make(), make()
    one.reset(seed=3)
    illegal = int(np.flatnonzero(~one.action_masks())[0])
    assert one.step(illegal)[4]["illegal_actions"] == 1
    other.reset(seed=9)
    other.set_state(one.get_state())
    info = other.step(int(np.flatnonzero(other.action_masks())[0]))[4]
    assert info["illegal_actions"] == 1


@both
def test_a_state_of_another_size_is_refused(make: Any) -> None:
    env = make()
    env.reset(seed=0)
    state = env.get_state()
    state["games"] = state["games"][1:]
    with pytest.raises(ValueError, match="games has"):
        env.set_state(state)


@both
def test_reset_without_a_seed_hands_out_the_game_that_began(make: Any) -> None:
    env = make()
    env.reset(seed=5)
    ended = False
    while not ended:
        *_, ended, _, _ = env.step(int(np.flatnonzero(env.action_masks())[0]))
    mask = env.action_masks()
    first, _ = env.reset()
    assert (env.action_masks() == mask).all()
    second, _ = env.reset()
    assert not np.array_equal(first, second)  # another game, not the same one again


@both
def test_on_illegal_is_one_of_two(make: Any) -> None:
    with pytest.raises(ConfigError, match="choose 'replace' or 'raise'"):
        make(on_illegal="ignore")
