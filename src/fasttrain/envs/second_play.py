"""Plays recorded episodes a second time: is the second play the same, and what does a different action change?

`Branches` plays pairs of episodes that are equal up to one action. The pairs show what the action changes, and whether
the masks belong to the present state.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fasttrain.envs.findings import ENOUGH_EPISODES, Finding, fingerprint, make_finding
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import SEED, Moment, Play, PlayError, ProbeResult

HORIZON = 200  # most steps of an episode that are compared
RECORDED_STEPS = 300
MAX_PAIRS, MAX_SHORT_PAIRS = 60, 80
MIN_EPISODES = 30  # with fewer episodes, an effect that 10 % of episodes show is missed too often
UNTOUCHED_PAIRS = 6  # if the reward (or mask) never varied in this number of pairs, more pairs show nothing new


class Frame(NamedTuple):
    """The parts of a moment that two plays must have in common, bit for bit."""

    action: object
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
    """Records the first moments of a play, including resets, so that they can be played again."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def __call__(self, moment: Moment) -> None:
        if len(self.frames) < RECORDED_STEPS:
            self.frames.append(frame_of(moment))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a second play from the same seed differs for the first time."""

    index: int  # index of the recorded frame
    part: str  # "observation", "reward", "end of the episode" or "action mask"
    episode: int
    step: int

    def __str__(self) -> str:
        return f"the {self.part} at step {self.step} of episode {self.episode}"


def first_difference(
    play: Play,
    recorded: Sequence[Frame],
    seed: int,
    deadline: float,
    at_least: int = 1,
    between: Callable[[], object] = lambda: None,
) -> Difference | None:
    """Play `recorded` again from reset(seed). Returns None if nothing differed before the deadline.

    Args:
        at_least: number of steps to play even after the deadline.
        between: called after each reset and step.
    """
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
        between()
        if index >= at_least and time.perf_counter() > deadline:
            return None
    return None


def not_fresh(play: Play, recorded: Sequence[Frame]) -> str:
    """Why an env that was played before does not repeat the recorded play of a new env; empty if it does."""
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


# --- a different action


class Pair(NamedTuple):
    """Two episodes from one seed. Their first `common` actions are the same, the next one differs.

    `same_next`: in the step after the different action both episodes take the same action, which is legal in both.
    """

    one: list[Frame]  # frames of the first episode; [0] is the reset
    other: list[Frame]
    common: int
    same_next: bool

    @property
    def identical(self) -> bool:
        """Whether the different action changed no observation, reward or end."""
        return [frame[1:4] for frame in self.one] == [frame[1:4] for frame in self.other]

    @property
    def rewards_identical(self) -> bool:
        """Whether the rewards of all steps that both episodes have are the same. The lengths may differ."""
        return all(one.reward == other.reward for one, other in zip(self.one, self.other, strict=False))

    def differs(self, part: str, delay: int) -> bool | None:
        """Whether `part` of the frames differs, `delay` steps after the common actions; None if this is unknown."""
        at = self.common + delay
        if at >= min(len(self.one), len(self.other)) or (delay == 2 and not self.same_next):
            return None
        one, other = getattr(self.one[at], part), getattr(self.other[at], part)
        return None if one is None or other is None else one != other


class Branches:
    """Plays pairs of episodes on one env that is known to repeat an episode from its seed."""

    def __init__(self, play: Play, costs: ProbeResult, deadline: float) -> None:
        self.pairs: list[Pair] = []
        self.short_pairs: list[Pair] = []  # pairs that end two steps after the common actions, to compare masks
        self.episodes: list[list[Frame]] = []  # the first episode of each pair, and episodes that got no second one
        self.wrong_mask = ""  # text about two equal states with different masks
        self.carries_over: Difference | None = None  # difference in a replayed episode, caused by earlier episodes
        self.in_time = True
        self._play, self._costs, self._deadline = play, costs, deadline
        self._rng = np.random.default_rng(SEED)

    def run(self, first: Frame) -> None:
        """Play pairs until all questions are answered, or until the time or the number of pairs is used up.

        `first` is the frame after a new env was reset with `SEED`.
        """
        self._compare_first_masks(first)
        without_choice = 0
        for index in range(MAX_PAIRS + MAX_SHORT_PAIRS):
            rewards_settled = len(self.pairs) >= 2 and self._rewards_settled()
            done = rewards_settled and self._masks_settled()
            if done or self.carries_over or self.wrong_mask or without_choice >= ENOUGH_EPISODES:
                return
            horizon = self._affordable_steps()
            if horizon < 3:
                self.in_time = False
                return
            pair = self._pair(SEED + 1 + index, horizon, short=rewards_settled)
            if pair is None:
                without_choice += 1
            else:
                (self.short_pairs if rewards_settled else self.pairs).append(pair)

    def _affordable_steps(self) -> int:
        """The most steps of an episode for which there is time. A pair takes at most three plays of this length."""
        left_s = self._deadline - time.perf_counter() - 2 * self._costs.reset_s
        return int(min(HORIZON, left_s / 3 / max(self._costs.step_s + self._costs.mask_s, 1e-6)))

    def _compare_first_masks(self, first: Frame) -> None:
        """Compare masks after a reset: if `reset` does not clear a cache, the mask is that of the last episode."""
        for steps in (1, 2, 3, 5, 8) if self._play.has_masks else ():
            if self.wrong_mask or self.carries_over or self._affordable_steps() < steps:
                return
            for _ in self._play.episode(SEED + steps, steps):
                pass
            self._replay(SEED, [first])

    def _rewards_settled(self) -> bool:
        """Whether it is clear that the reward depends on the action, or more pairs of steps would show nothing new."""
        if len(self.pairs) >= MAX_PAIRS or any(not pair.rewards_identical for pair in self.pairs):
            return True
        rewards = {frame.reward for pair in self.pairs for frame in pair.one[1:]}
        return len(self.pairs) >= UNTOUCHED_PAIRS and len(rewards) <= 1 and not self.pairs[-1].identical

    def _masks_settled(self) -> bool:
        pairs = self.pairs + self.short_pairs
        varied = len({frame.mask for pair in pairs for frame in pair.one} - {None}) > 1
        if not self._play.has_masks or any(pair.differs("mask", 1) for pair in pairs):
            return True
        return len(pairs) >= UNTOUCHED_PAIRS and not varied

    def _pair(self, seed: int, horizon: int, short: bool) -> Pair | None:
        """Play one pair; None if only one action was legal, or if replaying the common actions had another effect."""
        usual = min((len(pair.one) for pair in self.pairs), default=0)
        latest = int(self._rng.integers(max(1, min(20, usual // 2))))  # an early step, so that many steps follow it
        moments, one = list[Moment](), list[Frame]()
        for moment in self._play.episode(seed, min(horizon, latest + 2) if short else horizon):
            moments.append(moment)
            one.append(frame_of(moment))  # copied now, because the env may write into the returned array later
        self.episodes.append(one)
        different = None
        for common in range(min(latest, len(one) - 2), -1, -1):
            if (different := self._play.draw_another(moments[common].mask, one[common + 1].action)) is not None:
                break
        if different is None or (other := self._replay(seed, one[: common + 1])) is None:
            return None
        moment = self._play.step(different)
        other.append(frame_of(moment))
        same_next = False
        while not moment.ended and len(other) <= min(len(one), horizon):  # one step longer than `one`, if possible
            action = self._play.draw(moment.mask)
            if len(other) == common + 2 < len(one):
                same_action = one[common + 2].action
                same_next = moment.mask is None or is_legal(self._play.action_space, moment.mask, same_action)
                action = same_action if same_next else action
            moment = self._play.step(action)
            other.append(frame_of(moment))
        if not moments[-1].ended and len(other) > len(one):
            other.pop()  # the first episode was stopped before this step
        return Pair(one, other, common, same_next)

    def _replay(self, seed: int, prefix: Sequence[Frame]) -> list[Frame] | None:
        """Play these frames again. If they differ, set `wrong_mask` or `carries_over` and return None."""
        frames: list[Frame] = []
        for frame in prefix:
            moment = self._play.reset(seed) if frame.action is None else self._play.step(frame.action)
            frames.append(frame_of(moment))
            part = differing_part(frame, frames[-1])
            if part == "action mask":
                steps = len(frames) - 1
                self.wrong_mask = (
                    f"two resets with the same seed{f' and {steps} equal steps' if steps else ''} gave the same "
                    "observation and different action masks: one belongs to an earlier state"
                )
            elif part:
                self.carries_over = Difference(len(frames) - 1, part, 1, len(frames) - 1)
            if part:
                return None
        return frames

    def findings(self) -> Iterator[Finding]:
        """Findings about masks, actions and rewards."""
        if self.wrong_mask:
            yield make_finding("stale_mask", self.wrong_mask)
        elif text := late_masks(self.pairs + self.short_pairs, self.episodes):
            # Only a warning, because in some games an action changes the legal actions two turns later.
            yield make_finding("stale_mask", text, severity="warning")
        if text := ignored_action(self.pairs):
            yield make_finding("action_ignored", text)
        elif text := independent_reward(self.pairs):
            yield make_finding("reward_ignores_action", text)


def late_masks(pairs: Sequence[Pair], all_episodes: Sequence[Sequence[Frame]]) -> str:
    """Evidence that every mask belongs to the state one step earlier; empty if there is none.

    Either the observation depends on the last action, but the masks only on the action before it. Or each episode has
    the same mask twice at its start, although later masks nearly always change.
    """
    known = [pair.differs("mask", 1) for pair in pairs]
    if any(known):
        return ""
    late = [pair for pair in pairs if pair.differs("observation", 1) and pair.differs("mask", 2)]
    if len(late) >= 5:
        return (
            f"in {len(late)} of {len(pairs)} replays with one different action the observation differed at once, but "
            "the mask only a step later: each mask seems to belong to the state one step earlier"
        )
    repeated = changes = later = episodes = 0
    for frames in all_episodes:
        masks = [frame.mask for frame in frames if frame.mask is not None]
        if len(masks) >= 3:
            episodes += 1
            repeated += masks[0] == masks[1]
            later += len(masks) - 2
            changes += sum(one != two for one, two in itertools.pairwise(masks[1:]))
    if episodes >= 8 and repeated == episodes and later >= 16 and changes >= 0.8 * later:
        return (
            f"in each of {episodes} episodes the second mask was equal to the first, while {changes} of {later} later "
            "masks differed from the one before: each mask seems to belong to the state one step earlier"
        )
    return ""


def ignored_action(pairs: Sequence[Pair]) -> str:
    """Evidence that actions change nothing; empty if there is none."""
    if len(pairs) < 4 or not all(pair.identical for pair in pairs):
        return ""
    frames = [frame for pair in pairs for frame in pair.one]
    compared = sum(len(pair.one) - 1 - pair.common for pair in pairs)
    reward_varies = len({frame.reward for frame in frames if frame.action is not None}) > 1
    varies = reward_varies or len({frame.observation for frame in frames}) > 1
    # If the reward never varies, the only effect of an action may be a rare reward. So compare more steps.
    if not varies or compared < (20 if reward_varies else 50):
        return ""
    return (
        f"{len(pairs)} episodes were played again with different actions, and were the same bit for bit (observations, "
        f"rewards and ends of {compared:,} steps)"
    )


def independent_reward(pairs: Sequence[Pair]) -> str:
    """Evidence that the reward varies, but not with the action; empty if there is none.

    A reward that comes only at the last step and is the same in all episodes is no evidence: random play may always
    lose.
    """
    if not pairs or not all(pair.rewards_identical for pair in pairs):
        return ""
    counts = Counter(frame.reward for pair in pairs for frame in pair.one[1:])
    usual = counts.most_common(1)[0][0]
    finals = {pair.one[-1].reward for pair in pairs}
    compared = list[list[Frame]]()  # per pair: the frames of `one` that the different action could have changed
    for one, other, common, _ in pairs:
        shorter = len(other) < len(one)
        compared.append(one[common + 1 : len(other) if shorter else len(one) - (len(finals) == 1)])
    unusual = [sum(frame.reward != usual for frame in frames) for frames in compared]
    episodes = sum(count > 0 for count in unusual)
    if episodes < MIN_EPISODES and not (episodes >= 4 and sum(unusual) >= 40):
        return ""
    lengths = "; only the length of episodes depends on them" if any(len(p.one) != len(p.other) for p in pairs) else ""
    return (
        f"with different actions {sum(map(len, compared)):,} steps of {len(pairs)} episodes gave exactly the same "
        f"rewards as before ({len(counts)} different ones){lengths}"
    )
