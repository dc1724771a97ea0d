from __future__ import annotations

import json
import random
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs import retrace
from fasttrain.envs.retrace import Retrace
from fasttrain_games.skirmish.env import SkirmishEnv
from fasttrain_games.skullking.env import SkullKingEnv
from plain_env import PlainEnv


class Walk(PlainEnv):
    """A walk with random steps: from Gymnasium's generator, or from one of its own that nobody can see."""

    observation_space = spaces.Dict({"x": spaces.Box(-99, 99, (1,), np.float64)})
    action_space, length = spaces.Box(-1, 1, (2,), np.float32), 7

    def __init__(self, hidden: bool = False) -> None:
        self.hidden = np.random.default_rng() if hidden else None

    def seen(self) -> Any:
        self.x = self.x if self.time else self.np_random.normal(size=1)
        return {"x": self.x.copy()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x += action[0] + (self.hidden or self.np_random).normal()
        return super().step(action)

    def paid(self, action: Any) -> float:
        return float(self.x[0])


def played(env: Any, steps: int, seed: int | None = 3) -> list[Any]:
    """Random steps, a new episode where one ends; what was seen."""
    rng, seen = np.random.default_rng(0), []
    env.reset(seed=seed)
    for _ in range(steps):
        masks = env.get_wrapper_attr("action_masks")() if env.has_wrapper_attr("action_masks") else None
        action = rng.uniform(-1, 1, 2).astype(np.float32) if masks is None else int(rng.choice(np.flatnonzero(masks)))
        observation, _, ended, cut, _ = env.step(action)
        if ended or cut:
            observation, _ = env.reset()
        seen.append(observation)
    return seen


def travelled(notes: Any) -> Any:
    """As a checkpoint keeps them: JSON but for the arrays."""
    plain = {name: notes[name] for name in ("seed", "begin", "now", "total")}
    return {**json.loads(json.dumps(plain)), "actions": notes["actions"], "observation": notes["observation"]}


@pytest.mark.parametrize("steps", [0, 3, 7, 16])
@pytest.mark.parametrize("build", [Walk, lambda: gymnasium.wrappers.TimeLimit(Walk(), 5)])
def test_a_fresh_env_goes_on_as_the_other(build: Any, steps: int):
    env, other = Retrace(build()), Retrace(build())
    played(env, steps)
    notes = travelled(env.retrace_notes())
    notes["total"] = float(np.nextafter(notes["total"], 1e9))  # as another way of adding rounds it
    answer = other.retrace(notes, other_seed=77)
    assert answer["same"]
    action = np.zeros(2, np.float32)
    for _ in range(4):
        mine, his = env.step(action), other.step(action)
        assert mine[0]["x"] == his[0]["x"]
        assert mine[1:4] == his[1:4]
        if mine[2] or mine[3]:
            assert env.reset()[0]["x"] == other.reset()[0]["x"]


@pytest.mark.parametrize("build", [SkullKingEnv, lambda: SkirmishEnv(action_mode="units")])
def test_games_with_a_stream_of_their_own_tell_it(build: Any):
    env, other = Retrace(build()), Retrace(build())
    played(env, 400)
    answer = other.retrace(travelled(env.retrace_notes()), other_seed=77)
    assert answer["same"]
    assert (answer["mask"] == env.get_wrapper_attr("action_masks")()).all()
    for _ in range(300):
        action = int(np.flatnonzero(env.get_wrapper_attr("action_masks")())[-1])
        mine, his = env.step(action), other.step(action)
        assert (mine[0] == his[0]).all()
        assert mine[1:4] == his[1:4]
        if mine[2]:
            assert (env.reset()[0] == other.reset()[0]).all()


def test_hidden_randomness_is_noticed_and_a_new_episode_begun():
    env, other = Retrace(Walk(hidden=True)), Retrace(Walk(hidden=True))
    played(env, 3)
    answer = other.retrace(travelled(env.retrace_notes()), other_seed=77)
    assert not answer["same"]
    assert answer["observation"]["x"] == Walk().reset(seed=77)[0]["x"]
    assert not other.retrace(None, other_seed=78)["same"]


def test_an_episode_that_takes_too_long_is_given_up():
    env, other = Retrace(Walk()), Retrace(Walk())
    played(env, 3)
    notes = travelled(env.retrace_notes())
    answer = other.retrace(notes, other_seed=77, most_s=-1.0)
    assert not answer["same"]
    assert answer["observation"]["x"] == Walk().reset(seed=77)[0]["x"]
    assert other.retrace(notes, other_seed=77)["same"]


def test_what_cannot_be_repeated_has_no_notes(monkeypatch: pytest.MonkeyPatch):
    env = Retrace(Walk())
    assert env.retrace_notes() is None, "no episode yet"
    env.reset(seed=1, options={"level": 3})
    assert env.retrace_notes() is None, "options are any objects"
    monkeypatch.setattr(retrace, "MOST_ACTIONS", 2)
    played(env, 2)
    assert env.retrace_notes() is not None
    env.step(np.zeros(2, np.float32))
    assert env.retrace_notes() is None, "too long to repeat"


def test_a_foreign_get_state_does_no_harm():
    class Foreign(Walk):
        def get_state(self) -> Any:
            return object()

        def set_state(self, position: Any, velocity: Any) -> None:
            raise AssertionError

    env = Retrace(Foreign())
    played(env, 9)
    assert env.retrace_notes() is None


def test_what_an_envs_own_state_is_made_of_comes_back_to_the_type():
    class Own(Walk):
        def reset(self, **more: Any) -> Any:
            self.own = {0: 1.5, (1, "a"): float("inf"), "board": np.eye(2, dtype=np.int8), "who": np.int64(3)}
            return super().reset(**more)

        def get_state(self) -> Any:
            return self.own

        def set_state(self, state: Any) -> None:
            self.own = state

    env, other = Retrace(Own()), Retrace(Own())
    played(env, 3)
    assert other.retrace(travelled(env.retrace_notes()), other_seed=77)["same"]
    found = other.unwrapped.own
    assert (found[0], found[1, "a"], found["who"], found["board"].dtype) == (1.5, float("inf"), 3, np.int8)


@pytest.mark.parametrize("kind", [np.random.RandomState, random.Random, lambda seed: np.zeros(2, np.uint32)])
def test_a_generator_of_another_kind_begins_a_new_episode(kind: Any):
    class Ported(PlainEnv):
        action_space, length = Walk.action_space, 7

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            answer = super().reset()
            self.np_random = kind(seed or 0)
            return answer

    env = Retrace(Ported())
    played(env, 10)
    assert env.retrace_notes() is None
    assert env.retrace(None, other_seed=3)["same"] is False
