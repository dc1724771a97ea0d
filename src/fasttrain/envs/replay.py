"""What only a second play from the same seed shows: is it the same again, and what does another action change?"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fasttrain.batch import BoolArray
from fasttrain.envs.findings import REMEDIES, Finding, fingerprint
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import SEED, Moment, Play, PlayFault

HORIZON = 200  # steps of an episode that are compared
MAX_PAIRS, MAX_SHORT_PAIRS = 24, 80
UNTOUCHED_PAIRS = 6  # without any varying reward: play on would teach nothing about rewards (sparse ones)
RECORDED_STEPS = 300


class Frame(NamedTuple):
    """A moment as far as two plays are compared: bit for bit."""

    action: Any
    observation: Any
    reward: float
    ends: str
    mask: bytes | None


def frame_of(moment: Moment) -> Frame:
    reward = float(moment.reward) if np.ndim(moment.reward) == 0 else float("nan")
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

    part: str  # "observation", "reward", "end of the episode" or "action mask"
    episode: int
    step: int

    def __str__(self) -> str:
        return f"the {self.part} at step {self.step} of episode {self.episode}"


def seed_streams(python: int, numpy: int) -> None:
    """Put the global streams, which no env should use, into a known state."""
    random.seed(python)
    np.random.seed(numpy)


def first_difference(play: Play, recorded: Sequence[Frame], seed: int, deadline: float) -> Difference | None:
    """Play `recorded` again from reset(seed); None if all that there was time for came out the same."""
    episode, step = 0, 0
    for index, frame in enumerate(recorded):
        if frame.action is None:
            again = frame_of(play.reset(seed if index == 0 else None))
            episode, step = episode + 1, 0
        else:
            again = frame_of(play.step(frame.action))
            step += 1
        if part := differing_part(frame, again):
            return Difference(part, episode, step)
        if time.perf_counter() > deadline:
            return None
    return None


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
    return Finding(code="unseeded_randomness", message=text, remedy=REMEDIES["unseeded_randomness"])


class Pair(NamedTuple):
    """Two episodes from one seed: the same `parted` actions, then another action, then (if legal) the same one."""

    one: list[Frame]  # [0] is the reset
    other: list[Frame]
    parted: int
    same_next: bool

    @property
    def identical(self) -> bool:
        """Whether the other action changed nothing that a learner can see."""
        return [frame[1:4] for frame in self.one] == [frame[1:4] for frame in self.other]

    @property
    def rewards_identical(self) -> bool:
        return _without_trailing_zeros(self.one) == _without_trailing_zeros(self.other)

    def differs(self, part: str, delay: int) -> bool | None:
        """Whether a part of the frame `delay` steps after the parting depends on the action there; None: unknown."""
        at = self.parted + delay
        if at >= min(len(self.one), len(self.other)) or (delay == 2 and not self.same_next):
            return None
        one, other = getattr(self.one[at], part), getattr(self.other[at], part)
        return None if one is None or other is None else one != other


def _without_trailing_zeros(frames: Sequence[Frame]) -> list[float]:
    rewards = [frame.reward for frame in frames]
    while rewards and rewards[-1] == 0:
        rewards.pop()
    return rewards


class Branches:
    """Pairs of episodes that part at one action, played on one env whose seeds are known to work."""

    def __init__(self, play: Play, deadline: float) -> None:
        self.pairs: list[Pair] = []
        self.short_pairs: list[Pair] = []  # end two steps after the parting: for masks
        self.wrong_mask = ""  # equal states, unequal masks
        self.carries_over = False  # episodes depend on earlier ones: running statistics, a curriculum
        self.in_time = True
        self._play, self._deadline = play, deadline
        self._rng = np.random.default_rng(SEED)

    def run(self, first: Frame) -> None:
        """Play until everything is seen to depend on the action, or the time or the pairs are used up.

        `first` is the frame of a reset with `SEED` in a fresh env.
        """
        self._compare_first_masks(first)
        without_choice = 0
        for index in range(MAX_PAIRS + MAX_SHORT_PAIRS):
            rewards_settled = len(self.pairs) >= 2 and self._rewards_settled()
            done = rewards_settled and self._masks_settled()
            if done or self.carries_over or self.wrong_mask or without_choice >= UNTOUCHED_PAIRS:
                return
            if time.perf_counter() > self._deadline:
                self.in_time = False
                return
            pair = self._pair(SEED + 1 + index, short=rewards_settled)
            if pair is None:
                without_choice += 1
            else:
                (self.short_pairs if rewards_settled else self.pairs).append(pair)

    def _compare_first_masks(self, first: Frame) -> None:
        """A cache that reset() does not clear shows the mask of wherever the last episode stood."""
        for steps in (1, 2, 3, 5, 8) if self._play.has_masks else ():
            if self.wrong_mask or self.carries_over or time.perf_counter() > self._deadline:
                return
            for _ in self._episode(SEED + steps, steps):
                pass
            self._replayed(SEED, [first])

    def _rewards_settled(self) -> bool:
        """The reward was seen to depend on the action, or there is nothing (more) to learn about it."""
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

    def _pair(self, seed: int, short: bool) -> Pair | None:
        """One more pair; None if the episode offered no choice, or went otherwise the second time."""
        parted = int(self._rng.integers(20)) if self.pairs else 0
        moments = list(self._episode(seed, parted + 2 if short else HORIZON))
        one = [frame_of(moment) for moment in moments]
        changed = None
        for parted in range(min(parted, len(one) - 2), -1, -1):
            if (changed := self._another(moments[parted].mask, one[parted + 1].action)) is not None:
                break
        if changed is None or (other := self._replayed(seed, one[: parted + 1])) is None:
            return None
        moment = self._play.step(changed)
        other.append(frame_of(moment))
        same_next = False
        while not moment.ended and len(other) <= min(len(one), HORIZON):  # one step further, to see that it goes on
            action = self._play.draw(moment.mask)
            if len(other) == parted + 2 < len(one):
                wanted = one[parted + 2].action
                same_next = moment.mask is None or is_legal(self._play.action_space, moment.mask, wanted)
                action = wanted if same_next else action
            moment = self._play.step(action)
            other.append(frame_of(moment))
        if not moments[-1].ended and len(other) > len(one):
            other.pop()  # the first was cut, not ended
        return Pair(one, other, parted, same_next)

    def _episode(self, seed: int, steps: int) -> Iterator[Moment]:
        moment = self._play.reset(seed)
        yield moment
        for _ in range(steps):
            if moment.ended:
                return
            moment = self._play.step(self._play.draw(moment.mask))
            yield moment

    def _replayed(self, seed: int, prefix: Sequence[Frame]) -> list[Frame] | None:
        """The prefix played again; None, with the reason noted, if it came out otherwise."""
        frames: list[Frame] = []
        for frame in prefix:
            moment = self._play.reset(seed) if frame.action is None else self._play.step(frame.action)
            frames.append(frame_of(moment))
            part = differing_part(frame, frames[-1])
            if part == "action mask":
                steps = len(frames) - 1
                self.wrong_mask = (
                    f"after two resets with the same seed{f' and {steps} equal steps' if steps else ''} the observation "
                    "was the same and the action mask was not: it belongs to an earlier state"
                )
            elif part:
                self.carries_over = True
            if part:
                return None
        return frames

    def _another(self, mask: BoolArray | None, action: Any) -> Any:
        """A legal action other than `action`, None if there is none (or luck did not find it)."""
        for _ in range(20):
            drawn = self._play.draw(mask)
            if not np.array_equal(drawn, action):
                return drawn
        return None

    def findings(self) -> Iterator[Finding]:
        """What the pairs say about masks, actions and rewards."""
        if text := self.wrong_mask or late_masks(self.pairs + self.short_pairs):
            yield Finding(code="stale_mask", message=text, remedy=REMEDIES["stale_mask"])
        if text := ignored_action(self.pairs):
            yield Finding(code="action_ignored", message=text, remedy=REMEDIES["action_ignored"])
        elif text := independent_reward(self.pairs):
            yield Finding(code="reward_ignores_action", message=text, remedy=REMEDIES["reward_ignores_action"])


def late_masks(pairs: Sequence[Pair]) -> str:
    """Evidence that every mask belongs to the state one step earlier; empty without.

    Either the masks depend on the action before the last and never on the last, while the observation depends on it;
    or each episode's first mask comes twice, in an env whose masks otherwise nearly always change.
    """
    known = [pair.differs("mask", 1) for pair in pairs]
    if any(known):
        return ""
    late = [pair for pair in pairs if pair.differs("observation", 1) and pair.differs("mask", 2)]
    if len(late) >= 5:
        return (
            f"in {len(late)} of {len(pairs)} replays with one other action the mask changed two steps later, the "
            "observation at once and the mask at once never: each mask seems to belong to the state one step earlier"
        )
    repeated = changes = later = episodes = 0
    for pair in pairs:
        masks = [frame.mask for frame in pair.one if frame.mask is not None]
        if len(masks) >= 3:
            episodes += 1
            repeated += masks[0] == masks[1]
            later += len(masks) - 2
            changes += sum(one != two for one, two in zip(masks[1:], masks[2:], strict=False))
    if episodes >= 8 and repeated == episodes and later >= 16 and changes >= 0.8 * later:
        return (
            f"in each of {episodes} episodes the first mask came twice, while {changes} of {later} later masks differed "
            "from the one before: each seems to belong to the state one step earlier"
        )
    return ""


def ignored_action(pairs: Sequence[Pair]) -> str:
    """Evidence that actions change nothing; empty without."""
    if len(pairs) < 4 or not all(pair.identical for pair in pairs):
        return ""
    frames = [frame for pair in pairs for frame in pair.one]
    compared = sum(len(pair.one) - 1 - pair.parted for pair in pairs)
    reward_varies = len({frame.reward for frame in frames if frame.action is not None}) > 1
    varies = reward_varies or len({frame.observation for frame in frames}) > 1
    # Where the reward never varies either, a rare reward may be all that an action can change.
    if not varies or compared < (20 if reward_varies else 100):
        return ""
    return (
        f"{len(pairs)} episodes played again with other actions came out bit for bit the same (observations, rewards "
        f"and ends of {compared:,} steps)"
    )


def independent_reward(pairs: Sequence[Pair]) -> str:
    """Evidence that the reward does not depend on the action although it varies; empty without.

    A reward that only ever comes with the last step, the same in all episodes, says nothing: random play may always lose.
    """
    if not pairs or not all(pair.rewards_identical for pair in pairs):
        return ""
    counts = Counter(frame.reward for pair in pairs for frame in pair.one[1:])
    usual = counts.most_common(1)[0][0]
    across = len({tuple(_without_trailing_zeros(pair.one)) for pair in pairs}) > 1 and len(counts) > 1
    telling = [
        pair
        for pair in pairs
        if any(frame.reward != usual for frame in (pair.one[1:] if across else pair.one[1:-1])[pair.parted :])
    ]
    unusual = sum(frame.reward != usual for pair in telling for frame in pair.one[pair.parted + 1 :])
    if len(telling) < 12 and not (len(telling) >= 4 and unusual >= 40):
        return ""
    steps = sum(len(pair.one) - 1 - pair.parted for pair in pairs)
    return (
        f"the rewards of {len(pairs)} episodes ({counts.total():,} steps, {len(counts)} different values) stayed the same "
        f"when {steps:,} of the steps were played with other actions"
    )


def refused(play: Play, what: str, deadline: float) -> Finding:
    """The finding that step() raised at an action that its mask allows: is the mask one step late, or else wrong?

    In replays with another action in that place, a late mask forbids the refused one a step later, every time.
    """
    late = cases = 0
    for seed in range(SEED + 1, SEED + 31):
        moments: list[Moment] = []
        try:
            moments.append(play.reset(seed))
            while not moments[-1].ended and len(moments) < HORIZON:
                action = play.draw(moments[-1].mask)
                moments.append(play.step(action))
            continue
        except PlayFault:
            pass
        after = _instead(play, seed, moments, action) if moments else None
        if after is not None and after.mask is not None:
            cases += 1
            late += not is_legal(play.action_space, after.mask, action)
        if cases >= 6 or time.perf_counter() > deadline:
            break
    if cases >= 3 and late == cases:
        text = f"{what}; in {cases} of {cases} replays the mask one step later forbids what was refused: it comes late"
        return Finding(code="stale_mask", message=text, remedy=REMEDIES["stale_mask"])
    text = f"{what}, at an action that the mask allows"
    return Finding(code="mask_not_respected", message=text, remedy=REMEDIES["mask_not_respected"])


def _instead(play: Play, seed: int, moments: Sequence[Moment], refused_action: Any) -> Moment | None:
    """The moment after another action than the refused one in the same state; None if that was refused too."""
    try:
        moment = play.reset(seed)
        for before in moments[1:]:
            moment = play.step(before.action)
        for _ in range(20):
            action = play.draw(moment.mask)
            if not np.array_equal(action, refused_action):
                return play.step(action)
    except PlayFault:
        pass
    return None
