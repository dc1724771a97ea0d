"""Settings that are no more: what does their work now, told wherever one is given; and how a plan.json, or what was
typed for a run or a study, that has them is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "horizon_minutes": "minutes",
}
CLASS_PATHS = {  # of modules that were moved: as stored and typed, and as they are now
    "fasttrain.games.": "fasttrain_games.",
    "fasttrain.daemons.": "fasttrain_engines.",
    "fasttrain.envs.pettingzoo": "fasttrain.integrations.pettingzoo",
}
GAMES = {  # which game a run had, by the class that it stored
    "fasttrain_games.skullking.game:SkullKingGame": "skullking",
    "fasttrain_games.skirmish.game:SkirmishGame": "skirmish",
    "fasttrain_engines.go:Go": "go",
    "fasttrain_engines.showdown:Showdown": "showdown",
    "fasttrain.integrations.pettingzoo:Seat": "fasttrain.integrations.pettingzoo:GAME",
}
OF_GAMES = ("env.native_game", "env.own", "env.opponent_key", "env.eval_opponent", "env.reward_debug_key")
DECLARED = "a GameSpec declares it, which env.game names, as NAME or module:GAME"
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
    **dict.fromkeys(OF_GAMES, DECLARED),
    "env.eval_opponent": f"{DECLARED}; eval.env_kwargs.KEY=… plays evaluations against another opponent",
    "env.name": "env.id or env.entry_point names folders and tables; leave it out",
    "daemons.profile": f"take daemons.jvm_flags=[{RECORDING}]",
    "daemons.log_mb": CONSTANT,
    "daemons.max_wait_ms": "the game's class says it, as wait_ms",
    "metrics.port": "take loggers=[csv, stdout, {logger: prometheus, port: 9100}]",
    "metrics.host": "take loggers=[csv, stdout, {logger: prometheus, port: 9100, host: …}]",
    "study": "take run=FOLDER",
    "profile_name": "the profile is called measured or tuned; rename its file",
    "gate.min_speed_up": CONSTANT,
    "ablate.flags": "take candidates='{ablate: [num_envs, vec_env]}'",
    "tune.min_update_ratio": "no trial updates less often than the profile does; leave it out",
    "tune.sampler": "settings are drawn at random, the best go on; leave it out",
    "doctor.seconds": CONSTANT,
    "profiler": "py-spy record -o profile.svg -- fasttrain …, or python -m cProfile -m fasttrain …, profiles a run",
}
LEARNED_WITH = (
    "overlap",
    "algo.chunk_steps",
    "algo.burn_in",
    "env.native_game",
    "env.own",
)  # what a run's weights came by
OFF = ("null", "false", "off", "no", "0", "{}")
TYPED = {key: f"{place}=…" for key, place in MOVED.items()} | {  # how those are typed now that cells may have
    "checkpoint_every_minutes": "checkpoint_every=…min", "guard.at_limit": "nan_guard=…",
    "ablate.flags": "candidates='{ablate: …}'",
}  # fmt: skip
GROUPS = {"guard": "guard.at_limit", "metrics": "metrics.port", "ablate": "ablate.flags"}  # of which nothing is left


def instead_of(key: str) -> str:
    """The sentence that refuses a setting that is no more, or a group of such; empty for every other key."""
    key = next((one for one in REMOVED if key.startswith(f"{one}.")), key)
    told = REMOVED.get(GROUPS.get(key, key))
    return f"{key} is no setting any more: {told}" if told else ""


def former_key(values: Mapping[str, Any]) -> str:
    """The first in `values` that is no setting any more, whatever its value; empty where there is none."""
    return next((key for key in (*REMOVED, *GROUPS) if lookup(values, key, ...) is not ...), "")


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run stored, by the settings of today."""
    found = dict(values)
    if (guarded := found.get("nan_guard")) in (True, False):
        found["nan_guard"] = (lookup(found, "guard.at_limit") or "stop") if guarded else "off"
    if (minutes := found.get("checkpoint_every_minutes")) and not found.get("checkpoint_every"):
        found["checkpoint_every"] = f"{minutes:.15g}min"
    if port := lookup(found, "metrics.port"):
        logs = {"csv": "train_log_to_file", "stdout": "train_log_to_console"} if found.get("train_log_enabled") else {}
        usual = [name for name, flag in logs.items() if found.get(flag)]
        loggers = usual if found.get("loggers") is None else found["loggers"]
        host = lookup(found, "metrics.host") or "127.0.0.1"
        found["loggers"] = [*loggers, {"logger": "prometheus", "port": port, "host": host}]
    if lookup(found, "daemons.profile") == "jfr":
        put(found, "daemons.jvm_flags", [*(lookup(found, "daemons.jvm_flags") or ()), RECORDING.strip("'")])
    _by_its_game(found)
    for key in REMOVED:
        if key in LEARNED_WITH and lookup(found, key) not in (None, False, "off", 0, {}):
            continue  # it cannot go on as it began: refused by name
        value = taken(found, key)
        if key in MOVED and value is not None:
            put(found, MOVED[key], value)
    return {key: value for key, value in found.items() if key not in GROUPS}


