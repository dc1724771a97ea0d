"""Settings that are no more: what does their work now, told wherever one is given; and how a plan.json that has them
is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {  # to where a stored value belongs too
    "env.win_key": "env.result.win",
    "env.win_value": "env.result.win_value",
    "env.score_keys": "env.result.scores",
    "env.end_key": "env.result.end",
    "daemons.start_timeout_s": "daemons.timeouts_s.start",
    "daemons.request_timeout_s": "daemons.timeouts_s.request",
    "daemons.game_timeout_s": "daemons.timeouts_s.game",
    "daemons.recycle_games": "daemons.recycle.games",
    "daemons.recycle_mb": "daemons.recycle.mb",
    "daemons.games_per_connection": "daemons.recycle.connection_games",
}
RECORDING = "'-XX:StartFlightRecording:filename={folder}/{index}.jfr,dumponexit=true'"
CONSTANT = "what it is by default holds always; leave it out"
REMOVED = {  # what does their work now
    **{key: f"take {place}=…" for key, place in MOVED.items()},
    "engine_switch_at": "kernels work once they are compiled; deterministic=true waits for them; leave it out",
    "checkpoint_every_minutes": "take checkpoint_every=5min",
    "guard.at_limit": "take nan_guard=stop or nan_guard=rollback",
    "inference_batch_size": "acting takes all envs in one forward; leave it out",
    "overlap": "an update ends before the next rollout begins; fused_update=auto makes it short on a CPU; leave it out",
    "algo.chunk_steps": "minibatches of batch_size transitions are cut off the rollout as in sb3-contrib; leave it out",
    "algo.burn_in": "sequences begin with the states stored in the rollout, as in sb3-contrib; leave it out",
    "env.name": "env.id or env.entry_point names folders and tables; leave it out",
    "daemons.profile": f"take daemons.jvm_flags=[{RECORDING}]",
    "daemons.log_mb": CONSTANT,
    "daemons.max_wait_ms": "the game's class says it, as wait_ms",
    "metrics.port": "take loggers=[csv, stdout, {logger: prometheus, port: 9100}]",
    "metrics.host": "take loggers=[csv, stdout, {logger: prometheus, port: 9100, host: …}]",
    "horizon_minutes": "take minutes=…",
    "study": "take run=FOLDER",
    "profile_name": "the profile is called measured or tuned; rename its file",
    "gate.min_speed_up": CONSTANT,
    "ablate.flags": "take candidates='{ablate: [num_envs, vec_env]}'",
    "tune.min_update_ratio": "no trial updates less often than the profile does; leave it out",
    "tune.sampler": "settings are drawn at random, the best go on; leave it out",
    "doctor.seconds": CONSTANT,
    "profiler": "py-spy record -o profile.svg -- fasttrain …, or python -m cProfile -m fasttrain …, profiles a run",
}
LEARNED_WITH = ("overlap", "algo.chunk_steps", "algo.burn_in")  # what a run's weights came by
GROUPS = {"guard": "guard.at_limit", "metrics": "metrics.port", "ablate": "ablate.flags"}  # of which nothing is left


def instead_of(key: str) -> str:
    """The sentence that refuses a setting that is no more, or a group of such; empty for every other key."""
    told = REMOVED.get(GROUPS.get(key, key))
    return f"{key} is no setting any more: {told}" if told else ""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run stored, by the settings of today."""
    found = dict(values)
    if (guarded := found.get("nan_guard")) in (True, False):
        found["nan_guard"] = (value_at(found, "guard.at_limit") or "stop") if guarded else "off"
    if (minutes := found.get("checkpoint_every_minutes")) and not found.get("checkpoint_every"):
        found["checkpoint_every"] = f"{minutes:g}min"
    for key in REMOVED:
        if key in LEARNED_WITH and value_at(found, key) not in (None, False, "off", 0):
            continue  # it cannot go on as it began: refused by name
        value = taken(found, key)
        if key in MOVED and value is not None:
            put(found, MOVED[key], value)
    return {key: value for key, value in found.items() if key not in GROUPS}


def value_at(values: object, key: str) -> Any:
    """What stands under a dotted key; None where there is nothing."""
    for word in key.split("."):
        values = values.get(word) if isinstance(values, Mapping) else None
    return values


def taken(values: dict[str, Any], key: str) -> Any:
    """What stands under a dotted key, which `values` no longer has then; None where there is nothing."""
    word, _, rest = key.partition(".")
    if not rest:
        return values.pop(word, None)
    if not isinstance(values.get(word), Mapping):
        return None
    values[word] = dict(values[word])  # the caller's stays as it is
    return taken(values[word], rest)


def put(values: dict[str, Any], key: str, value: object) -> None:
    """`value` under a dotted key, in place of what is there; mappings on the way are copies."""
    word, _, rest = key.partition(".")
    if rest:
        there = values.get(word)
        values[word] = dict(there) if isinstance(there, Mapping) else {}
        put(values[word], rest, value)
    else:
        values[word] = value
