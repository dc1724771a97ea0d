"""Settings that are no more: what does their work now, told wherever one is given; and how a plan.json, or what was
typed for a run or a study, that has them is read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
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
CLASS_PATHS = {  # modules that were moved, as stored, typed and imported, and where they are now; the first one holds
    "fasttrain.games.batch": "fasttrain.native.batch",
    "fasttrain.games.stream": "fasttrain.native.batch",
    "fasttrain.games": "fasttrain_games",
    "fasttrain.daemons": "fasttrain_engines",
    "fasttrain.vec.games": "fasttrain_engines.vec_env",
    "fasttrain.vec.envpool": "fasttrain.integrations.envpool",
    "fasttrain.envs.pettingzoo": "fasttrain.integrations.pettingzoo",
    "fasttrain.envs:fasttrain/": "fasttrain/",  # an id, with the module that registered it
}
GAMES = {  # which game a run had, by the class or the id that it stored
    "fasttrain/SkullKing-v0": "skullking",
    "fasttrain/Skirmish-v0": "skirmish",
    "fasttrain_games.skullking.game:SkullKingGame": "skullking",
    "fasttrain_games.skirmish.game:SkirmishGame": "skirmish",
    "fasttrain_engines.go:Go": "go",
    "fasttrain_engines.showdown:Showdown": "showdown",
    "fasttrain.integrations.pettingzoo:Seat": "fasttrain.integrations.pettingzoo:GAME",
}
PLACES = ("env.native_game", "env.entry_point", "env.id")
OF_GAMES = {  # and how a game declares them
    "env.native_game": 'native="my_game:Batch"',
    "env.own": 'own={"num_envs": 16}',
    "env.opponent_key": 'opponent_key="opponents"',
    "env.eval_opponent": 'eval_opponent="random"',
    "env.reward_debug_key": 'reward_debug_key="debug"',
}
DECLARED = (
    'a GameSpec declares it: write GAME = fasttrain.native.GameSpec(env="my_game:MyEnv", {}) in my_game.py, and take '
    "env.game=my_game:GAME (docs/guides/native_games.md)"
)
RECORDING = "'-XX:StartFlightRecording:filename={folder}/{index}.jfr,dumponexit=true'"
CONSTANT = "what it is by default holds always; remove it"
REMOVED = {  # what does their work now
    **{key: f"use {place}=…" for key, place in MOVED.items()},
    "engine_switch_at": "kernels work once they are compiled; deterministic=true waits for them; remove it",
    "checkpoint_every_minutes": "use checkpoint_every=5min",
    "guard.at_limit": "use nan_guard=stop or nan_guard=rollback",
    "local_random_actions": "random actions of all envs are one draw, which gives the numbers of stock; remove it",
    "inference_batch_size": "acting takes all envs in one forward; remove it",
    "overlap": "an update ends before the next rollout begins; fused_update=auto makes it short on a CPU; remove it",
    "algo.chunk_steps": "minibatches of batch_size transitions are cut off the rollout as in sb3-contrib; remove it",
    "algo.burn_in": "sequences begin with the states stored in the rollout, as in sb3-contrib; remove it",
    **{key: DECLARED.format(told) for key, told in OF_GAMES.items()},
    "env.eval_opponent": f"{DECLARED.format(OF_GAMES['env.eval_opponent'])}; or use eval.env_kwargs.KEY=…",
    "env.name": "env.id or env.entry_point names folders and tables; remove it",
    "daemons.profile": f"use daemons.jvm_flags=[{RECORDING}]",
    "daemons.log_mb": CONSTANT,
    "daemons.max_wait_ms": "the game's class says it, as wait_ms",
    "daemons.skip_forced": "the game's class says it, as skip_forced",
    "daemons.env": "use daemons.command=[env, NAME=VALUE, program, …]",
    "daemons.build": "run the command before fasttrain",
    "metrics.port": "use loggers=[csv, stdout, {logger: prometheus, port: 9100}]",
    "metrics.host": "use loggers=[csv, stdout, {logger: prometheus, port: 9100, host: …}]",
    "study": "use run=FOLDER",
    "profile_name": "the profile is called measured or tuned; rename its file",
    "gate.min_speed_up": CONSTANT,
    "ablate.flags": "use candidates='{ablate: [num_envs, vec_env]}'",
    "tune.min_update_ratio": "no trial updates less often than the profile does; remove it",
    "tune.sampler": "settings are drawn at random, the best go on; remove it",
    "doctor.seconds": CONSTANT,
    "doctor.tries": "the best suggestion is tried; Ctrl-C ends doctor and keeps what was measured; remove it",
    "eval.max_steps": "an evaluation cuts episodes at 27,000 steps, or env.max_episode_steps if larger; remove it",
    "video.episodes": "a video shows one episode; fasttrain play output=… play.episodes=… films more; remove it",
    "profiler": "py-spy record -o profile.svg -- fasttrain …, or python -m cProfile -m fasttrain …, profiles a run",
}
# What a run's weights came by; self-play of an env of the user's among them, for which somebody must decide.
LEARNED_WITH = (
    "overlap", "algo.chunk_steps", "algo.burn_in", "env.native_game", "env.opponent_key", "daemons.skip_forced",
)  # fmt: skip
# What a cell that is yet to run would lack. A run has the values of its env.own; reward_debug only tells more.
NEEDED = (*LEARNED_WITH, "env.own", "env.eval_opponent")
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
    """The stored values of a run, by the settings of today."""
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
    if isinstance(variables := lookup(found, "daemons.env"), Mapping) and variables:
        command = [f"{name}={value}" for name, value in variables.items()]
        put(found, "daemons.command", ["env", *command, *(lookup(found, "daemons.command") or ())])
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
    for key in PLACES:
        if isinstance(path := lookup(values, key), str):
            put(values, key, today(path))
    own, (native, *others) = lookup(values, "env.own"), [lookup(values, key) for key in PLACES]
    games = [GAMES[place] for place in (native, *others) if isinstance(place, str) and place in GAMES]
    if not games and own and str(lookup(values, "env.id")).startswith("ALE/"):
        games = ["atari"]
    key, opponent = lookup(values, "env.opponent_key"), lookup(values, "env.eval_opponent")
    if not games or not (own or native or key) or native not in (None, *GAMES):  # of today's, or of somebody's own
        chosen = lookup(values, f"env.kwargs.{key}")
        if not (chosen == "self" or (isinstance(chosen, (Mapping, list, tuple)) and "self" in chosen)):
            taken(values, "env.opponent_key")  # the env's kwargs say who plays
        return
    put(values, "env.game", games[0])
    if opponent and lookup(values, f"env.kwargs.{key}") == "self" and not lookup(values, f"eval.env_kwargs.{key}"):
        put(values, f"eval.env_kwargs.{key}", opponent)
    for key in OF_GAMES:
        taken(values, key)


def today(path: str) -> str:
    """A class's path, `module:Class`, as it is since its module was moved."""
    return next((new + path[len(old) :] for old, new in CLASS_PATHS.items() if _lies_in(path, old)), path)


def formerly(path: str) -> list[str]:
    """A class's path as it is, and as it was before its module was moved."""
    return [path, *(old + path[len(new) :] for old, new in CLASS_PATHS.items() if _lies_in(path, new))]


def _lies_in(path: str, module: str) -> bool:
    return path.startswith(module) and (module.endswith("/") or path[len(module) : len(module) + 1] in ".:")


class FormerModules:
    """Finds modules of before where they are now, for Python's import: pickles name them, and scripts import them."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Part of Python's import protocol: this finder, first in `sys.meta_path`, finds former names."""
        return ModuleSpec(name, cls) if name.startswith("fasttrain.") and today(name) != name else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """None: Python makes a module, which `exec_module` replaces."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Import the module by its present name, under its former name too, and say so once."""
        name = module.__name__
        sys.modules[name] = import_module(today(name))
        if name in CLASS_PATHS:
            from fasttrain import terminal  # seldom needed, and `import fasttrain` stays quick

            terminal.tell(f"fasttrain: the module {name} is {today(name)} now")


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
        elif key not in (*REMOVED, *GROUPS, *left) or (key in NEEDED and value.lower() not in OFF):
            found.append(text.replace(value, today(value)) if key in PLACES else text)
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
