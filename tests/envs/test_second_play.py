"""Playing the same actions again: differences are located, and the stream behind them is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.envs.probe import SEED, Play
from fasttrain.envs.second_play import (
    RECORDED_STEPS,
    Difference,
    Recorder,
    differing_part,
    first_difference,
    frame_of,
)
from fasttrain.envs.user_code import seed_streams

NEVER = float("inf")


class Dice(gymnasium.Env[Any, Any]):
    """Shows a number; four steps an episode."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(3)

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.draw = draw

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        value = (self.draw or self.np_random.random)() + action
        return np.full(1, value, np.float32), float(action), self.count == 4, False, {}


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


def test_only_so_much_is_recorded() -> None:
    assert len(recorded(Dice, 1_000).frames) == RECORDED_STEPS


def test_time_ends_a_replay_but_not_before_the_place_in_question() -> None:
    frames = recorded(Dice).frames

    def steps(at_least: int) -> int:
        play = Play(Dice)
        assert first_difference(play, frames, SEED, time.perf_counter() - 1, at_least) is None
        return play.total_steps

    assert steps(1) == 1
    assert steps(len(frames)) == 13


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
