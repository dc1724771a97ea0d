"""Removed settings: what to use in their place, and how stored runs and studies with such settings are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {  # former key → new key of a setting; stored values are moved too
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
CLASS_PATHS = {  # former path → present path, in stored runs, settings and imports; the first match is used
    "fasttrain.games.batch": "fasttrain.native.batch",
    "fasttrain.games.stream": "fasttrain.native.batch",
    "fasttrain.games": "fasttrain_games",
    "fasttrain.daemons": "fasttrain_engines",
    "fasttrain.vec.games": "fasttrain_engines.vec_env",
    "fasttrain.vec.envpool": "fasttrain.integrations.envpool",
    "fasttrain.envs.pettingzoo": "fasttrain.integrations.pettingzoo",
    "fasttrain.envs:fasttrain/": "fasttrain/",  # in env.id=MODULE:ID
    **{
        f"fasttrain.vec.{name}": f"fasttrain_vec.{name}"
        for name in ("crew", "process", "replacing", "worker", "worker_envs", "worker_memory", "worker_start")
    },
}
GAMES = {  # class or id in a stored run → its game
    "fasttrain/SkullKing-v0": "skullking",
    "fasttrain/Skirmish-v0": "skirmish",
    "fasttrain_games.skullking.game:SkullKingGame": "skullking",
    "fasttrain_games.skirmish.game:SkirmishGame": "skirmish",
    "fasttrain_engines.go:Go": "go",
    "fasttrain_engines.showdown:Showdown": "showdown",
    "fasttrain.integrations.pettingzoo:Seat": "fasttrain.integrations.pettingzoo:GAME",
}
PLACES = ("env.native_game", "env.entry_point", "env.id")
OF_GAMES = {  # removed settings that a GameSpec declares now → an example
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
CONSTANT = "its default is always used; remove it"
REMOVED = {  # removed setting → what to use now
    **{key: f"use {place}=…" for key, place in MOVED.items()},
    "engine_switch_at": "kernels are used once they are compiled; deterministic=true waits for them; remove it",
    "checkpoint_every_minutes": "use checkpoint_every=5min",
    "guard.at_limit": "use nan_guard=stop or nan_guard=rollback",
    "local_random_actions": "random actions of all envs are always drawn at once, with stock's numbers; remove it",
    "inference_batch_size": "one forward pass always serves all envs; remove it",
    "overlap": "use schedule=continuous, which lets envs step during updates",
    "algo.chunk_steps": "rollouts are split into minibatches of batch_size transitions as in sb3-contrib; remove it",
    "algo.burn_in": "sequences begin with the states stored in the rollout, as in sb3-contrib; remove it",
    **{key: DECLARED.format(example) for key, example in OF_GAMES.items()},
    "env.eval_opponent": f"{DECLARED.format(OF_GAMES['env.eval_opponent'])}; or use eval.env_kwargs.KEY=…",
    "env.name": "folders and tables are named after env.id or env.entry_point; remove it",
    "daemons.profile": f"use daemons.jvm_flags=[{RECORDING}]",
    "daemons.log_mb": CONSTANT,
    "daemons.max_wait_ms": "set wait_ms in the game's class",
    "daemons.skip_forced": "set skip_forced in the game's class",
    "daemons.env": "use daemons.command=[env, NAME=VALUE, program, …]",
    "daemons.build": "run the command before fasttrain",
    "metrics.port": "use loggers=[csv, stdout, {logger: prometheus, port: 9100}]",
    "metrics.host": "use loggers=[csv, stdout, {logger: prometheus, port: 9100, host: …}]",
    "study": "use run=FOLDER",
    "profile_name": "the profile is called measured or tuned; rename its file",
    "gate.min_speed_up": CONSTANT,
    "ablate.flags": "use candidates='{ablate: [num_envs, vec_env]}'",
    "tune.min_update_ratio": "with steps_per_s no trial makes fewer updates than the profile; remove it",
    "tune.sampler": "Optuna's TPE draws the settings; remove it",
    "doctor.seconds": CONSTANT,
    "doctor.tries": "the best suggestion is tried; Ctrl-C ends doctor and keeps what was measured; remove it",
    "video.episodes": "a video shows one episode; fasttrain play output=… play.episodes=… films more; remove it",
    "profiler": "use py-spy record -o profile.svg -- fasttrain …, or python -m cProfile -m fasttrain …",
}
# Settings that changed what a run learned. A run that used one of them cannot be continued.
LEARNED_WITH = (
    "overlap", "algo.chunk_steps", "algo.burn_in", "env.native_game", "env.opponent_key", "daemons.skip_forced",
)  # fmt: skip
# A study for which one of these was typed cannot repeat its trainings. (A single run has stored the values of env.own.)
NEEDED = (*LEARNED_WITH, "env.own", "env.eval_opponent")
OFF = ("null", "false", "off", "no", "0", "{}")
TYPED = {key: f"{place}=…" for key, place in MOVED.items()} | {  # removed setting → its present form
    "checkpoint_every_minutes": "checkpoint_every=…min", "guard.at_limit": "nan_guard=…",
    "ablate.flags": "candidates='{ablate: …}'",
}  # fmt: skip
GROUPS = {"guard": "guard.at_limit", "metrics": "metrics.port", "ablate": "ablate.flags"}  # group → setting in it


def removal_message(key: str) -> str:
    """The message about a removed setting or group; empty for any other key."""
    key = next((removed for removed in REMOVED if key.startswith(f"{removed}.")), key)
    advice = REMOVED.get(GROUPS.get(key, key))
    return f"{key} is no setting any more: {advice}" if advice else ""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The stored values of a run in the form of the present settings."""
    result = dict(values)
    if (guarded := result.get("nan_guard")) in (True, False):
        result["nan_guard"] = (lookup(result, "guard.at_limit") or "stop") if guarded else "off"
    if (minutes := result.get("checkpoint_every_minutes")) and not result.get("checkpoint_every"):
        result["checkpoint_every"] = f"{minutes:.15g}min"
    if port := lookup(result, "metrics.port"):
        logs = {"csv": "train_log_to_file", "stdout": "train_log_to_console"} if result.get("train_log_enabled") else {}
        usual = [name for name, flag in logs.items() if result.get(flag)]
        loggers = usual if result.get("loggers") is None else result["loggers"]
        host = lookup(result, "metrics.host") or "127.0.0.1"
        result["loggers"] = [*loggers, {"logger": "prometheus", "port": port, "host": host}]
    if lookup(result, "daemons.profile") == "jfr":
        set_key(result, "daemons.jvm_flags", [*(lookup(result, "daemons.jvm_flags") or ()), RECORDING.strip("'")])
    if isinstance(variables := lookup(result, "daemons.env"), Mapping) and variables:
        command = [f"{name}={value}" for name, value in variables.items()]
        set_key(result, "daemons.command", ["env", *command, *(lookup(result, "daemons.command") or ())])
    _name_the_game(result)
    for key in REMOVED:
        if key in LEARNED_WITH and lookup(result, key) not in (None, False, "off", 0, {}):
            continue  # keep this setting, so that `resume` can refuse it by name
        value = pop_key(result, key)
        if key in MOVED and value is not None:
            set_key(result, MOVED[key], value)
    return {key: value for key, value in result.items() if key not in GROUPS}


