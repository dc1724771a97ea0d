"""Repeated actions: rewards add up, and the repetition ends where the episode or the action's legality does."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.masks import ActionMasks
from fasttrain.envs.wrappers import ActionRepeat


class Counter(gymnasium.Env[Any, Any]):
    """Step t pays 10^(t-1). Action a is legal while fewer than `legal_for[a]` steps were taken."""

    observation_space = spaces.Box(0, 99, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 5, cut: bool = False, legal_for: tuple[int, int] = (99, 99)) -> None:
        self.length, self.cut, self.legal_for = length, cut, legal_for
        self.taken: list[int] = []

    def action_masks(self) -> Any:
        return [len(self.taken) < limit for limit in self.legal_for]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.taken = []
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(int(action))
        time = len(self.taken)
        over = time == self.length
        info = {"time": time, "perf": {"enemy_turn_ms": 2.0, "games": time}}
        return np.full(1, time, np.float32), 10.0 ** (time - 1), over and not self.cut, over and self.cut, info


def test_rewards_add_up_and_the_last_observation_and_info_are_seen() -> None:
    inner = Counter()
    env = ActionRepeat(inner, 3, masked=False)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(1)
    assert inner.taken == [1, 1, 1]
    assert (observation.tolist(), reward, terminated, truncated) == ([3.0], 111.0, False, False)
    assert info == {"time": 3, "perf": {"enemy_turn_ms": 6.0, "games": 3}}, "opponents' time adds up, state does not"


@pytest.mark.parametrize("cut", [False, True])
def test_the_episodes_end_ends_the_repetition(cut: bool) -> None:
    inner = Counter(length=4, cut=cut)
    env = ActionRepeat(inner, 3, masked=False)
    env.reset()
    env.step(0)
    observation, reward, terminated, truncated, info = env.step(1)
    assert inner.taken == [0, 0, 0, 1]
    assert (observation.tolist(), reward, terminated, truncated) == ([4.0], 1000.0, not cut, cut)
    assert info["time"] == 4


@pytest.mark.parametrize(("masked", "taken"), [(True, [1, 1]), (False, [1, 1, 1])])
def test_an_action_that_is_no_longer_legal_is_not_repeated(masked: bool, taken: list[int]) -> None:
    inner = Counter(legal_for=(99, 2))
    env = ActionRepeat(ActionMasks(inner, "method"), 3, masked)
    env.reset()
    env.step(1)
    assert inner.taken == taken
    assert env.get_wrapper_attr("action_masks")().tolist() == [True, False]


@given(length=st.integers(1, 12), times=st.integers(1, 6))
def test_every_step_of_the_env_is_paid_once(length: int, times: int) -> None:
    inner = Counter(length=length)
    env = ActionRepeat(inner, times, masked=False)
    env.reset()
    total, decisions, over = 0.0, 0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(0)
        total, decisions, over = total + reward, decisions + 1, terminated or truncated
    assert len(inner.taken) == length
    assert decisions == -(-length // times)
    assert total == sum(10.0**t for t in range(length))


def test_make_env_repeats_inside_lean_info_and_counts_the_limit_in_the_envs_own_steps() -> None:
    spec = EnvSpec(entry_point=f"{__name__}:Counter", kwargs={"length": 50}, action_repeat=4, max_episode_steps=6,
                   lean_info=True)  # fmt: skip
    env = make_env(spec)
    env.reset()
    first, second = env.step(0), env.step(0)
    assert (first[1], first[3], "time" in first[4]) == (1111.0, False, False)
    assert (second[1], second[3], second[4]["time"]) == (110000.0, True, 6)
    assert isinstance(env.env, ActionRepeat)  # type: ignore[attr-defined]
    assert isinstance(env.env.env, ActionMasks)  # type: ignore[attr-defined]
    assert not isinstance(make_env(EnvSpec(entry_point=f"{__name__}:Counter")), ActionRepeat)


def test_make_env_gives_the_masks_to_the_repetition() -> None:
    spec = EnvSpec(entry_point=f"{__name__}:Counter", kwargs={"legal_for": (99, 2)}, action_repeat=3)
    env = make_env(spec)
    env.reset()
    env.step(1)
    assert env.unwrapped.taken == [1, 1]  # type: ignore[attr-defined]
    ignored = make_env(dataclasses.replace(spec, use_masks=False))
    ignored.reset()
    ignored.step(1)
    assert ignored.unwrapped.taken == [1, 1, 1]  # type: ignore[attr-defined]
