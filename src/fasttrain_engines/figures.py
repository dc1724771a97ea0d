"""What Prometheus is told of games with engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fasttrain.vec.external import Figure
from fasttrain_engines.stats import PARTS, SHARES, Tally

BUCKETS_S = {
    "decision": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    "game": (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600),
}


def figures(found: Mapping[str, Any], tally: Tally) -> Iterator[Figure]:
    """Of `stats.summary`, and of what was counted."""
    yield Figure("counter", "decisions", "Decisions of the policy in games with engines.", found["decisions"])
    yield Figure("counter", "games", "Games that ended by their rules or limits.", found["games"])
    lost = {cause: one["games"] for cause, one in found["lost_games"].items()}
    yield Figure("counter", "lost_games", "Games that a fault ended.", lost, "cause")
    for name in ("forced", "refused"):
        yield Figure("counter", f"decisions_{name}", f"Decisions {name}.", found[name])
    made = found["decisions"] + found["forced"]
    parts = {name: made * found[f"{name}_ms"] / 1000 for name in PARTS}
    yield Figure("counter", "game_seconds", "Where the time of all games in flight went.", parts, "part")
    yield Figure("counter", "daemon_restarts", "Engines started again.", found["restarts"], "cause")
    for share in SHARES:
        each = {str(one["daemon"]): one[share] for one in found["daemons"]}
        yield Figure("gauge", f"daemon_{share}", "Of the time, 0 to 1 per core.", each, "daemon")
    memory = {str(one["daemon"]): one["memory_mb"] * 2**20 for one in found["daemons"]}
    yield Figure("gauge", "daemon_memory_bytes", "Resident memory of an engine.", memory, "daemon")
    texts = {"decision": "Time of a decision of an engine.", "game": "Time of a game."}
    for name, times in (("decision", tally.decisions), ("game", tally.games)):
        up_to = {str(float(edge)): times.up_to(edge) for edge in BUCKETS_S[name]}
        value = (up_to, sum(times.counts.values()), times.total_ns / 1e9)
        yield Figure("histogram", f"{name}_duration_seconds", texts[name], value)
