"""Statistics of games with engines: where a game's time goes, percentiles, lost games and their causes. Pure functions.

An env is always in one of five states: the engine thinks (engine); a message is on its way (network, known only if the
engine reports how long it thought); a message is decoded (decode); the decision waits for the policy or its update
(queue); the engine is being restarted (idle). So the five times add up to the wall time, and Little's law holds:
decisions/s = games in flight ÷ (engine + network + decode + queue + idle).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fasttrain.terminal import rate_text

PARTS = ("engine", "network", "decode", "queue", "idle")
SHARES = ("busy_share", "cpu_share")
LOST_SHARE = 0.01  # share of lost games above which a warning is printed
BIASED = (
    "Dropping games, long ones above all, biases the training data: see failed_games.jsonl, and give them time "
    "(daemons.timeouts_s.game, daemons.timeouts_s.request)"
)
BUCKETS_S = {
    "decision": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    "game": (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600),
}
PER_DECADE, DECADES, FIRST_NS = 50, 8, 1e4  # bins from 10 µs to 1,000 s, each 4.7 % wider than the last


class GameTimes(NamedTuple):
    """Times in nanoseconds, summed over all running games, and counts."""

    engine_ns: int = 0
    network_ns: int = 0
    decode_ns: int = 0
    queue_ns: int = 0
    idle_ns: int = 0
    decisions: int = 0  # decisions of the policy
    forced: int = 0  # decisions with one legal action, taken without the policy (`EngineGame.skip_forced`)
    refused: int = 0
    games: int = 0  # games that ended by their rules or limits
    lost: int = 0
    lost_decisions: int = 0  # decisions in lost games
    restarts: int = 0

    def since(self, before: GameTimes) -> GameTimes:
        """These values minus the earlier values `before`."""
        return GameTimes(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def parts_ns(self) -> dict[str, int]:
        return {name: getattr(self, f"{name}_ns") for name in PARTS}


class Histogram:
    """Counts durations in bins that grow by a constant factor, for percentiles with an error below 5 %."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total_ns = 0.0

    def add(self, ns: float) -> None:
        self.total_ns += ns
        place = int(PER_DECADE * math.log10(max(1.0, ns / FIRST_NS)))
        self.counts[min(place, PER_DECADE * DECADES)] += 1

    def percentile_ms(self, share: float) -> float | None:
        """The duration that a `share` (0..1) of all durations does not exceed; None without durations."""
        places = sorted(self.counts)
        if not places:
            return None
        sums = np.cumsum([self.counts[place] for place in places])
        place = places[int(np.searchsorted(sums, share * sums[-1]))]
        return float(FIRST_NS * 10 ** ((place + 0.5) / PER_DECADE) / 1e6)

    def up_to(self, seconds: float) -> int:
        """The number of durations up to `seconds`, with the accuracy of a bin."""
        last = PER_DECADE * math.log10(seconds * 1e9 / FIRST_NS)
        return sum(count for place, count in self.counts.items() if place < last)

    def update(self, other: Histogram) -> None:
        self.counts.update(other.counts)
        self.total_ns += other.total_ns

    def as_dict(self) -> dict[str, float | None]:
        """P50, P95 and P99 in milliseconds."""
        found = {f"p{round(100 * share)}": self.percentile_ms(share) for share in (0.5, 0.95, 0.99)}
        return {name: None if value is None else round(value, 3) for name, value in found.items()}


