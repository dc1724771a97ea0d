"""The checkup: a few hundred steps by random legal actions, played again from the same seed, before training starts.

What it cannot see: a mask that forbids a legal action; a wrong mask that no step() refuses and that changes neither with
the action nor over time; a reward that depends on the action wrongly; a second seed that gives the same trajectory
(deterministic envs do); faults beyond the first few hundred steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium

from fasttrain.envs.findings import REMEDIES, Finding, Witness
from fasttrain.envs.probe import SEED, Play, PlayFault, ProbeResult
from fasttrain.envs.replay import Branches, Difference, Recorder, first_difference, refused, seed_streams, unseeded
from fasttrain.envs.user_code import kept_random_state

EnvMaker = Callable[[], gymnasium.Env[Any, Any]]
# After these nothing that a replay shows would be a finding of its own.
SPOILING = frozenset({
    "raised", "reset_answer", "step_answer", "reward_not_scalar", "reward_not_finite", "observation_not_finite",
    "empty_mask", "bad_mask", "mask_not_respected", "done_for_ever",
})  # fmt: skip
ENDLESS_STEPS = 5_000  # of one episode, where time allows; with fewer than ENOUGH_ENDLESS_STEPS nothing is said
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

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "findings": [{"severity": finding.severity, **asdict(finding)} for finding in self.findings],
            "costs": None if self.costs is None else asdict(self.costs),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "reward_range": self.reward_range,
            "episodes": len(self.returns),
            "return_range": (min(self.returns), max(self.returns)) if self.returns else None,
            "not_checked": self.not_checked,
        }


def checkup(
    env_factory: EnvMaker, *, max_steps: int = 300, max_seconds: float = 1.5, use_masks: bool = True
) -> CheckupResult:
    """Build the env, play it, look at what it answers, build it again and play the same actions and others.

    `max_steps` bounds the first pass, `max_seconds` all play together (not building the env, which happens twice, up to
    six times where the same seed gives another trajectory). Python's and NumPy's global random streams are left as they
    were. With `use_masks=False` actions are drawn from the whole space, as an algorithm without masks will.

    Raises:
        EnvSpecError: the env cannot be built. What it does wrong while playing is a finding.
    """
    with kept_random_state():
        return _Checkup(env_factory, max_steps, max_seconds, use_masks).result()


class _Checkup:
    def __init__(self, env_factory: EnvMaker, max_steps: int, max_seconds: float, use_masks: bool) -> None:
        self._env_factory, self._use_masks = env_factory, use_masks
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self._findings: list[Finding] = []
        self._not_checked: list[str] = []
        self._steps = 0
        self._spent_s = 0.0  # playing
        self._recorder = Recorder()
        self._costs: ProbeResult | None = None

    def result(self) -> CheckupResult:
        witness = self._first_pass()
        if not any(finding.code in SPOILING for finding in self._findings):
            if self._costs is not None and self._costs.build_s > self._max_seconds:
                self._not_checked.append(f"replays, because building the env takes {self._costs.build_s:.1f} s")
            elif self._same_again():
                self._other_actions()
        return CheckupResult(
            findings=tuple(self._findings),
            costs=self._costs,
            steps=self._steps,
            seconds=self._spent_s,
            reward_range=witness.reward_range,
            returns=tuple(witness.returns),
            not_checked=tuple(self._not_checked),
        )

    @contextlib.contextmanager
    def _playing(self, python: int = 1, numpy: int = 1):  # type: ignore[no-untyped-def]
        """A fresh env, the global streams in a known state before it is built."""
        seed_streams(python, numpy)
        play = Play(self._env_factory, self._use_masks, lenient=True)
        began = time.perf_counter()
        try:
            yield play
        finally:
            self._spent_s += time.perf_counter() - began
            self._steps += play.total_steps
            with contextlib.suppress(Exception):  # an env that cannot close has shown what it can
                play.env.close()

    def _deadline(self, share: float = 1.0) -> float:
        return time.perf_counter() + max(share * self._max_seconds - self._spent_s, 0.0)