def _name_the_game(values: dict[str, Any]) -> None:
    """Set `env.game` for a run that was stored without it, remove what the game declares, and update class paths."""
    for key in PLACES:
        if isinstance(path := lookup(values, key), str):
            set_key(values, key, present_path(path))
    own, (native, *others) = lookup(values, "env.own"), [lookup(values, key) for key in PLACES]
    games = [GAMES[place] for place in (native, *others) if isinstance(place, str) and place in GAMES]
    if not games and own and str(lookup(values, "env.id")).startswith("ALE/"):
        games = ["atari"]
    key, opponent = lookup(values, "env.opponent_key"), lookup(values, "env.eval_opponent")
    if not games or not (own or native or key) or native not in (None, *GAMES):  # a newer run, or a user's game
        opponents = lookup(values, f"env.kwargs.{key}")
        if not (opponents == "self" or (isinstance(opponents, (Mapping, list, tuple)) and "self" in opponents)):
            pop_key(values, "env.opponent_key")  # no effect without self-play: env.kwargs choose the opponents
        return
    set_key(values, "env.game", games[0])
    if opponent and lookup(values, f"env.kwargs.{key}") == "self" and not lookup(values, f"eval.env_kwargs.{key}"):
        set_key(values, f"eval.env_kwargs.{key}", opponent)
    for key in OF_GAMES:
        pop_key(values, key)