class Tally:
    """The counts of a worker since its start. The worker sends them to the trainer once a second. It can be pickled."""

    def __init__(self) -> None:
        self.decisions, self.games = Histogram(), Histogram()
        self.lost: Counter[str] = Counter()
        self.lost_steps: Counter[str] = Counter()
        self.steps = 0  # sum of the steps of all games that ended
        self.restarts: Counter[str] = Counter()
        self.daemons: list[dict[str, Any]] = []  # one dict per daemon; shares are fractions of the dict's `seconds`

    def daemons_since(self, before: Tally) -> list[dict[str, Any]]:
        """`daemons`, with `seconds` and shares for the time since the earlier tally `before`."""
        then, found = {one["daemon"]: one for one in before.daemons}, []
        for one in self.daemons:
            old = then.get(one["daemon"], {"seconds": 0.0, "busy_share": 0.0, "cpu_share": 0.0})
            spent_s = {name: one[name] * one["seconds"] - old[name] * old["seconds"] for name in SHARES}
            passed_s = one["seconds"] - old["seconds"] or 1.0
            found.append({**one, "seconds": passed_s, **{name: max(0.0, s) / passed_s for name, s in spent_s.items()}})
        return found


def merged(tallies: Iterable[Tally]) -> Tally:
    whole = Tally()
    for one in tallies:
        whole.decisions.update(one.decisions)
        whole.games.update(one.games)
        for name in ("lost", "lost_steps", "restarts"):
            getattr(whole, name).update(getattr(one, name))
        whole.steps += one.steps
        whole.daemons += one.daemons
    return whole


def summary(tally: Tally, times: GameTimes, wall_s: float) -> dict[str, Any]:
    """The part of perf.json about the engines. `times` were collected in `wall_s` seconds."""
    made = max(1, times.decisions + times.forced)
    each = {f"{name}_ms": round(ns / made / 1e6, 4) for name, ns in times.parts_ns.items()}
    busy = [one["busy_share"] for one in tally.daemons]
    ended = sum(tally.games.counts.values())
    found = {
        "unit": "milliseconds per decision",
        **each,
        "decisions": times.decisions,
        "forced": times.forced,
        "refused": times.refused,
        "decisions_per_s": round(times.decisions / wall_s, 3) if wall_s else None,
        "games": times.games,
        "games_per_s": round(times.games / wall_s, 4) if wall_s else None,
        "decision_ms": tally.decisions.as_dict(),
        "game_ms": tally.games.as_dict(),
        "mean_decisions": round(tally.steps / ended, 2) if ended else None,
        "busy_share": round(sum(busy) / len(busy), 4) if busy else None,
        "lost_games": {
            cause: {"games": count, "mean_decisions": round(tally.lost_steps[cause] / count, 2)}
            for cause, count in sorted(tally.lost.items())
        },
        "restarts": dict(sorted(tally.restarts.items())),
        "memory_mb": round(sum(one["memory_mb"] for one in tally.daemons), 1),
        "daemons": tally.daemons,
    }
    lost, length = _lost(found)
    often = lost > LOST_SHARE * (lost + times.games)
    return {**found, "warning": BIASED if lost and (often or length > (found["mean_decisions"] or 0.0)) else ""}


def _lost(found: Mapping[str, Any]) -> tuple[int, float]:
    """The number of lost games, and their mean length."""
    causes = found["lost_games"].values()
    lost = sum(one["games"] for one in causes)
    return lost, sum(one["games"] * one["mean_decisions"] for one in causes) / max(1, lost)


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"engines: {len(found['daemons'])}, busy {100 * (found['busy_share'] or 0.0):.0f} %, "
        f"{found['memory_mb']:,.0f} MB; {found['games']:,} games ({rate_text(found['games_per_s'] or 0.0)}/s), "
        f"{found['decisions']:,} decisions "
        f"({rate_text(found['decisions_per_s'] or 0.0)}/s)"
    ]
    took = {"a decision": found["decision_ms"], "a game": found["game_ms"]}
    parts = {what: [f"{rate_text(ms)} ms ({name.upper()})" for name, ms in each.items()]
             for what, each in took.items() if each["p50"] is not None}  # fmt: skip
    lines += ["; ".join(f"{what} took {', '.join(each)}" for what, each in parts.items())] if parts else []
    lost, length = _lost(found)
    if lost:
        causes = ", ".join(f"{cause} {one['games']:,}" for cause, one in found["lost_games"].items())
        finished = f"; finished ones have {found['mean_decisions']:g}" if found["mean_decisions"] else ""
        lines.append(f"{lost:,} games were lost after {length:.3g} decisions in the mean ({causes}){finished}")
    return [*lines, *([found["warning"]] if found["warning"] else [])]


