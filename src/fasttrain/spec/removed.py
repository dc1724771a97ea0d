"""Removed settings: what to use in their place. Moved modules: their present paths."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {  # former key → new key of a setting
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
CLASS_PATHS = {  # former path → present path, in settings and imports; the first match is used
    "fasttrain.games.batch": "fasttrain.native.batch",
    "fasttrain.games.stream": "fasttrain.native.batch",
    "fasttrain.games": "fasttrain_games",
    "fasttrain.daemons": "fasttrain_engines",
    "fasttrain.vec.games": "fasttrain_engines.vec_env",
    "fasttrain.engines": "fasttrain.algos",
    "fasttrain.vec.envpool": "fasttrain_integrations.envpool",
    "fasttrain.envs.pettingzoo": "fasttrain_integrations.pettingzoo",
    "fasttrain.envs:fasttrain/": "fasttrain/",  # in env.id=MODULE:ID
    "fasttrain.deploy.video": "fasttrain.runs.video",
    "fasttrain.studies.warm": "fasttrain.runs.warm",
    **{f"fasttrain.{name}": f"fasttrain_{name}" for name in ("deploy", "integrations", "kernels", "report", "studies")},
    **{f"fasttrain.{name}": f"fasttrain_kernels.{name}" for name in ("jit", "kernel_cache", "threads")},
    **{
        f"fasttrain.vec.{name}": f"fasttrain_vec.{name}"
        for name in ("crew", "process", "replacing", "worker", "worker_envs", "worker_memory", "worker_start")
    },
}
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
GROUPS = {"guard": "guard.at_limit", "metrics": "metrics.port", "ablate": "ablate.flags"}  # group → setting in it


def removal_message(key: str) -> str:
    """The message about a removed setting or group; empty for any other key."""
    key = next((removed for removed in REMOVED if key.startswith(f"{removed}.")), key)
    advice = REMOVED.get(GROUPS.get(key, key))
    return f"{key} is no setting any more: {advice}" if advice else ""


def present_path(path: str) -> str:
    """The present path of a class `module:Class`. Its module may have been moved."""
    return next((new + path[len(old) :] for old, new in CLASS_PATHS.items() if _lies_in(path, old)), path)


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
