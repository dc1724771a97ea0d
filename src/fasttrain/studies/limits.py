"""How fast a run could be: its parts, measured one by one, put together as the run overlaps them. Pure.

Times are seconds per env step of the whole vector env. The limit is what envs, policy and update alone allow; storing
and logging come on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WORTH = 0.05  # smaller gains are below what a busy machine lets one measure, and not worth a change


class Rates(NamedTuple):
    """Seconds per env step that each part takes by itself; None: not measured, or the run has no such part."""

    env: float | None = None
    policy: float | None = None
    update: float | None = None  # drawing from the replay buffer included
    replay: float | None = None  # within `update`
    transport: float | None = None  # within `env`: what worker processes cost besides the slowest one's work
    logging: float | None = None
    storing: float | None = None  # transitions, episodes, advantages

    def scaled(self, ratios: Mapping[str, float]) -> Rates:
        """These after a change that was measured as changed ÷ present, part by part."""
        pairs = zip(self._fields, self, strict=True)
        return Rates(*(None if value is None else value * ratios.get(part, 1.0) for part, value in pairs))


class Flow(NamedTuple):
    """How a run overlaps its parts.

    Groups (schedule=first_ready): envs step while the policy acts. Both still share the cores: `env_cores` of them
    compute while envs step.
    """

    groups: bool = False
    cores: int = 1
    env_cores: float = 1.0


def limit_s(rates: Rates, flow: Flow, whole: bool = False) -> float:
    """Seconds per env step if only envs, policy and update were left; `whole`: with storing and logging, which the
    thread that acts does too."""
    env, own = rates.env or 0.0, rates.policy or 0.0
    own += (rates.storing or 0.0) + (rates.logging or 0.0) if whole else 0.0
    collect = env + own
    if flow.groups:
        computing = env * flow.env_cores + own  # core-seconds
        collect = max(env, own, min(collect, computing / flow.cores))
    return collect + (rates.update or 0.0)


def composed_limit(rates: Rates, flow: Flow) -> float:
    """Env steps/s if only envs, policy and update were left; infinite if nothing of them was measured."""
    seconds = limit_s(rates, flow)
    return 1.0 / seconds if seconds > 0 else float("inf")


def expected_s(present_s: float, before: tuple[Rates, Flow], after: tuple[Rates, Flow]) -> float:
    """Seconds per env step after a change.

    What the present run takes besides its measured parts stays: only the difference that the model sees is applied.
    It cannot become less than the new limit.
    """
    changed = present_s + limit_s(*after, whole=True) - limit_s(*before, whole=True)
    return max(changed, limit_s(*after))


def gain_of(present_s: float, changed_s: float) -> float:
    """0.25: a quarter more steps/s."""
    return present_s / changed_s - 1.0


def most_gain(part: float | None, present_s: float) -> float:
    """The gain if that part took no time at all: what no change to it can exceed."""
    rest = present_s - (part or 0.0)
    return float("inf") if rest <= 0 else present_s / rest - 1.0
