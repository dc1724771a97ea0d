"""How fast a run could be, computed from the measured times of its parts and how they overlap. Pure functions.

Times are seconds per env step, for all envs together. The limit contains only the time of envs, policy and update;
storing and logging take additional time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WORTH = 0.05  # smaller gains cannot be measured on a busy machine


class Rates(NamedTuple):
    """Seconds per env step of each part by itself. None: not measured, or the run has no such part."""

    env: float | None = None
    policy: float | None = None
    update: float | None = None  # gradient updates, with the drawing of replay batches
    replay: float | None = None  # drawing replay batches; also counted in `update`
    transport: float | None = None  # part of `env`: its time without the work of the slowest worker process
    logging: float | None = None
    storing: float | None = None  # storing transitions, ending episodes, computing advantages

    def scaled(self, ratios: Mapping[str, float]) -> Rates:
        """The rates after a change. `ratios`: changed ÷ present time, for each part that was measured."""
        pairs = zip(self._fields, self, strict=True)
        return Rates(*(None if value is None else value * ratios.get(part, 1.0) for part, value in pairs))


class Flow(NamedTuple):
    """How the parts of a run overlap. `groups` (schedule=first_ready): envs step while the policy acts, and share the
    cores with the policy. `env_cores`: how many of the `cores` compute while envs step.
    """

    groups: bool = False
    cores: int = 1
    env_cores: float = 1.0


def limit_s(rates: Rates, flow: Flow, whole: bool = False) -> float:
    """Seconds per env step of envs, policy and update. `whole`: storing and logging are included."""
    env, own = rates.env or 0.0, rates.policy or 0.0
    own += (rates.storing or 0.0) + (rates.logging or 0.0) if whole else 0.0
    collect = env + own
    if flow.groups:
        computing = env * flow.env_cores + own  # core-seconds
        collect = max(env, own, min(collect, computing / flow.cores))
    return collect + (rates.update or 0.0)


def composed_limit(rates: Rates, flow: Flow) -> float:
    """Env steps/s of envs, policy and update alone; infinite if none of them was measured."""
    seconds = limit_s(rates, flow)
    return 1.0 / seconds if seconds > 0 else float("inf")


def expected_s(present_s: float, before: tuple[Rates, Flow], after: tuple[Rates, Flow]) -> float:
    """Seconds per env step after a change, at least the limit of `after`. Time that no rate covers stays the same."""
    changed = present_s + limit_s(*after, whole=True) - limit_s(*before, whole=True)
    return max(changed, limit_s(*after))


def gain_of(present_s: float, changed_s: float) -> float:
    """The gain in steps/s: 0.25 means a quarter more."""
    return present_s / changed_s - 1.0


def most_gain(part: float | None, present_s: float) -> float:
    """The gain if a part took no time. No change of this part can gain more."""
    others_s = present_s - (part or 0.0)
    return float("inf") if others_s <= 0 else present_s / others_s - 1.0
