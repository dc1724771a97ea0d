"""What only a second play from the same seed shows: is it the same again, and what does another action change?"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fasttrain.envs.findings import Finding, fingerprint, found
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import SEED, Moment, Play, PlayError

HORIZON = 200  # steps of an episode that are compared
RECORDED_STEPS = 300


class Frame(NamedTuple):
    """A moment as far as two plays are compared: bit for bit."""

    action: Any
    observation: Any
    reward: float
    ends: str
    mask: bytes | None


def frame_of(moment: Moment) -> Frame:
    try:
        reward = float(moment.reward)
    except (TypeError, ValueError):
        reward = float("nan")
    ends = f"{bool(moment.terminated)} {bool(moment.truncated)}"
    mask = None if moment.mask is None else moment.mask.tobytes()
    return Frame(moment.action, fingerprint(moment.observation), reward, ends, mask)


class Recorder:
    """Keeps the first moments of a pass of play, resets included, to be played again."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def __call__(self, moment: Moment) -> None:
        if len(self.frames) < RECORDED_STEPS:
            self.frames.append(frame_of(moment))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a second play from the same seed first differed."""

    index: int  # among the recorded frames
    part: str  # "observation", "reward", "end of the episode" or "action mask"
    episode: int
    step: int

    def __str__(self) -> str:
        return f"the {self.part} at step {self.step} of episode {self.episode}"


def seed_streams(python: int, numpy: int) -> None:
    """Put the global streams, which no env should use, into a known state."""
    random.seed(python)
    np.random.seed(numpy)


def first_difference(
    play: Play, recorded: Sequence[Frame], seed: int, deadline: float, at_least: int = 1
) -> Difference | None:
    """Play `recorded` again from reset(seed); None if what there was time for came out the same."""
    episode, step = 0, 0
    for index, frame in enumerate(recorded):
        if frame.action is None:
            again = frame_of(play.reset(seed if index == 0 else None))
            episode, step = episode + 1, 0
        else:
            again = frame_of(play.step(frame.action))
            step += 1
        if part := differing_part(frame, again):
            return Difference(index, part, episode, step)
        if index >= at_least and time.perf_counter() > deadline:
            return None
    return None


def not_fresh(play: Play, recorded: Sequence[Frame]) -> str:
    """Why an env that was played does not repeat, from the seed, what it did when it was new; empty: it does."""
    try:
        difference = first_difference(play, recorded, SEED, deadline=0.0, at_least=len(recorded))
    except PlayError as fault:
        return fault.what
    return "" if difference is None else f"the same seed gave another trajectory, first {difference}"


def differing_part(one: Frame, other: Frame) -> str:
    if one.observation != other.observation:
        return "observation"
    if one.reward != other.reward and not (one.reward != one.reward and other.reward != other.reward):
        return "reward"
    if one.ends != other.ends:
        return "end of the episode"
    return "action mask" if one.mask != other.mask else ""


def unseeded(difference: Difference, again: Callable[[int, int, int], Difference | None]) -> Finding:
    """The finding that the same seed and actions gave another trajectory, and which stream is behind it.

    `again(seed, python, numpy)` plays the recorded actions in a fresh env with the global streams put so; the recorded
    play had (SEED, 1, 1).
    """
    cause = "neither reset(seed=…) nor the global streams decide it: a generator of its own, the clock, another process"
    if again(SEED, 1, 1) is None:
        if again(SEED, 1, 2) is None:
            cause = "it draws from the global `random`"
        elif again(SEED, 2, 1) is None:
            cause = "it draws from the global `np.random`"
        else:
            cause = "it draws from the global `random` and `np.random`"
    text = f"the same seed and the same actions gave two trajectories, first {difference}: {cause}"
    return found("unseeded_randomness", text)


def refused(play: Play, what: str, deadline: float) -> Finding:
    """The finding that step() raised at an action that its mask allows: is the mask one step late, or else wrong?

    In replays with another action in that place, a late mask forbids the refused one a step later, every time. Where
    other actions raise too, it is not about the mask.
    """
    passed = cases = late = 0
    for seed in range(SEED + 1, SEED + 31):
        if cases >= 6 or time.perf_counter() > deadline:
            break
        moments: list[Moment] = []
        action: Any = None
        try:
            moments.append(play.reset(seed))
            while not moments[-1].ended and len(moments) < HORIZON and time.perf_counter() < deadline:
                action = play.draw(moments[-1].mask)
                moments.append(play.step(action))
        except PlayError:
            after = _instead(play, seed, moments, action)
            passed += after is not None
            if after is not None and after.mask is not None:
                cases += 1
                late += not is_legal(play.action_space, after.mask, action)
    if cases >= 3 and late == cases:
        late_text = f"in {cases} of {cases} replays the mask one step later forbids what was refused: it comes late"
        return found("stale_mask", f"{what}; {late_text}")
    if passed:
        return found("mask_not_respected", f"{what}, at an action that the mask allows, and at no other")
    return found("raised", what)


def _instead(play: Play, seed: int, moments: Sequence[Moment], refused_action: Any) -> Moment | None:
    """The moment after another action than the refused one in the same state; None if that raised too."""
    try:
        moment = play.reset(seed)
        for before in moments[1:]:
            moment = play.step(before.action)
        for _ in range(20):
            action = play.draw(moment.mask)
            if not np.array_equal(action, refused_action):
                return play.step(action)
    except PlayError:
        pass
    return None