def present_path(path: str) -> str:
    """The present path of a class `module:Class`. Its module may have been moved."""
    return next((new + path[len(old) :] for old, new in CLASS_PATHS.items() if _lies_in(path, old)), path)


def former_paths(path: str) -> list[str]:
    """The present path of a class, and its former paths."""
    return [path, *(old + path[len(new) :] for old, new in CLASS_PATHS.items() if _lies_in(path, new))]


def _lies_in(path: str, module: str) -> bool:
    return path.startswith(module) and (module.endswith("/") or path[len(module) : len(module) + 1] in ".:")


class FormerModules:
    """A finder for Python's import system that finds moved modules by their former names, for pickles and scripts."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Called by Python's import system."""
        return ModuleSpec(name, cls) if name.startswith("fasttrain.") and present_path(name) != name else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let Python create the module. `exec_module` replaces it."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Import the module by its present name, register it under the former name too, and print this once."""
        name = module.__name__
        sys.modules[name] = import_module(present_path(name))
        if name in CLASS_PATHS:
            from fasttrain import terminal  # imported here so that `import fasttrain` is fast

            terminal.tell(f"fasttrain: the module {name} is now {present_path(name)}")


def rows_without_removed(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a stored plan in the form of the present settings. `config`: the stored configuration."""
    stored = {name: {row["flag"]: row.get(name) for row in rows} for name in ("requested", "effective")}
    present = {name: without_removed({**config, **values}) for name, values in stored.items()}
    return [
        {**row, **{name: values[row["flag"]] for name, values in present.items() if name in row}}
        for row in rows
        if row["flag"] not in REMOVED
    ]


def texts_without_removed(typed: Sequence[str]) -> list[str]:
    """Stored overrides of a run or a study in the form of the present settings, without those that have no effect."""
    by_key = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in typed)}
    off = by_key.get("nan_guard", "").lower() in OFF
    dropped = {"guard.at_limit" if off else "nan_guard"} if "guard.at_limit" in by_key else set()
    dropped |= {"checkpoint_every_minutes"} if by_key.get("checkpoint_every", "0") != "0" else set()
    result = []
    for text in typed:
        key, _, value = text.lstrip("+").partition("=")
        if key in TYPED and key not in dropped and value != "null":
            result.append(TYPED[key].replace("…", value))
        elif key not in (*REMOVED, *GROUPS, *dropped) or (key in NEEDED and value.lower() not in OFF):
            result.append(text.replace(value, present_path(value)) if key in PLACES else text)
    return result


def flat(node: object, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    return {k: v for key, part in node.items() for k, v in flat(part, f"{prefix}.{key}" if prefix else key).items()}


def lookup(values: object, key: str, missing: object = None) -> Any:
    """The value under a dotted key of nested mappings or of a configuration, or `missing`."""
    for word in key.split("."):
        values = values.get(word, missing) if isinstance(values, Mapping) else getattr(values, word, missing)
    return values


def pop_key(values: dict[str, Any], key: str) -> Any:
    """Remove and return the value under a dotted key of nested mappings; None if there is none."""
    word, _, rest = key.partition(".")
    if not rest:
        return values.pop(word, None)
    if not isinstance(values.get(word), Mapping):
        return None
    values[word] = dict(values[word])  # a copy, because the caller's mapping must not change
    return pop_key(values[word], rest)


def set_key(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value under a dotted key of nested mappings. Inner mappings are copied."""
    word, _, rest = key.partition(".")
    if rest:
        inner = values.get(word)
        values[word] = dict(inner) if isinstance(inner, Mapping) else {}
        set_key(values[word], rest, value)
    else:
        values[word] = value