def _by_its_game(values: dict[str, Any]) -> None:
    """`env.game` in place of what it declares, for what a run stored before there was one; classes where they are."""
    for key in ("env.native_game", "env.entry_point"):
        if isinstance(path := lookup(values, key), str):
            put(values, key, today(path))
    own, paths = lookup(values, "env.own"), [lookup(values, key) for key in ("env.native_game", "env.entry_point")]
    game = next((GAMES[path] for path in paths if path in GAMES), None)
    if game is None and own and str(lookup(values, "env.id")).startswith("ALE/"):
        game = "atari"
    key, opponent = lookup(values, "env.opponent_key"), lookup(values, "env.eval_opponent")
    if game is None or not (own or paths[0] or key):  # of today's, or of somebody's own
        return
    put(values, "env.game", game)
    if opponent and lookup(values, f"env.kwargs.{key}") == "self" and not lookup(values, f"eval.env_kwargs.{key}"):
        put(values, f"eval.env_kwargs.{key}", opponent)
    for key in OF_GAMES:
        taken(values, key)


def today(path: str) -> str:
    """A class's path, `module:Class`, as it is since its module was moved."""
    return next((path.replace(old, new, 1) for old, new in CLASS_PATHS.items() if path.startswith(old)), path)


def formerly(path: str) -> list[str]:
    """A class's path as it is, and as it was before its module was moved."""
    return [path, *(path.replace(new, old, 1) for old, new in CLASS_PATHS.items() if path.startswith(new))]


def rows_without_removed(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The flags of a plan.json by the settings of today; `config`: what it stored besides."""
    stored = {name: {row["flag"]: row.get(name) for row in rows} for name in ("requested", "effective")}
    today = {name: without_removed({**config, **values}) for name, values in stored.items()}
    return [
        {**row, **{name: values[row["flag"]] for name, values in today.items() if name in row}}
        for row in rows
        if row["flag"] not in REMOVED
    ]


def texts_without_removed(typed: Sequence[str]) -> list[str]:
    """What was typed for a run or a study, by the settings of today; what no cell has any more is left out."""
    given = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in typed)}
    off = given.get("nan_guard", "").lower() in OFF
    left = {"guard.at_limit" if off else "nan_guard"} if "guard.at_limit" in given else set()
    left |= {"checkpoint_every_minutes"} if given.get("checkpoint_every", "0") != "0" else set()
    found = []
    for text in typed:
        key, _, value = text.lstrip("+").partition("=")
        if key in TYPED and key not in left and value != "null":
            found.append(TYPED[key].replace("…", value))
        elif key not in (*REMOVED, *GROUPS, *left) or (key in LEARNED_WITH and value.lower() not in OFF):
            found.append(text.replace(value, today(value)) if key == "env.entry_point" else text)
    return found


def lookup(values: object, key: str, missing: object = None) -> Any:
    """What stands under a dotted key of mappings, or of a configuration; `missing` where there is nothing."""
    for word in key.split("."):
        values = values.get(word, missing) if isinstance(values, Mapping) else getattr(values, word, missing)
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
