"""The checkup: before training, play a few hundred random legal steps, and play them again from the same seed.

It cannot find these faults: a mask that forbids a legal action; a wrong mask that step() accepts and that never
changes; a wrong reward that depends on the action; a reward that random play never reaches; episodes that are the same
for all seeds (as in deterministic envs), unless reset() seeds np_random with a number of its own; faults after the
first few hundred steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import gymnasium

from fasttrain.envs import causes
from fasttrain.envs.findings import AnswerCheck, Finding, make_finding, without_repetitions
from fasttrain.envs.make import Env
from fasttrain.envs.masks import MASKABLE_SPACES, layers, sounds_like_masks
from fasttrain.envs.probe import SEED, Moment, Play, PlayError, ProbeResult, Watch
from fasttrain.envs.second_play import Branches, Difference, Recorder, first_difference, not_fresh
from fasttrain.envs.user_code import CLOSING, Place, attribute_of, preserve_random_state, seed_streams
from fasttrain.envs.wrappers import has_running_statistics

EnvMaker = Callable[[], Env]
# After one of these findings there is no second play, because a second play would find the same fault again.
DECISIVE = frozenset({
    "raised", "reset_answer", "step_answer", "reward_not_scalar", "reward_not_finite", "observation_not_finite",
    "bad_mask", "mask_not_respected", "done_for_ever",
})  # fmt: skip
PATIENCE_STEPS = 20_000  # limit of further steps, if there is time, to wait for an episode's end or a rare reward
ENOUGH_ENDLESS_STEPS = 1_000
MOST_FRAMES_BESIDE = 100  # limit of frames that are compared while another process plays


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckupResult:
    """The findings, and the costs of the env."""

    findings: tuple[Finding, ...]
    costs: ProbeResult | None  # None if no step was made
    steps: int  # number of env steps in all plays
    seconds: float
    reward_range: tuple[float, float] | None  # lowest and highest reward of a step
    returns: tuple[float, ...]  # returns of the episodes that ended in the first play
    not_checked: tuple[str, ...]  # checks for which there was no time
    masks_ignored: bool = False  # the env has masks, but `use_masks` was false
    not_fresh: str = ""  # why the lent env differs from a new env when played with the same seed; else empty
    shares: str = ""  # "process" or "machine": where copies of the env influence each other; empty: nowhere

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "costs": None if self.costs is None else asdict(self.costs),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "reward_range": self.reward_range,
            "episodes": len(self.returns),
            "return_range": (min(self.returns), max(self.returns)) if self.returns else None,
            "not_checked": self.not_checked,
        }


class LentEnv(NamedTuple):
    """An env that exists already. It is played first and not closed."""

    env: Env
    build_s: float
    stays: bool  # training will use the env, so check that it still repeats its first play from the seed
    close: Callable[[], object] | None = None  # called before another env is built, if only one env can exist


def checkup(
    env_factory: EnvMaker,
    *,
    max_steps: int = 300,
    max_seconds: float = 1.5,
    use_masks: bool = True,
    lent: LentEnv | None = None,
    place: Place | None = None,
    copies: bool = True,
    beside: causes.Beside | None = None,
) -> CheckupResult:
    """Build the env and play it, then build it again and play the same actions and other actions.

    The global random state of Python and NumPy is restored.

    Args:
        max_steps: limit of the first play.
        max_seconds: limit of all plays together. Building the env is not counted: it is built twice, or up to six times
            if the same seed gives different trajectories.
        use_masks: draw only legal actions. False: draw from the whole space, as an algorithm without masks does.
        lent: an env to play in place of the first new env.
        place: records which call of the env is running.
        copies: check whether two copies are independent.
        beside: plays a copy in another process, to check independence.

    Raises:
        EnvSpecError: the env cannot be built. Errors while playing are findings.
    """
    with preserve_random_state():
        return _Checkup(env_factory, max_steps, max_seconds, use_masks, lent, place or Place(), copies, beside).result()


@dataclass
class _Checkup:
    """Several plays, one after another, with one limit of time."""

    env_factory: EnvMaker
    max_steps: int
    max_seconds: float
    use_masks: bool
    lent: LentEnv | None
    place: Place
    copies: bool
    beside: causes.Beside | None
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    steps: int = 0
    spent_s: float = 0.0  # seconds of playing, without building and without the first step, which may compile
    recorder: Recorder = field(default_factory=Recorder)
    costs: ProbeResult | None = None
    failed: bool = False  # the first play ended with an error
    masks_ignored: bool = False
    statistics: str = ""  # name of a wrapper with running statistics

    def result(self) -> CheckupResult:
        began = time.perf_counter()
        answers, shares = self._first_play(), ""
        if self.costs is not None and not self.failed and not DECISIVE & {finding.code for finding in self.findings}:
            if self.costs.build_s > self.max_seconds:
                self.not_checked.append(f"seeds and other actions: building the env takes {self.costs.build_s:.1f} s")
            elif self.statistics:
                self.not_checked.append(f"seeds and other actions: {self.statistics} carries statistics over episodes")
            elif self._repeats():
                if self.copies:
                    shares = self._independent()
                if shares != "machine":  # "machine": two envs disturb each other, so further plays would prove nothing
                    self._other_actions(self.costs)
        lent = self.lent
        return CheckupResult(
            findings=tuple(without_repetitions(self.findings)),
            costs=self.costs,
            steps=self.steps,
            seconds=time.perf_counter() - began,
            reward_range=answers.reward_range,
            returns=tuple(end.episode_return for end in answers.ends),
            not_checked=tuple(self.not_checked),
            masks_ignored=self.masks_ignored,
            not_fresh=self._not_fresh(lent) if lent is not None and lent.stays else "",
            shares=shares,
        )

    def _not_fresh(self, lent: LentEnv) -> str:
        if self.failed or self.statistics:
            return f"{self.statistics} carries statistics over episodes" if self.statistics else "its play failed"
        with self._playing(2, 2, lent) as play:
            return not_fresh(play, self.recorder.frames)

    @contextlib.contextmanager
    def _playing(
        self, python: int = 1, numpy: int = 1, lent: LentEnv | None = None, in_constructor: bool = False
    ) -> Iterator[Play]:
        """Play a new env, or the lent env, after seeding the global generators with `python` and `numpy`.

        `in_constructor`: seed both generators differently after the env was built.
        """
        seed_streams(python, numpy)
        if lent is None and self.lent is not None and self.lent.close is not None:
            self.place.enter(CLOSING)
            self.lent.close()
            self.lent = None
        if lent is None:
            play = Play(self.env_factory, self.use_masks, lenient=True, place=self.place)
        else:
            play = Play(lambda: lent.env, self.use_masks, lenient=True, place=self.place, build_s=lent.build_s)
        if in_constructor:
            seed_streams(python + 1, numpy + 1)
        began = time.perf_counter()
        try:
            yield play
        finally:
            self.spent_s += time.perf_counter() - began - play.warm_up_s
            self.steps += play.total_steps
            if lent is None:
                self.place.enter(CLOSING)
                with contextlib.suppress(Exception, SystemExit):  # errors of close() are no finding
                    play.env.close()

    def _later(self, share: float) -> float:
        return time.perf_counter() + share * self.max_seconds

    def _deadline(self, until_share: float = 1.0) -> float:
        return time.perf_counter() + max(until_share * self.max_seconds - self.spent_s, 0.0)

    def _first_play(self) -> AnswerCheck:
        fault: PlayError | None = None
        with self._playing(lent=self.lent) as play:
            answers = AnswerCheck(play.env.observation_space, play.action_space)
            maskable = isinstance(play.action_space, MASKABLE_SPACES)
            offered = attribute_of(play.env, "action_masks") is not None
            self.masks_ignored = not self.use_masks and maskable and offered
            with_statistics = (type(layer).__name__ for layer in layers(play.env) if has_running_statistics(layer))
            self.statistics = next(with_statistics, "")

            def watch(moment: Moment) -> None:
                self.recorder(moment)
                answers(moment)

            try:
                moment = play.run(0.35 * self.max_seconds, self.max_steps, watch)
                limited = any(isinstance(layer, gymnasium.wrappers.TimeLimit) for layer in layers(play.env))
                if not answers.ends and not limited:
                    self._wait_for_an_end(play, moment)
                elif answers.reward_seems_constant():
                    self._play_on(play, moment, lambda: not answers.reward_seems_constant(), answers.outcome)
            except PlayError as error:
                fault = error
            self.findings += [*answers.findings(), *(make_finding(code, text) for code, text in play.faults.items())]
            if play.steps_s and play.resets_s:
                self.costs = play.costs()
        if fault is not None:
            self.failed = True
            self._add_fault(fault)
        return answers

    def _wait_for_an_end(self, play: Play, moment: Moment) -> None:
        # Play on only if there is time for ENOUGH_ENDLESS_STEPS, which show that episodes never end.
        if 0.35 * self.max_seconds > ENOUGH_ENDLESS_STEPS * play.costs().step_s:
            self._play_on(play, moment, lambda: bool(play.lengths))
        if not play.lengths and play.length >= ENOUGH_ENDLESS_STEPS:
            text = f"no episode ended in {play.length:,} steps of random play, and no limit is set"
            self.findings.append(make_finding("never_done", text))
        elif not play.lengths:
            self.not_checked.append(f"whether episodes end: none did in {play.length:,} steps")

    def _play_on(self, play: Play, moment: Moment, enough: Callable[[], bool], watch: Watch = lambda _: None) -> None:
        deadline, most = self._later(0.35), play.total_steps + PATIENCE_STEPS
        play.go_on(moment, lambda: enough() or play.total_steps >= most or time.perf_counter() > deadline, watch)

    def _add_fault(self, fault: PlayError) -> None:
        """Add a finding about a fault that ended a play."""
        remedy = fault.remedy
        if fault.at_action:
            with self._playing() as play:
                if play.has_masks:
                    self.findings.append(causes.refused(play, fault.what, self._deadline()))
                    return
                if attribute_of(play.env, "action_masks") is not None:
                    remedy = "the env offers masks and this algorithm ignores them: use algo=maskable_ppo"
                elif isinstance(play.action_space, MASKABLE_SPACES) and (known := sounds_like_masks(play.env)):
                    remedy = f"if {known[0]} gives the legal actions, use algo=maskable_ppo with env.masks={known[0]}"
        self.findings.append(make_finding(fault.code, fault.what, remedy))

    def _again(
        self, seed: int, python: int, numpy: int, deadline: float, at_least: int = 1, in_constructor: bool = False
    ) -> Difference | None:
        with self._playing(python, numpy, in_constructor=in_constructor) as play:
            return first_difference(play, self.recorder.frames, seed, deadline, at_least)

    def _repeats(self) -> bool:
        """Whether a new env with the same seed repeats the trajectory although the global random state differs."""
        try:
            difference = self._again(SEED, 2, 2, self._deadline(0.8))
            if difference is None:
                return True
            brief, at_least = 0.1 * self.max_seconds, difference.index

            def again(seed: int, python: int, numpy: int, in_constructor: bool) -> Difference | None:
                return self._again(seed, python, numpy, time.perf_counter() + brief, at_least, in_constructor)

            self.findings.append(causes.unseeded(difference, again))
        except PlayError as fault:
            self._add_fault(fault)
        return False

    def _other_actions(self, costs: ProbeResult) -> None:
        try:
            with self._playing(3, 3, self.lent) as play:  # plays the lent env, if any, so that no env must be built
                deadline = self._deadline()
                branches = Branches(play, costs, deadline)
                branches.run(self.recorder.frames[0])
                if not branches.in_time or any(not pair.rewards_identical for pair in branches.pairs):
                    # Equal returns prove nothing if pairs of episodes are missing, or if rewards within a pair differ.
                    self.findings = [one for one in self.findings if one.code != "reward_ignores_action"]
                self.findings += branches.findings()
                unused = [*causes.unused_range(play, deadline)]
                self.findings += [*unused, *causes.always_one_seed(play)]
                if (
                    isinstance(play.action_space, gymnasium.spaces.Box)
                    and not unused
                    and deadline < time.perf_counter()
                ):
                    self.not_checked.append("whether the whole range of actions has an effect: there was no time")
                if not branches.in_time:
                    self.not_checked.append(
                        f"what other actions change: there was time for {len(branches.pairs)} comparisons only"
                    )
            if branches.carries_over is not None:
                self._add_carry_over(branches.carries_over)
        except PlayError as fault:
            self._add_fault(fault)

    def _add_carry_over(self, difference: Difference) -> None:
        """Report that the same env played another episode from the same seed the second time."""
        if difference.step == 0:
            other_seed = self._again(SEED + 1, 1, 1, self._later(0.1))
            self.findings.append(causes.carried_over(difference, other_seed is not None, self._playing))
        else:  # no finding: a physics engine's caches, as in BipedalWalker, can change the last bits
            differs = f"on the same env a seed gave another episode the second time ({difference})"
            self.not_checked.append(f"what other actions change: {differs}")

    def _independent(self) -> str:
        """Find out whether copies of the env influence each other: "" (no), in one "process", or on one "machine"."""
        what = causes.interference(self._playing, self.recorder.frames, self._later(0.2))
        if not what:
            return ""
        if not causes.interference(self._playing, self.recorder.frames, self._later(0.2), streams_apart=True):
            text = "reset(seed=…) seeds the global `random` or `np.random`, from which all copies in a process draw"
            self.findings.append(make_finding("unseeded_randomness", text))
            return ""
        outside = self.beside is None or causes.interference_from_outside(
            self.beside, self._playing, self.recorder.frames[:MOST_FRAMES_BESIDE], time.perf_counter() + causes.BESIDE_S
        )
        where = "on this machine" if outside else "in one process"
        text = f"two copies of the env {where} influence each other: when both are played in turns, {what}"
        self.findings.append(make_finding("copies_not_independent", text))
        return "machine" if outside else "process"
