"""What only a second play from the same seed shows: is it the same again, and what does another action change?

`Branches` are pairs of episodes that part at one action: what the action changes, and whether masks keep up with the
state.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fasttrain.envs.findings import ENOUGH_EPISODES, Finding, fingerprint, found
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import SEED, Moment, Play, PlayError, ProbeResult

HORIZON = 200  # steps of an episode that are compared
RECORDED_STEPS = 300
MAX_PAIRS, MAX_SHORT_PAIRS = 60, 80
ENOUGH_TELLING = 30  # else an action that matters in one of ten episodes would be missed too often
UNTOUCHED_PAIRS = 6  # without any varying reward: playing on would teach nothing about rewards (sparse ones)


class Frame(NamedTuple):
    """A moment as far as two plays are compared: bit for bit."""

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


def first_difference(
    play: Play,
    recorded: Sequence[Frame],
    seed: int,
    deadline: float,
    at_least: int = 1,
    between: Callable[[], object] = lambda: None,
) -> Difference | None:
    """Play `recorded` again from reset(seed); None if what there was time for came out the same.

    `between` is called after each reset and step.
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


# --- another action


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
        """Whether the steps that both took paid the same; how many there are may well depend on the action."""
        return all(one.reward == other.reward for one, other in zip(self.one, self.other, strict=False))

    def differs(self, part: str, delay: int) -> bool | None:
        """Whether a part of the frame `delay` steps after the parting depends on the action there; None: unknown."""
        at = self.parted + delay
        if at >= min(len(self.one), len(self.other)) or (delay == 2 and not self.same_next):
            return None
        one, other = getattr(self.one[at], part), getattr(self.other[at], part)
        return None if one is None or other is None else one != other


class Branches:
    """Pairs of episodes that part at one action, played on one env whose seeds are known to work."""

    def __init__(self, play: Play, costs: ProbeResult, deadline: float) -> None:
        self.pairs: list[Pair] = []
        self.short_pairs: list[Pair] = []  # end two steps after the parting: for masks
        self.episodes: list[list[Frame]] = []  # the first of each pair, and those that offered no choice
        self.wrong_mask = ""  # equal states, unequal masks
        self.carries_over: Difference | None = None  # in an episode played again: earlier ones matter
        self.in_time = True
        self._play, self._costs, self._deadline = play, costs, deadline
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
        """How long the episodes of the next pair may be: it is three plays of that length at most."""
        left_s = self._deadline - time.perf_counter() - 2 * self._costs.reset_s
        return int(min(HORIZON, left_s / 3 / max(self._costs.step_s + self._costs.mask_s, 1e-6)))

    def _compare_first_masks(self, first: Frame) -> None:
        """A cache that reset() does not clear shows the mask of wherever the last episode stood."""
        for steps in (1, 2, 3, 5, 8) if self._play.has_masks else ():
            if self.wrong_mask or self.carries_over or self._affordable_steps() < steps:
                return
            for _ in self._play.episode(SEED + steps, steps):
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

    def _pair(self, seed: int, horizon: int, short: bool) -> Pair | None:
        """One more pair; None if the episode offered no choice, or went otherwise the second time."""
        usual = min((len(pair.one) for pair in self.pairs), default=0)
        wanted_at = int(self._rng.integers(max(1, min(20, usual // 2))))  # early, so that much comes after
        moments, one = list[Moment](), list[Frame]()
        for moment in self._play.episode(seed, min(horizon, wanted_at + 2) if short else horizon):
            moments.append(moment)
            one.append(frame_of(moment))  # at once: an env may write into the array that it returned
        self.episodes.append(one)
        changed = None
        for parted in range(min(wanted_at, len(one) - 2), -1, -1):
            if (changed := self._play.draw_another(moments[parted].mask, one[parted + 1].action)) is not None:
                break
        if changed is None or (other := self._replayed(seed, one[: parted + 1])) is None:
            return None
        moment = self._play.step(changed)
        other.append(frame_of(moment))
        same_next = False
        while not moment.ended and len(other) <= min(len(one), horizon):  # one step further, to see that it goes on
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
                    f"two resets with the same seed{f' and {steps} equal steps' if steps else ''} gave the same "
                    "observation and different action masks: one belongs to an earlier state"
                )
            elif part:
                self.carries_over = Difference(len(frames) - 1, part, 1, len(frames) - 1)
            if part:
                return None
        return frames

    def findings(self) -> Iterator[Finding]:
        """What the pairs say about masks, actions and rewards."""
        if self.wrong_mask:
            yield found("stale_mask", self.wrong_mask)
        elif text := late_masks(self.pairs + self.short_pairs, self.episodes):
            # A warning: where the rules let an action lock or free others a turn later, it looks the same from outside.
            yield found("stale_mask", text, severity="warning")
        if text := ignored_action(self.pairs):
            yield found("action_ignored", text)
        elif text := independent_reward(self.pairs):
            yield found("reward_ignores_action", text)


def late_masks(pairs: Sequence[Pair], all_episodes: Sequence[Sequence[Frame]]) -> str:
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
            f"in {len(late)} of {len(pairs)} replays with one other action the observation differed at once and the "
            "mask only a step later: each mask seems to belong to the state one step earlier"
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
            f"in each of {episodes} episodes the first mask came twice, while {changes} of {later} later masks were "
            "not the one before: each seems to belong to the state one step earlier"
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
    if not varies or compared < (20 if reward_varies else 50):
        return ""
    return (
        f"{len(pairs)} episodes played again with other actions came out bit for bit the same (observations, rewards "
        f"and ends of {compared:,} steps)"
    )


def independent_reward(pairs: Sequence[Pair]) -> str:
    """Evidence that the reward does not depend on the action although it varies; empty without.

    A reward that only comes with the last step, the same in all episodes, says nothing: random play may always lose.
    """
    if not pairs or not all(pair.rewards_identical for pair in pairs):
        return ""
    counts = Counter(frame.reward for pair in pairs for frame in pair.one[1:])
    usual = counts.most_common(1)[0][0]
    finals = {pair.one[-1].reward for pair in pairs}
    compared = list[list[Frame]]()  # the frames of each first episode that the other action could have changed
    for one, other, parted, _ in pairs:
        cut = len(other) < len(one)
        compared.append(one[parted + 1 : len(other) if cut else len(one) - (len(finals) == 1)])
    unusual = [sum(frame.reward != usual for frame in frames) for frames in compared]
    telling = sum(count > 0 for count in unusual)
    if telling < ENOUGH_TELLING and not (telling >= 4 and sum(unusual) >= 40):
        return ""
    lengths = "; only how long they last depends on it" if any(len(p.one) != len(p.other) for p in pairs) else ""
    return (
        f"with other actions {sum(map(len, compared)):,} steps of {len(pairs)} episodes paid exactly what they paid "
        f"before ({len(counts)} different rewards){lengths}"
    )
