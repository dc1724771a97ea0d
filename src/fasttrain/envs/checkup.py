"""The checkup: a few hundred steps by random legal actions, played again from the same seed, before training starts.

What it cannot see: a mask that forbids a legal action; a wrong mask that no step() refuses and that changes neither
with the action nor over time; a reward that depends on the action wrongly, or that random play never meets; that two
seeds give the same episodes (deterministic envs do); faults beyond the first few hundred steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import gymnasium

from fasttrain.envs.branches import Branches
from fasttrain.envs.findings import Finding, Witness, found
from fasttrain.envs.masks import MASKABLE_SPACES
from fasttrain.envs.place import CLOSING, Place
from fasttrain.envs.probe import SEED, Moment, Play, PlayError, ProbeResult, Watch
from fasttrain.envs.replay import Difference, Recorder, first_difference, not_fresh, refused, seed_streams, unseeded
from fasttrain.envs.user_code import kept_random_state

EnvMaker = Callable[[], gymnasium.Env[Any, Any]]
# After these nothing that a replay shows would be a finding of its own.
SPOILING = frozenset({
    "raised", "reset_answer", "step_answer", "reward_not_scalar", "reward_not_finite", "observation_not_finite",
    "empty_mask", "bad_mask", "mask_not_respected", "done_for_ever",
})  # fmt: skip
PATIENCE_STEPS = 20_000  # of further play, where time allows, for an end or a reward that may just be rare
ENOUGH_ENDLESS_STEPS = 1_000


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

    env: gymnasium.Env[Any, Any]
    build_s: float  # what building it took
    stays: bool  # somebody goes on with it: does it repeat, after all play, what it did when it was new?


def checkup(
    env_factory: EnvMaker,
    *,
    max_steps: int = 300,
    max_seconds: float = 1.5,
    use_masks: bool = True,
    lent: Lent | None = None,
    place: Place | None = None,
) -> CheckupResult:
    """Build the env, play it, look at what it answers, build it again and play the same actions and others.

    `max_steps` bounds the first pass, `max_seconds` all play together (not building the env, which happens twice, up to
    six times where the same seed gives another trajectory). Python's and NumPy's global random streams are left as they
    were. With `use_masks=False` actions are drawn from the whole space, as an algorithm without masks will. `lent` is
    played in place of the first build; `place` is told where the play is.

    Raises:
        EnvSpecError: the env cannot be built. What it does wrong while playing is a finding.
    """
    with kept_random_state():
        return _Checkup(env_factory, max_steps, max_seconds, use_masks, lent, place or Place()).result()


class _Checkup:
    """The passes of play, one after another, within one budget of time."""

    def __init__(
        self,
        env_factory: EnvMaker,
        max_steps: int,
        max_seconds: float,
        use_masks: bool,
        lent: Lent | None,
        place: Place,
    ) -> None:
        self._env_factory, self._use_masks, self._lent, self._place = env_factory, use_masks, lent, place
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self._findings: list[Finding] = []
        self._not_checked: list[str] = []
        self._steps = 0
        self._spent_s = 0.0  # playing; builds and the first step, which may compile, do not count
        self._recorder = Recorder()
        self._costs: ProbeResult | None = None
        self._spoilt = False  # the first pass broke off
        self._masks_ignored = False
        self._statistics = ""  # the wrapper that keeps running ones

    def result(self) -> CheckupResult:
        began = time.perf_counter()
        witness = self._first_pass()
        if self._costs is not None and not self._spoilt and not SPOILING & {finding.code for finding in self._findings}:
            if self._costs.build_s > self._max_seconds:
                self._not_checked.append(f"seeds and other actions: building the env takes {self._costs.build_s:.1f} s")
            elif self._statistics:
                self._not_checked.append(
                    f"seeds and other actions: {self._statistics} carries statistics over episodes"
                )
            elif self._same_again():
                self._other_actions(self._costs)
        lent = self._lent
        return CheckupResult(
            findings=tuple(_without_echoes(self._findings)),
            costs=self._costs,
            steps=self._steps,
            seconds=time.perf_counter() - began,
            reward_range=witness.reward_range,
            returns=tuple(end.episode_return for end in witness.ends),
            not_checked=tuple(self._not_checked),
            masks_ignored=self._masks_ignored,
            not_fresh=self._not_fresh(lent) if lent is not None and lent.stays else "",
        )

    def _not_fresh(self, lent: Lent) -> str:
        if self._spoilt or self._statistics:
            return f"{self._statistics} carries statistics over episodes" if self._statistics else "it broke off"
        with self._playing(2, 2, lent) as play:
            return not_fresh(play, self._recorder.frames)

    @contextlib.contextmanager
    def _playing(self, python: int = 1, numpy: int = 1, lent: Lent | None = None) -> Iterator[Play]:
        """A fresh env (or the one that was lent), played with the global streams in a known state."""
        seed_streams(python, numpy)
        if lent is None:
            play = Play(self._env_factory, self._use_masks, lenient=True, place=self._place)
        else:
            play = Play(lambda: lent.env, self._use_masks, lenient=True, place=self._place, build_s=lent.build_s)
        began = time.perf_counter()
        try:
            yield play
        finally:
            self._spent_s += time.perf_counter() - began - play.warm_up_s
            self._steps += play.total_steps
            if lent is None:
                self._place.enter(CLOSING)
                with contextlib.suppress(Exception, SystemExit):  # an env that cannot close has shown what it can
                    play.env.close()

    def _deadline(self, until_share: float = 1.0) -> float:
        return time.perf_counter() + max(until_share * self._max_seconds - self._spent_s, 0.0)

    def _first_pass(self) -> Witness:
        fault: PlayError | None = None
        with self._playing(lent=self._lent) as play:
            witness = Witness(play.env.observation_space, play.action_space)
            names = (type(layer).__name__ for layer in _layers(play.env))
            maskable = isinstance(play.action_space, MASKABLE_SPACES)
            self._masks_ignored = not self._use_masks and maskable and play.env.has_wrapper_attr("action_masks")
            self._statistics = next((name for name in names if "Normalize" in name), "")

            def watch(moment: Moment) -> None:
                self._recorder(moment)
                witness(moment)

            try:
                moment = play.run(0.35 * self._max_seconds, self._max_steps, watch)
                if not witness.ends and not _limited(play.env):
                    self._wait_for_an_end(play, moment)
                elif witness.reward_seems_constant():
                    self._wait_for_another_reward(play, moment, witness)
            except PlayError as error:
                fault = error
            self._findings += witness.findings()
            if play.unstable_mask:
                text = f"action_masks() called twice without a step between gave two masks ({play.unstable_mask})"
                self._findings.append(found("stale_mask", text))
            if play.steps_s and play.resets_s:
                self._costs = play.costs()
        if fault is not None:
            self._spoilt = True
            self._note(fault)
        return witness

    def _wait_for_an_end(self, play: Play, moment: Moment) -> None:
        if 0.35 * self._max_seconds > ENOUGH_ENDLESS_STEPS * play.costs().step_s:  # else it would prove nothing
            self._wait(play, moment, lambda: bool(play.lengths))
        if not play.lengths and play.length >= ENOUGH_ENDLESS_STEPS:
            self._findings.append(
                found("never_done", f"no episode ended in {play.length:,} steps of random play, and no limit is set")
            )
        elif not play.lengths:
            self._not_checked.append(f"whether episodes end: none did in {play.length:,} steps")

    def _wait_for_another_reward(self, play: Play, moment: Moment, witness: Witness) -> None:
        self._wait(play, moment, lambda: not witness.reward_seems_constant(), witness.outcome)

    def _wait(self, play: Play, moment: Moment, over: Callable[[], bool], watch: Watch = lambda _: None) -> None:
        deadline, most = time.perf_counter() + 0.35 * self._max_seconds, play.total_steps + PATIENCE_STEPS
        play.go_on(moment, lambda: over() or play.total_steps >= most or time.perf_counter() > deadline, watch)

    def _note(self, fault: PlayError) -> None:
        """A fault that ended a pass, as a finding; not if an empty mask, found already, led there."""
        if any(finding.code == "empty_mask" for finding in self._findings):
            return
        remedy = fault.remedy
        if fault.at_action:
            with self._playing() as play:
                if play.has_masks:
                    self._findings.append(refused(play, fault.what, self._deadline()))
                    return
                if play.env.has_wrapper_attr("action_masks"):
                    remedy = "the env offers masks and this algorithm ignores them: take algo=maskable_ppo"
        self._findings.append(found(fault.code, fault.what, remedy))

    def _again(self, seed: int, python: int, numpy: int, deadline: float, at_least: int = 1) -> Difference | None:
        with self._playing(python, numpy) as play:
            return first_difference(play, self._recorder.frames, seed, deadline, at_least)

    def _same_again(self) -> bool:
        """Whether the same seed gives the same trajectory, in another env and with other global streams."""
        try:
            difference = self._again(SEED, 2, 2, self._deadline(0.8))
            if difference is None:
                return True
            brief, at_least = 0.1 * self._max_seconds, difference.index

            def again(seed: int, python: int, numpy: int) -> Difference | None:
                return self._again(seed, python, numpy, time.perf_counter() + brief, at_least)

            self._findings.append(unseeded(difference, again))
        except PlayError as fault:
            self._note(fault)
        return False

    def _other_actions(self, costs: ProbeResult) -> None:
        try:
            with self._playing(3, 3, self._lent) as play:  # one build less; fresh or not, its seeds must do the same
                branches = Branches(play, costs, self._deadline())
                branches.run(self._recorder.frames[0])
                self._findings += branches.findings()
                if not branches.in_time:
                    self._not_checked.append(f"what other actions change: time for {len(branches.pairs)} comparisons")
            if branches.carries_over is not None:
                self._not_put_back(branches.carries_over)
        except PlayError as fault:
            self._note(fault)

    def _not_put_back(self, difference: Difference) -> None:
        """An env whose episode from a seed differed the second time: does the seed decide anything?"""
        if self._again(SEED + 1, 1, 1, time.perf_counter() + 0.1 * self._max_seconds) is None:
            text = (
                "reset(seed=…) decides nothing: two seeds gave the same trajectory in fresh envs, so all copies of the "
                f"env play the same, and one seed gave another one the second time (first {difference})"
            )
            self._findings.append(found("unseeded_randomness", text))
        elif difference.step == 0:
            text = (
                f"reset(seed=…) gave another start the second time on the same env (first {difference}): something is "
                "not put back, a generator made in the constructor or what was left of an earlier episode"
            )
            self._findings.append(found("unseeded_randomness", text))
        else:  # physics engines keep caches: Gymnasium's BipedalWalker differs in the last bits
            text = (
                f"what other actions change: the second time on the same env a seed gave another episode ({difference})"
            )
            self._not_checked.append(text)


def _without_echoes(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Ignored actions explain what was said of the reward. Of one code the gravest, else the last."""
    ignored = any(finding.code == "action_ignored" for finding in findings)
    kept: dict[str, Finding] = {}
    for finding in findings:
        if ignored and finding.code in ("reward_ignores_action", "constant_reward"):
            continue
        key = finding.code if finding.code in ("reward_ignores_action", "stale_mask") else finding.message
        if key not in kept or finding.severity == "error" or kept[key].severity == "warning":
            kept[key] = finding
    yield from kept.values()


def _layers(env: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Env[Any, Any]]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _limited(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether Gymnasium cuts the episodes, however long it takes."""
    return any(isinstance(layer, gymnasium.wrappers.TimeLimit) for layer in _layers(env))
