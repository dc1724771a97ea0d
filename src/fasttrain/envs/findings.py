"""Finds faults in what an env returns during one play. Also the remedies of all findings of the checkup."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces

from fasttrain.envs.answers import AnswerError, as_reward, misfits
from fasttrain.envs.masks import head_masks
from fasttrain.envs.probe import Moment

Severity = Literal["warning", "error"]
# error: training would stop, or would learn nothing useful. warning: the env's author may intend this.
WARNINGS = frozenset({
    "constant_observation", "out_of_bounds", "wrong_dtype", "ends_not_bool", "never_done", "constant_reward",
    "reward_ignores_action", "unseeded_randomness", "one_step_episodes", "reused_array", "odd_shape", "unused_range",
    "state_left_over", "renumbered", "copies_not_independent", "empty_mask", "lost_games", "changed_action",
})  # fmt: skip
ENOUGH_OBSERVATIONS = 50  # needed for "constant_observation": an env may not change for some steps
ENOUGH_EPISODES = 10
ENOUGH_ONES = 30  # after longer episodes, this number of one-step episodes in a row is no coincidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem of the env: a short code, a message with numbers, and a remedy."""

    severity: Severity
    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def make_finding(code: str, message: str, remedy: str = "", severity: Severity | None = None) -> Finding:
    """A finding with the usual severity and remedy of its code, unless others are passed."""
    usual: Severity = "warning" if code in WARNINGS else "error"
    return Finding(severity=severity or usual, code=code, message=message, remedy=remedy or REMEDIES[code])