def figures(found: Mapping[str, Any], tally: Tally) -> Iterator[tuple[Any, ...]]:
    """The fields of a `vec.external.Figure` for each metric in `tally` and in `found`, the result of `summary`."""
    yield ("counter", "decisions", "Decisions of the policy in games with engines.", found["decisions"])
    yield ("counter", "games", "Games that ended by their rules or limits.", found["games"])
    lost = {cause: one["games"] for cause, one in found["lost_games"].items()}
    yield ("counter", "lost_games", "Games that a fault ended.", lost, "cause")
    for name in ("forced", "refused"):
        yield ("counter", f"decisions_{name}", f"Decisions {name}.", found[name])
    made = found["decisions"] + found["forced"]
    parts = {name: made * found[f"{name}_ms"] / 1000 for name in PARTS}
    yield ("counter", "game_seconds", "What the time of all running games was spent on.", parts, "part")
    yield ("counter", "daemon_restarts", "Engines started again.", found["restarts"], "cause")
    for share in SHARES:
        each = {str(one["daemon"]): one[share] for one in found["daemons"]}
        yield ("gauge", f"daemon_{share}", "Share of the time, 0 to 1 per core.", each, "daemon")
    memory = {str(one["daemon"]): one["memory_mb"] * 2**20 for one in found["daemons"]}
    yield ("gauge", "daemon_memory_bytes", "Resident memory of an engine.", memory, "daemon")
    texts = {"decision": "Time of a decision of an engine.", "game": "Time of a game."}
    for name, times in (("decision", tally.decisions), ("game", tally.games)):
        up_to = {str(float(edge)): times.up_to(edge) for edge in BUCKETS_S[name]}
        value = (up_to, sum(times.counts.values()), times.total_ns / 1e9)
        yield ("histogram", f"{name}_duration_seconds", texts[name], value)


def advice(found: Mapping[str, Any], games: int, daemons: int, cores: int) -> tuple[str, list[str]]:
    """The bottleneck of games with engines, by Little's law, and overrides to try.

    Args:
        found: the result of `summary`.
        games: number of running games.
    """
    parts = {name: found[f"{name}_ms"] for name in PARTS}
    cycle = sum(parts.values()) or 1.0
    at_most = games * 1000 / (cycle - parts["queue"]) if cycle > parts["queue"] else math.inf
    law = (
        f"{games} games ÷ {rate_text(cycle)} ms a decision = {1000 * games / cycle:,.0f} decisions/s; with a policy "
        f"that takes no time it would be {at_most:,.0f}"
    )
    computing = sum(one["cpu_share"] for one in found["daemons"])
    if parts["queue"] > 0.5 * cycle:
        return f"{law}. Decisions wait for the policy longer than for the engines: speed up policy or update", []
    if parts["idle"] > 0.5 * cycle:
        return f"{law}. Games mostly wait for engines to restart: the logs of the daemons say why", []
    if computing > 0.8 * cores:
        return f"{law}. The engines compute on {computing:.1f} of {cores} cores: only a cheaper engine would help", []
    per_daemon = math.ceil(games / max(1, daemons))
    if (found["busy_share"] or 0.0) > 0.9 and computing > 0.8 * daemons:
        more = min(2 * daemons, max(daemons + 1, cores))
        tried = [f"daemons.count={more}", "daemons.games_per_daemon=auto"]
        return f"{law}. Each daemon computes all the time: more daemons would help", tried
    return (
        f"{law}. The engines mostly wait: more games per daemon would help",
        [f"num_envs={2 * games}", f"daemons.count={daemons}", f"daemons.games_per_daemon={2 * per_daemon}"],
    )
