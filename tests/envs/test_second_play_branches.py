"""Pairs of episodes: which evidence says what, worked out by hand, and the play that gathers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.probe import SEED, Play, ProbeResult
from fasttrain.envs.second_play import (
    MAX_PAIRS,
    Branches,
    Frame,
    Pair,
    frame_of,
    ignored_action,
    independent_reward,
    late_masks,
)  # fmt: skip

COSTS = ProbeResult(
    build_s=0.0, step_s=1e-6, step_cv=0.0, mask_s=0.0, reset_s=0.0, steps=1, resets=1, episode_steps=None,
    has_masks=False, cpu_share=1.0, info_bytes=0.0, density=(1.0, 1.0),
)  # fmt: skip
NEVER = float("inf")


def frames(rewards: Sequence[float], observations: str = "", masks: str = "") -> list[Frame]:
    """A reset and then one step for each reward; observations and masks by letter, the first of the reset."""
    observations = observations or "0123456789"[: len(rewards) + 1]
    shown = [mask.encode() for mask in masks] + [None] * (len(rewards) + 1 - len(masks))
    result = [Frame(None, observations[0], 0.0, "", shown[0])]
    for index, reward in enumerate(rewards, 1):
        ends = "end" if index == len(rewards) else ""
        result.append(Frame(index % 2, observations[index], reward, ends, shown[index]))
    return result


def pair(one: list[Frame], other: list[Frame], parted: int = 0) -> Pair:
    return Pair(one, other, parted, same_next=True)


SAME = pair(frames([0, 1, 0]), frames([0, 1, 0]))


def test_ignored_action() -> None:
    assert "8 episodes played again" in ignored_action([SAME] * 8)
    assert "of 24 steps" in ignored_action([SAME] * 8)
    assert ignored_action([SAME] * 6) == ""  # 18 steps: too few to say so
    assert ignored_action([SAME] * 7 + [pair(frames([0, 1, 0]), frames([0, 1, 0], "0x23"))]) == ""
    assert ignored_action([SAME] * 7 + [pair(frames([0, 1, 0]), frames([0, 1]))]) == ""


def test_ignored_action_needs_more_where_the_reward_never_varies() -> None:
    flat = pair(frames([1, 1, 1]), frames([1, 1, 1]))
    assert ignored_action([flat] * 16) == ""
    assert ignored_action([flat] * 17)
    still = pair(frames([1, 1, 1], "0000"), frames([1, 1, 1], "0000"))
    assert ignored_action([still] * 50) == "", "nothing moves: nothing can be said about actions"


def test_independent_reward() -> None:
    moved = pair(frames([0, 1, 0]), frames([0, 1, 0], "0x23"))
    assert "2 different rewards" in independent_reward([moved] * 30)
    assert independent_reward([moved] * 29) == "", "an action that matters in one of ten episodes may look so"
    assert independent_reward([moved] * 30 + [pair(frames([0, 1, 0]), frames([0, 0, 0]))]) == ""


def test_independent_reward_of_episodes_whose_length_depends_on_the_action() -> None:
    shorter = pair(frames([0.3, 0.1, 0.5, 0.7]), frames([0.3, 0.1]))
    assert "only how long they last" in independent_reward([shorter] * 30)
    constant = pair(frames([1, 1, 1, 1]), frames([1, 1]))
    assert independent_reward([constant] * 30) == "", "CartPole: the length is the return"


def test_a_reward_that_comes_last_and_is_always_the_same_says_nothing() -> None:
    lost = pair(frames([0, 0, -1]), frames([0, 0, -1], "0x23"))
    assert independent_reward([lost] * 30) == ""
    won = pair(frames([0, 0, 1]), frames([0, 0, 1], "0x23"))
    assert independent_reward([lost] * 15 + [won] * 15), "the seed decides it, the action never"


def test_late_masks() -> None:
    late = pair(frames([0, 0, 0], "0123", "aab"), frames([0, 0, 0], "0x23", "aac"))
    prompt = pair(frames([0, 0, 0], "0123", "aab"), frames([0, 0, 0], "0x23", "acb"))
    assert "5 of 5 replays" in late_masks([late] * 5, [])
    assert late_masks([late] * 4, []) == ""
    assert late_masks([late] * 20 + [prompt], []) == ""
    blind = pair(frames([0, 0, 0], "0123", "aab"), frames([0, 0, 0], "0123", "aac"))
    assert late_masks([blind] * 5, []) == "", "the observation does not react at once either"


def test_a_first_mask_that_comes_twice() -> None:
    repeated = frames([0] * 5, "012345", "aabcde")
    assert "in each of 8 episodes the first mask came twice" in late_masks([], [repeated] * 8)
    assert late_masks([], [repeated] * 7) == ""
    assert late_masks([], [*[repeated] * 8, frames([0] * 5, "012345", "abcdef")]) == ""
    assert late_masks([], [frames([0] * 5, "012345", "aaabbb")] * 8) == "", "masks that often stay"


def test_differs_is_unknown_beyond_the_end_and_without_masks() -> None:
    short = pair(frames([0], "01", "a"), frames([0], "01", "b"))
    assert short.differs("mask", 1) is None
    assert short.differs("mask", 2) is None
    assert SAME.differs("mask", 1) is None
    assert SAME._replace(same_next=False).differs("observation", 2) is None
    assert SAME.differs("observation", 2) is False


class Counter(gymnasium.Env[Any, Any]):
    """Counts what was played; `leak`: reset() forgets to set that back."""

    observation_space, action_space = spaces.Box(-99, 99, (2,), np.float32), spaces.Discrete(3)

    def __init__(self, leak: bool = False, masked: bool = False, length: int = 30) -> None:
        self.leak, self.total, self.length = leak, 0, length
        if masked:
            self.action_masks = lambda: np.array([True, self.total % 2 == 0, True])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        self.total = self.total % 7 if self.leak else 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.count, self.total = self.count + 1, self.total + int(action)
        return self._observation(), float(self.total), self.count >= self.length, False, {}

    def _observation(self) -> Any:
        return np.array([self.count, self.total], np.float32)


def played(**options: Any) -> Branches:
    first = frame_of(Play(lambda: Counter(**options)).reset(SEED))
    branches = Branches(Play(lambda: Counter(**options), lenient=True), COSTS, NEVER)
    branches.run(first)
    return branches


def test_an_env_that_reacts_is_soon_settled() -> None:
    branches = played()
    assert len(branches.pairs) == 2
    assert not branches.short_pairs
    assert all(not pair.identical and not pair.rewards_identical for pair in branches.pairs)
    assert list(branches.findings()) == []


def test_pairs_share_what_came_before_the_parting() -> None:
    for one, other, parted, _ in played(masked=True).pairs:
        assert one[: parted + 1] == other[: parted + 1]
        assert one[parted + 1].action != other[parted + 1].action
        assert len(one) == len(other) == 31


def test_masks_that_react_at_once_settle_the_masks() -> None:
    branches = played(masked=True)
    assert any(pair.differs("mask", 1) for pair in branches.pairs + branches.short_pairs)
    assert list(branches.findings()) == []


def test_what_is_left_of_an_earlier_episode_is_seen() -> None:
    branches = played(leak=True)
    assert branches.carries_over is not None
    assert branches.carries_over.part == "observation"


def test_no_time_no_pairs() -> None:
    branches = Branches(Play(Counter, lenient=True), COSTS, deadline=0.0)
    branches.run(frame_of(Play(Counter).reset(SEED)))
    assert not branches.in_time
    assert branches.pairs == []
    assert list(branches.findings()) == []


def test_an_env_without_a_choice_ends_the_search() -> None:
    class Forced(Counter):
        action_space = spaces.Discrete(1)

    branches = Branches(Play(Forced, lenient=True), COSTS, NEVER)
    branches.run(frame_of(Play(Forced).reset(SEED)))
    assert branches.pairs == []
    assert len(branches.episodes) == 10


@pytest.mark.parametrize("length", [1, 2, 30])
def test_pairs_of_an_env_that_ignores_its_actions_are_all_played(length: int) -> None:
    class Deaf(Counter):
        def step(self, action: Any) -> Any:
            return super().step(1)

    branches = Branches(Play(lambda: Deaf(length=length), lenient=True), COSTS, NEVER)
    branches.run(frame_of(Play(Deaf).reset(SEED)))
    assert len(branches.pairs) == MAX_PAIRS
    assert all(pair.identical for pair in branches.pairs)


class Stones(gymnasium.Env[Any, Any]):
    """Take each of four stones once; raises where one is gone."""

    observation_space, action_space = spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.there = np.ones(4, np.bool_)
        return self.there.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        if not self.there[action]:
            raise ValueError("gone")
        self.there[action] = False
        return self.there.astype(np.float32), 0.0, not self.there.any(), False, {}

    def action_masks(self) -> Any:
        return self.there.copy()


def test_what_the_other_action_made_illegal_is_not_played() -> None:
    branches = Branches(Play(Stones, lenient=True), COSTS, NEVER)
    branches.run(frame_of(Play(Stones).reset(SEED)))
    assert {pair.same_next for pair in branches.pairs} == {True, False}
