"""Pairs of episodes: which evidence says what, worked out by hand; the same actions again give the same frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain.envs.probe import SEED, Play
from fasttrain.envs.second_play import (
    RECORDED_STEPS,
    Difference,
    Frame,
    Pair,
    Recorder,
    differing_part,
    first_difference,
    frame_of,
    ignored_action,
    independent_reward,
    late_masks,
)
from fasttrain.envs.user_code import seed_streams
from plain_env import PlainEnv

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
    assert "8 episodes were played again" in ignored_action([SAME] * 8)
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
    assert "2 different ones" in independent_reward([moved] * 30)
    assert independent_reward([moved] * 29) == "", "an action that matters in one of ten episodes may look so"
    assert independent_reward([moved] * 30 + [pair(frames([0, 1, 0]), frames([0, 0, 0]))]) == ""


def test_independent_reward_of_episodes_whose_length_depends_on_the_action() -> None:
    shorter = pair(frames([0.3, 0.1, 0.5, 0.7]), frames([0.3, 0.1]))
    assert "only the length of episodes" in independent_reward([shorter] * 30)
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
    assert "in each of 8 episodes the second mask was equal to the first" in late_masks([], [repeated] * 8)
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


class Dice(PlainEnv):
    """Shows a number; four steps an episode."""

    observation_space, action_space, length = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(3), 4

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.draw = draw

    def step(self, action: Any) -> Any:
        value = (self.draw or self.np_random.random)() + action
        return np.full(1, value, np.float32), float(action), *super().step(action)[2:]


def recorded(make: Callable[[], Any], steps: int = 12) -> Recorder:
    seed_streams(1, 1)
    recorder = Recorder()
    Play(make).run(NEVER, steps, recorder)
    return recorder


def test_the_same_actions_give_the_same_frames() -> None:
    frames = recorded(Dice).frames
    assert len(frames) == 3 + 12 + 2  # reset, step, reset; twelve steps with two resets between
    assert first_difference(Play(Dice), frames, SEED, NEVER) is None
    assert first_difference(Play(Dice), frames, SEED + 1, NEVER) == Difference(1, "observation", 1, 1)
    assert len(recorded(Dice, 1_000).frames) == RECORDED_STEPS


def test_parts_that_differ() -> None:
    play = Play(Dice)
    frame = frame_of(play.reset(1))
    assert differing_part(frame, frame) == ""
    assert differing_part(frame._replace(reward=float("nan")), frame._replace(reward=float("nan"))) == ""
    for part, changes in {
        "observation": {"observation": 1},
        "reward": {"reward": 1.0},
        "end of the episode": {"ends": "True False"},
        "action mask": {"mask": b"1"},
    }.items():
        assert differing_part(frame, frame._replace(**changes)) == part