def without_repetitions(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Drop findings about rewards if the env ignores actions. Of several findings with the same key keep one.

    The key is the code or the message, see below. Errors are preferred to warnings, later findings to earlier ones.
    """
    ignored = any(finding.code == "action_ignored" for finding in findings)
    chosen: dict[str, Finding] = {}
    for finding in findings:
        if ignored and finding.code in ("reward_ignores_action", "constant_reward"):
            continue
        key = finding.code if finding.code in ("reward_ignores_action", "stale_mask") else finding.message
        if key not in chosen or finding.severity == "error" or chosen[key].severity == "warning":
            chosen[key] = finding
    yield from chosen.values()


@dataclass(slots=True)
class _Cases:
    """All cases of one error in one part of what the env returns: their number, and the first (or largest)."""

    count: int
    text: str
    excess: float


def fingerprint(value: object) -> object:
    """A hashable value that is different if `value` differs in any bit. It keeps no reference to arrays in `value`."""
    if isinstance(value, Mapping):
        return tuple((key, fingerprint(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (tuple, list)) and any(isinstance(part, (Mapping, tuple, np.ndarray)) for part in value):
        return tuple(fingerprint(part) for part in value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)  # as text, because NaN as a number does not equal itself
    try:
        array = np.asarray(value)
    except ValueError:
        return repr(value)
    return repr(value) if array.dtype == object else (array.shape, array.dtype.str, hash(array.tobytes()))


def not_picklable(info: Mapping[Any, Any]) -> str:
    """Text about the first entry that cannot be pickled; empty if all entries can be pickled."""
    if not info or not (whole := _pickle_error(info)):
        return ""
    for key, value in info.items():
        if reason := _pickle_error(value):
            return f"info[{key!r}] holds a {type(value).__module__}.{type(value).__qualname__} ({reason})"
    return f"info ({whole})"


def _pickle_error(value: object) -> str:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception as error:  # the user's class may raise anything
        return f"{type(error).__name__}: {error}"[:120]
    return ""


class End(NamedTuple):
    """An episode that ended."""

    episode_return: float
    length: int
    terminated: bool


class AnswerCheck:
    """Receives all moments of a play and finds faults in the env's answers."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self._observation_space, self._action_space = observation_space, action_space
        self._cases: dict[tuple[str, str], _Cases] = {}
        self._first_observation: object = None
        self._last_observation: tuple[Any, Any] = (None, fingerprint(None))  # the observation and its fingerprint
        self._observation_varied = False
        self._only_zeros = False
        self._observations = self._decisions = self._choices = 0
        self._longest = self._length = self._episode = 0
        self._return = 0.0
        self.ends: list[End] = []
        self.reward_range: tuple[float, float] | None = None

    def __call__(self, moment: Moment) -> None:
        self.outcome(moment)
        if moment.action is not None:
            for name, value in (("terminated", moment.terminated), ("truncated", moment.truncated)):
                if not isinstance(value, (bool, np.bool_)) and getattr(value, "dtype", None) != np.bool_:
                    self._add("ends_not_bool", name, f"is {value!r:.40} of type {type(value).__name__}")
        if not (moment.ended and moment.terminated):  # no policy acts on a terminal observation
            self._observe(moment.observation)
        self._info(moment)
        self._mask(moment)

    def outcome(self, moment: Moment) -> None:
        """Check only rewards and ends of episodes, which takes little time."""
        if moment.action is None:
            self._episode += 1
            self._length, self._return = 0, 0.0
        else:
            self._length += 1
            self._longest = max(self._longest, self._length)
            self._reward(moment.reward)
        if moment.ended:
            self.ends.append(End(self._return, self._length, bool(moment.terminated)))

    def _observe(self, observation: object) -> None:
        last, last_print = self._last_observation
        if fingerprint(last) != last_print:
            self._add("reused_array", "the observation", "was changed by the env after the env had returned it")
        this_print = fingerprint(observation)
        self._last_observation = (observation, this_print)
        if self._observations == 0:
            self._first_observation = this_print
            self._only_zeros = isinstance(observation, np.ndarray) and not observation.any()
        self._observations += 1
        self._observation_varied |= this_print != self._first_observation
        for code, where, text, excess in misfits(self._observation_space, observation):
            self._add(code, where, text, excess)

    def _reward(self, reward: Any) -> None:
        try:
            value = as_reward(reward)
        except AnswerError as error:
            shape = f" of shape {np.shape(reward)}" if np.ndim(reward) else ""
            large = ", too large for float32 (at most 3.4e38)" if error.code == "reward_not_finite" else ""
            self._add(error.code, "the reward", f"is {reward!r:.40}, a {type(reward).__name__}{shape}{large}")
            return
        if not np.isfinite(value):
            self._add("reward_not_finite", "the reward", f"is {value}")
        else:
            self._return += value
            low, high = self.reward_range or (value, value)
            self.reward_range = min(low, value), max(high, value)

    def _info(self, moment: Moment) -> None:
        if not isinstance(moment.info, Mapping):
            self._add("info_not_dict", "info", f"is {moment.info!r:.40} of type {type(moment.info).__name__}")
            return
        if entry := not_picklable(moment.info):
            self._add("unpicklable_info", entry, "")

    def _mask(self, moment: Moment) -> None:
        if moment.mask is None:
            return
        self._decisions += 1
        heads = head_masks(self._action_space, moment.mask)
        self._choices += int(moment.mask.sum()) > len(heads)
        if empty := [index for index, head in enumerate(heads) if not head.any()]:
            text = f"allows none of {len(moment.mask)} actions"
            self._add("empty_mask", "the action mask", f"{text} in head {empty}" if len(heads) > 1 else text)

    def _add(self, code: str, where: str, text: str, excess: float = 0.0) -> None:
        at = f"{text} ({'reset' if self._length == 0 else f'step {self._length}'} of episode {self._episode})".strip()
        cases = self._cases.setdefault((code, where), _Cases(0, at, excess))
        cases.count += 1
        if excess > cases.excess:
            cases.text, cases.excess = at, excess

    def findings(self) -> Iterator[Finding]:
        for (code, where), cases in self._cases.items():
            total, of = (self._decisions, "masks") if code == "empty_mask" else (self._observations, "answers")
            yield make_finding(code, f"{where} {cases.text}, in {cases.count:,} of {total:,} {of}")
        constant = not self._observation_varied and self._observations >= ENOUGH_OBSERVATIONS and self._longest > 1
        if constant and not single_valued(self._observation_space) and not single_valued(self._action_space):
            zeros = ", all zeros" if self._only_zeros else ""
            yield make_finding("constant_observation", f"all {self._observations:,} observations were the same{zeros}")
        longer = [number for number, end in enumerate(self.ends, 1) if end.length > 1]
        ones = len(self.ends) - (longer[-1] if longer else 0)
        if longer and ones >= (ENOUGH_EPISODES if longer[-1] == 1 else ENOUGH_ONES):
            before = f"episode {longer[-1]} ({self.ends[longer[-1] - 1].length} steps)"
            yield make_finding("done_for_ever", f"after {before} each of {ones:,} episodes ended at its first step")
        elif not longer and ones >= ENOUGH_EPISODES:
            yield make_finding("one_step_episodes", f"each of {ones:,} episodes ended at its first step")
        elif (
            self._terminated()
            and (self._choices or not self._decisions)
            and len({end.episode_return for end in self.ends}) == 1
        ):
            always = self.ends[0].episode_return
            if always > 0:  # otherwise random play may always lose, or never reach a reward
                text = f"each of {len(self.ends)} episodes of random play returned {always:g}, whatever the actions"
                yield make_finding("reward_ignores_action", text)
            elif self.reward_seems_constant():
                text = f"the reward was {always / self.ends[0].length:g} at each step of {len(self.ends):,} episodes"
                yield make_finding("constant_reward", text)

    def reward_seems_constant(self) -> bool:
        """Whether all rewards were the same (0 or a cost), and all episodes terminated after the same number of steps.

        If a time limit ends episodes, or their lengths differ, random play may just never reach a reward.
        """
        constant = self.reward_range is not None and self.reward_range[0] == self.reward_range[1] <= 0
        return constant and self._terminated() and len({end.length for end in self.ends}) == 1

    def _terminated(self) -> bool:
        return len(self.ends) >= ENOUGH_EPISODES and all(end.terminated for end in self.ends)


def single_valued(space: spaces.Space[Any]) -> bool:
    """Whether the space has only one value."""
    if isinstance(space, spaces.Dict):
        return all(single_valued(part) for part in space.spaces.values())
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return bool(np.all((space.n if isinstance(space, spaces.Discrete) else space.nvec) == 1))
    return isinstance(space, spaces.Box) and bool(np.all(space.low == space.high))


REMEDIES = {
    "reused_array": "the env returns the same array each time and writes into it; return observation.copy()",
    "changed_action": "copy the action first: an algorithm may learn from the changed one (vec_env=dummy copies it)",
    "odd_shape": "NumPy repeats or reshapes it; set observation_space to what reset() and step() return",
    "unused_range": "declare the range that step() uses, or most explored actions have the same effect",
    "state_left_over": "reset() must set all that step() changes, and copy each array that it starts from; if this is "
    "a curriculum, it is fine",
    "renumbered": "number units, cards and places from the same first number in each episode",
    "copies_not_independent": "keep the state of a game in the env itself, not in a module, a class, a file or a port",
    "needs_package": "install it",
    "reset_answer": "return both, the info as a dict",
    "raised": "training would stop there; make that line work in every state that random play reaches",
    "wrong_shape": "set observation_space to what reset() and step() return",
    "wrong_dtype": "declare a float32 Box, or return whole numbers: the fractions are lost",
    "out_of_bounds": "widen the Box or scale the value: where bounds are used (images), it is scaled wrongly",
    "observation_not_finite": "find the division or overflow: one such value destroys the network",
    "constant_observation": "the policy sees nothing to act on; check that the env deals, loads or copies its state",
    "ends_not_bool": "return bool(value)",
    "reward_not_scalar": "return one number: float(value)",
    "reward_not_finite": "find the division or overflow: one such value destroys the network",
    "info_not_dict": "return a dict; {} if there is no info",
    "unpicklable_info": "remove it or turn it into plain values: a worker process cannot send it (lean_info=true "
    "keeps it in the last info of each episode)",
    "empty_mask": "every action counts as legal there; offer a pass action, or end the episode when the game is over",
    "stale_mask": "compute the mask from the present state, after the step and after reset()",
    "mask_not_respected": "use the same rules in the mask and in step(), or correct step() for this action",
    "lost_games": "a fault of an engine ended them, not a rule; see its log, and failed_games.jsonl of a run",
    "done_for_ever": "reset() must clear what ends the episode",
    "one_step_episodes": "check what ends an episode, unless the env is a bandit",
    "constant_reward": "check that rewards are given at all; it is fine if they are only rare",
    "never_done": "check what ends an episode, or set for example env.max_episode_steps=1000",
    "action_ignored": "check that step() uses its argument",
    "reward_ignores_action": "check that the reward is computed from the effect of the action",
    "unseeded_randomness": "draw all random numbers from self.np_random, which super().reset(seed=seed) seeds",
}
