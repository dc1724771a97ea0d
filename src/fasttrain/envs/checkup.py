"""The checkup: a few hundred steps by random legal actions, played again from the same seed, before training starts.

What it cannot see: a mask that forbids a legal action; a wrong mask that no step() refuses and that changes neither
with the action nor over time; a reward that depends on the action wrongly, or that random play never meets; that two
seeds give the same episodes (deterministic envs do), unless np_random is given a seed of its own; faults beyond the
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
from fasttrain.envs.findings import Finding, Witness, found, without_echoes
from fasttrain.envs.make import Env
from fasttrain.envs.masks import MASKABLE_SPACES, layers, sounds_like_masks
from fasttrain.envs.probe import SEED, Moment, Play, PlayError, ProbeResult, Watch
from fasttrain.envs.second_play import Branches, Difference, Recorder, first_difference, not_fresh
from fasttrain.envs.user_code import CLOSING, Place, kept_random_state, seed_streams
from fasttrain.envs.wrappers import keeps_means

EnvMaker = Callable[[], Env]
# After these nothing that a replay shows would be a finding of its own.
SPOILING = frozenset({
    "raised", "reset_answer", "step_answer", "reward_not_scalar", "reward_not_finite", "observation_not_finite",
    "bad_mask", "mask_not_respected", "done_for_ever",
})  # fmt: skip
PATIENCE_STEPS = 20_000  # of further play, where time allows, for an end or a reward that may just be rare
ENOUGH_ENDLESS_STEPS = 1_000
MOST_FRAMES_BESIDE = 100  # compared while another process plays


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckupResult:
    """What was found and what the env costs."""

    findings: tuple[Finding, ...]
    costs: ProbeResult | None  # None where it did not get as far as a step
    steps: int  # played in all, replays included
    seconds: float
    reward_range: tuple[float, float] | None  # lowest and highest reward of a step
    returns: tuple[float, ...]  # of the episodes that ended in the first pass
    not_checked: tuple[str, ...]  # what there was no time for
    masks_ignored: bool = False  # the env has some, `use_masks` was false
    not_fresh: str = ""  # why the env that was lent and stays is not like a fresh one after a seeded reset
    shares: str = ""  # copies of one "process", or even of one "machine", influence each other

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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


class Lent(NamedTuple):
    """An env that was built before, to be played first and left open."""

    env: Env
    build_s: float  # what building it took
    stays: bool  # somebody continues it: does it repeat, after all play, what it did when it was new?
    let_go: Callable[[], object] | None = None  # closes it before another is built: there may be room for one alone


def checkup(
    env_factory: EnvMaker,
    *,
    max_steps: int = 300,
    max_seconds: float = 1.5,
    use_masks: bool = True,
    lent: Lent | None = None,
    place: Place | None = None,
    copies: bool = True,
    beside: causes.Beside | None = None,
) -> CheckupResult:
    """Build the env, play it, look at what it answers, build it again and play the same actions and others.

    `max_steps` bounds the first pass, `max_seconds` all play together (not building the env, which happens twice, up to
    six times where the same seed gives another trajectory). Python's and NumPy's global random streams are left as they
    were. With `use_masks=False` actions are drawn from the whole space, as an algorithm without masks will. `lent` is
    played in place of the first build; `place` is told where the play is. With `copies` it is tried whether two copies
    are independent; `beside` plays one in another process for that.

    Raises:
        EnvSpecError: the env cannot be built. What it does wrong while playing is a finding.
    """
    with kept_random_state():
        return _Checkup(env_factory, max_steps, max_seconds, use_masks, lent, place or Place(), copies, beside).result()


@dataclass
class _Checkup:
    """The passes of play, one after another, within one budget of time."""

    env_factory: EnvMaker
    max_steps: int
    max_seconds: float
    use_masks: bool
    lent: Lent | None
    place: Place
    copies: bool
    beside: causes.Beside | None
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    steps: int = 0
    spent_s: float = 0.0  # playing; builds and the first step, which may compile, do not count
    recorder: Recorder = field(default_factory=Recorder)
    costs: ProbeResult | None = None
    spoilt: bool = False  # the first pass broke off
    masks_ignored: bool = False
    statistics: str = ""  # the wrapper that keeps running ones

    def result(self) -> CheckupResult:
        began = time.perf_counter()
        witness, shares = self._first_pass(), ""
        if self.costs is not None and not self.spoilt and not SPOILING & {finding.code for finding in self.findings}:
            if self.costs.build_s > self.max_seconds:
                self.not_checked.append(f"seeds and other actions: building the env takes {self.costs.build_s:.1f} s")
            elif self.statistics:
                self.not_checked.append(f"seeds and other actions: {self.statistics} carries statistics over episodes")
            elif self._same_again():
                if self.copies:
                    shares = self._independent()
                if shares != "machine":  # else the first env was put out
                    self._other_actions(self.costs)
        lent = self.lent
        return CheckupResult(
            findings=tuple(without_echoes(self.findings)),
            costs=self.costs,
            steps=self.steps,
            seconds=time.perf_counter() - began,
            reward_range=witness.reward_range,
            returns=tuple(end.episode_return for end in witness.ends),
            not_checked=tuple(self.not_checked),
            masks_ignored=self.masks_ignored,
            not_fresh=self._not_fresh(lent) if lent is not None and lent.stays else "",
            shares=shares,
        )

    def _not_fresh(self, lent: Lent) -> str:
        if self.spoilt or self.statistics:
            return f"{self.statistics} carries statistics over episodes" if self.statistics else "it broke off"
        with self._playing(2, 2, lent) as play:
            return not_fresh(play, self.recorder.frames)

    @contextlib.contextmanager
    def _playing(
        self, python: int = 1, numpy: int = 1, lent: Lent | None = None, in_constructor: bool = False
    ) -> Iterator[Play]:
        """A fresh env (or the one that was lent), played with the global streams in a known state.

        `in_constructor`: they are in that state while it is built only, and in another one while it is played.
        """
        seed_streams(python, numpy)
        if lent is None and self.lent is not None and self.lent.let_go is not None:
            self.place.enter(CLOSING)
            self.lent.let_go()
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
                with contextlib.suppress(Exception, SystemExit):  # an env that cannot close has shown what it can
                    play.env.close()

    def _later(self, share: float) -> float:
        return time.perf_counter() + share * self.max_seconds

    def _deadline(self, until_share: float = 1.0) -> float:
        return time.perf_counter() + max(until_share * self.max_seconds - self.spent_s, 0.0)

    def _first_pass(self) -> Witness:
        fault: PlayError | None = None
        with self._playing(lent=self.lent) as play:
            witness = Witness(play.env.observation_space, play.action_space)
            maskable = isinstance(play.action_space, MASKABLE_SPACES)
            self.masks_ignored = not self.use_masks and maskable and play.env.has_wrapper_attr("action_masks")
            self.statistics = next((type(layer).__name__ for layer in layers(play.env) if keeps_means(layer)), "")

            def watch(moment: Moment) -> None:
                self.recorder(moment)
                witness(moment)

            try:
                moment = play.run(0.35 * self.max_seconds, self.max_steps, watch)
                limited = any(isinstance(layer, gymnasium.wrappers.TimeLimit) for layer in layers(play.env))
                if not witness.ends and not limited:
                    self._wait_for_an_end(play, moment)
                elif witness.reward_seems_constant():
                    self._wait(play, moment, lambda: not witness.reward_seems_constant(), witness.outcome)
            except PlayError as error:
                fault = error
            self.findings += [*witness.findings(), *(found(code, text) for code, text in play.faults.items())]
            if play.steps_s and play.resets_s:
                self.costs = play.costs()
        if fault is not None:
            self.spoilt = True
            self._note(fault)
        return witness

    def _wait_for_an_end(self, play: Play, moment: Moment) -> None:
        if 0.35 * self.max_seconds > ENOUGH_ENDLESS_STEPS * play.costs().step_s:  # else it would prove nothing
            self._wait(play, moment, lambda: bool(play.lengths))
        if not play.lengths and play.length >= ENOUGH_ENDLESS_STEPS:
            text = f"no episode ended in {play.length:,} steps of random play, and no limit is set"
            self.findings.append(found("never_done", text))
        elif not play.lengths:
            self.not_checked.append(f"whether episodes end: none did in {play.length:,} steps")

    def _wait(self, play: Play, moment: Moment, over: Callable[[], bool], watch: Watch = lambda _: None) -> None:
        deadline, most = self._later(0.35), play.total_steps + PATIENCE_STEPS
        play.go_on(moment, lambda: over() or play.total_steps >= most or time.perf_counter() > deadline, watch)

    def _note(self, fault: PlayError) -> None:
        """A fault that ended a pass, as a finding."""
        remedy = fault.remedy
        if fault.at_action:
            with self._playing() as play:
                if play.has_masks:
                    self.findings.append(causes.refused(play, fault.what, self._deadline()))
                    return
                if play.env.has_wrapper_attr("action_masks"):
                    remedy = "the env offers masks and this algorithm ignores them: use algo=maskable_ppo"
                elif isinstance(play.action_space, MASKABLE_SPACES) and (known := sounds_like_masks(play.env)):
                    remedy = f"if {known[0]} says what is legal, use algo=maskable_ppo with env.masks={known[0]}"
        self.findings.append(found(fault.code, fault.what, remedy))

    def _again(
        self, seed: int, python: int, numpy: int, deadline: float, at_least: int = 1, in_constructor: bool = False
    ) -> Difference | None:
        with self._playing(python, numpy, in_constructor=in_constructor) as play:
            return first_difference(play, self.recorder.frames, seed, deadline, at_least)

    def _same_again(self) -> bool:
        """Whether the same seed gives the same trajectory, in another env and with other global streams."""
        try:
            difference = self._again(SEED, 2, 2, self._deadline(0.8))
            if difference is None:
                return True
            brief, at_least = 0.1 * self.max_seconds, difference.index

            def again(seed: int, python: int, numpy: int, in_constructor: bool) -> Difference | None:
                return self._again(seed, python, numpy, time.perf_counter() + brief, at_least, in_constructor)

            self.findings.append(causes.unseeded(difference, again))
        except PlayError as fault:
            self._note(fault)
        return False

    def _other_actions(self, costs: ProbeResult) -> None:
        try:
            with self._playing(3, 3, self.lent) as play:  # one build less; fresh or not, its seeds must do the same
                deadline = self._deadline()
                branches = Branches(play, costs, deadline)
                branches.run(self.recorder.frames[0])
                if any(not pair.rewards_identical for pair in branches.pairs):  # though all episodes return the same
                    self.findings = [one for one in self.findings if one.code != "reward_ignores_action"]
                self.findings += branches.findings()
                unused = [*causes.unused_range(play, deadline)]
                self.findings += [*unused, *causes.always_one_seed(play)]
                if (
                    isinstance(play.action_space, gymnasium.spaces.Box)
                    and not unused
                    and deadline < time.perf_counter()
                ):
                    self.not_checked.append("whether all of the action range has an effect: there was no time")
                if not branches.in_time:
                    self.not_checked.append(f"what other actions change: time for {len(branches.pairs)} comparisons")
            if branches.carries_over is not None:
                self._not_put_back(branches.carries_over)
        except PlayError as fault:
            self._note(fault)

    def _not_put_back(self, difference: Difference) -> None:
        """An env whose episode from a seed differed the second time."""
        if difference.step == 0:
            other_seed = self._again(SEED + 1, 1, 1, self._later(0.1))
            self.findings.append(causes.carried_over(difference, other_seed is not None, self._playing))
        else:  # physics engines keep caches: Gymnasium's BipedalWalker differs in the last bits
            differs = f"the second time on the same env a seed gave another episode ({difference})"
            self.not_checked.append(f"what other actions change: {differs}")

    def _independent(self) -> str:
        """Whether copies of the env influence each other: not at all (""), those of one "process", or of one "machine".

        It is a finding where they do.
        """
        what = causes.interference(self._playing, self.recorder.frames, self._later(0.2))
        if not what:
            return ""
        if not causes.interference(self._playing, self.recorder.frames, self._later(0.2), streams_apart=True):
            text = "reset(seed=…) seeds the global `random` or `np.random`, from which all copies in a process draw"
            self.findings.append(found("unseeded_randomness", text))
            return ""
        outside = self.beside is None or causes.interference_from_outside(
            self.beside, self._playing, self.recorder.frames[:MOST_FRAMES_BESIDE], time.perf_counter() + causes.BESIDE_S
        )
        where = "on this machine" if outside else "in one process"
        text = f"two copies of the env {where} influence each other: when both are played in turns, {what}"
        self.findings.append(found("copies_not_independent", text))
        return "machine" if outside else "process"
