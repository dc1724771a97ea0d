"""Builds the typed configuration from plain values, and answers questions about a configuration."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from fasttrain import terminal
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, TIERS, argument_message, own_values
from fasttrain.spec.backends import SINGLE, VECTOR, backend_of, lends_games
from fasttrain.spec.checks import BATCHED, check
from fasttrain.spec.config import ALGO_CLASSES, SELF, Config, EnvConfig
from fasttrain.spec.curriculum import CurriculumConfig
from fasttrain.spec.games import DEFAULT
from fasttrain.spec.plugins import missing_text
from fasttrain.spec.policies import with_told
from fasttrain.spec.removed import REMOVED, flat, lookup, present_path, removal_message, set_key
from fasttrain.spec.setting import Named, UnknownKeyError, build, did_you_mean, named, settings_of


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Build and check the configuration.

    Raises ConfigError if a key is unknown, a value has the wrong type or range, or values contradict each other.
    """
    try:
        config = _typed(dict(values))
    except UnknownKeyError as error:
        removed = [key for key in flat(values) if key.startswith(f"{error.key}.") and key in REMOVED]
        raise ConfigError(key_message((*removed, error.key)[0], [str(lookup(values, "algo.name"))])) from error
    config = config if config.opponent is None else with_opponent(config, config.opponent)
    if config.policies:
        config = with_told(config)
        for key in ("goal_every", "reward_key", "memory") if is_self_play(config) else ():
            if any(key in own or (key == "memory" and config.algo.spec.recurrent) for own in config.policies.values()):
                raise ConfigError(f"policies with {key} need fixed opponents, not opponent=self; remove one of them")
    check(config)
    return config


def _typed(values: dict[str, Any]) -> Config:
    """Convert the values to the settings' types. Unset settings get the game's or the algorithm's own values."""
    algo = values.get("algo")
    if not isinstance(algo, Mapping):
        raise ConfigError(f"algo: choose one of {', '.join(ALGORITHMS)}")
    if "name" not in algo:
        raise ConfigError(f"algo: its YAML file has no key `name`; set it to one of {', '.join(ALGORITHMS)}")
    spec = ALGORITHMS.get(str(algo["name"]), ALGORITHMS["ppo"])  # `build` refuses an unknown name
    values["env"] = env = _build_env(values.get("env"))
    tier = str(values.get("tier"))
    own = own_values(env.spec.own, spec, tier if tier in TIERS else TIERS[0])  # `build` refuses an unknown tier
    own_names = {"learning_rate", "n_epochs", "rollout_size"} & {*spec.keys()}
    algo = {**algo, **{name: getattr(own, name) for name in own_names if algo.get(name) is None}}
    values["algo"] = build(ALGO_CLASSES[spec.name], algo, "algo.")
    evaluation = values.get("eval")
    if isinstance(evaluation, Mapping) and evaluation.get("episodes") is None:
        values["eval"] = {**evaluation, "episodes": own.eval_episodes}
    if values.get("total_timesteps") is None:
        values["total_timesteps"] = own.total_timesteps
    return build(Config, values)


def with_opponent(config: Config, opponent: Named) -> Config:
    """The configuration with this opponent in env.kwargs. If it is a user's class, env.kwargs get self-play instead.

    Raises ConfigError if fasttrain does not know how the env chooses opponents.
    """
    key = config.env.spec.opponent_key
    if key is None:
        raise ConfigError(
            f"opponent={opponent} with {config.env.option}: fasttrain knows no opponents of this env; name the entry "
            "of env.kwargs that chooses them in a GameSpec (env.game=module:GAME), or remove opponent"
        )
    name = named(opponent, "opponent", "opponent")[0]
    env = replace(config.env, kwargs={**config.env.kwargs, key: SELF if ":" in name else name})
    return replace(config, env=env, opponent=opponent)


def env_kwargs(config: Config) -> dict[str, Any]:
    """The arguments of the env's constructor: `env.kwargs`, plus the entry that `reward_debug` adds."""
    key = config.env.spec.reward_debug_key
    return {**config.env.kwargs, key: True} if config.reward_debug and key else config.env.kwargs


def is_self_play(config: Config) -> bool:
    """Whether the trainer chooses the opponents' actions, by snapshots of the learner or a class of the user's."""
    key = config.env.spec.opponent_key
    opponents = config.env.kwargs.get(key) if key else None
    return opponents == SELF or (isinstance(opponents, (Mapping, list, tuple)) and SELF in opponents)


def evaluates_in_training_env(config: Config) -> bool:
    """Whether evaluations use the training's only env, because a second env might not be possible."""
    alone = config.num_envs == 1 and config.env.backend == SINGLE and config.vec_env not in BATCHED
    return alone and not (is_self_play(config) or config.eval.env_kwargs) and config.eval.num_envs in (None, 1)


def evaluates_in_training_games(config: Config) -> bool:
    """Whether the final evaluation may use the training's own games with engines, because training is over."""
    other = is_self_play(config) or config.eval.env_kwargs or config.eval.num_envs not in (None, config.num_envs)
    return lends_games(config) and not other


def num_guests(config: Config) -> int:
    """Number of games that evaluations play with the training's engines, besides the training's games."""
    needed = config.eval.episodes and (config.eval_every or not evaluates_in_training_games(config))
    return evaluation_envs(config) if needed and lends_games(config) else 0


def evaluation_envs(config: Config) -> int:
    if config.env.backend == VECTOR or evaluates_in_training_env(config):
        return config.num_envs  # not fewer: a VectorEnv may need a multiple of its number of agents
    usual = 64 if config.vec_env in BATCHED else 8
    count = min(config.eval.episodes, config.eval.num_envs or usual)
    return min(count, config.num_envs) if lends_games(config) else count


def second_env_hint(config: Config) -> str:
    """A hint for messages about an env that could not be built."""
    return "; perhaps no second env can be open beside the training's env" if evaluates_in_training_env(config) else ""


def has_monitor_wrapper(config: Config) -> bool:
    """Whether the user's wrappers have a Monitor, which counts whole games even if an outer wrapper ends episodes."""
    return any(
        named(wrapper, "wrapper", "env.wrappers")[0].endswith("monitor:Monitor") for wrapper in config.env.wrappers
    )


def uses_masks(config: Config) -> bool:
    masks = config.algo.spec.masks
    return masks == "must" or (masks == "may" and config.engine == "fast" and config.algo.use_masking)


def memory_inputs(config: Config) -> tuple[str, ...]:
    """The memory inputs that are added to observations: `action`, `reward`."""
    return getattr(config.algo, "memory_inputs", ())


def with_fixed_opponent(config: Config) -> Config:
    """The configuration for a checkup or evaluation. In self-play the opponent is then the game's `eval_opponent`."""
    if not is_self_play(config):
        return config
    if (fixed := config.env.spec.eval_opponent) is None:
        raise ConfigError("opponent=self: evaluations need a fixed opponent; set eval_opponent in the GameSpec")
    return with_opponent(config, fixed)


def evaluation_config(config: Config) -> Config:
    """The configuration of evaluations: `eval.env_kwargs` win over `env.kwargs`, opponents are fixed, no tasks."""
    kwargs = {**config.env.kwargs, **config.eval.env_kwargs}
    whole = replace(config, env=replace(config.env, kwargs=kwargs), curriculum=CurriculumConfig())
    return with_fixed_opponent(whole)


def with_eval_settings(config: Config, given: Config, typed: Iterable[str]) -> Config:
    """The configuration of a stored run with other settings for its evaluation.

    Args:
        given: the configuration from which these settings are taken.
        typed: the keys to take from it: `opponent`, and those below `eval` and `env.kwargs`.

    Raises:
        ConfigError: the opponent is not one of the game's own.
    """
    kwargs, changes = dict(config.eval.env_kwargs), dict[str, Any]()
    for key in typed:
        group, _, name = key.partition(".")
        if key == "opponent" and given.opponent is not None:
            if given.opponent == SELF or ":" in str(given.opponent):
                raise ConfigError(f"opponent={given.opponent}: only for training; use one of the game's opponents")
            config = with_opponent(config, given.opponent)
            kwargs[str(config.env.spec.opponent_key)] = str(given.opponent)
        elif key.startswith(("env.kwargs.", "eval.env_kwargs.")):
            below, source = key.split("kwargs.", 1)[1], given.eval.env_kwargs if group == "eval" else given.env.kwargs
            top = below.partition(".")[0]
            entry = {top: kwargs.get(top, config.env.kwargs.get(top))}
            set_key(entry, below, lookup(source, below))
            kwargs |= entry
        elif key == "eval.env_kwargs":
            kwargs |= given.eval.env_kwargs
        elif group == "eval":
            changes[name] = getattr(given.eval, name)
    return replace(config, eval=replace(config.eval, **{**changes, "env_kwargs": kwargs}))


def _build_env(env: Any) -> EnvConfig:
    if not isinstance(env, Mapping):
        raise ConfigError(f"env: choose a game, as in env={DEFAULT}, or name an env by env.id or env.entry_point")
    for key in ("entry_point", "id", "game"):
        path = str(env.get(key))
        if path.startswith("fasttrain.") and (now := present_path(path)) != path:
            _tell_moved(f"env.{key}={path}", now)
            env = {**env, key: now}
    config = build(EnvConfig, env, "env.")
    for entry in config.wrappers:
        named(entry, "wrapper", "env.wrappers")
    if config.game is not None:
        config = _with_game(config)
    if (config.id is None) == (config.entry_point is None):
        state = "both are set" if config.id else "neither is set"
        raise ConfigError(f"env.id and env.entry_point: {state}; set exactly one, for example env.id=CartPole-v1")
    backend = backend_of(config)
    return config if backend is None else backend.adapted(config)


@functools.cache  # a command reads its configuration several times; print this once
def _tell_moved(typed: str, now: str) -> None:
    terminal.tell(f"fasttrain: {typed} is now {now}")


def _with_game(env: EnvConfig) -> EnvConfig:
    """Fill in what the game declares: its env and the entries of `result`."""
    spec, typed = env.spec, env.id or env.entry_point
    if (name := spec.id or spec.env) and typed not in (None, name):
        raise ConfigError(
            f"env.game={env.game} has the env {name}, not {typed}; remove env.id={typed}, or add env=gym (in a YAML "
            "file: `- override /env: gym` at the end of its defaults)"
        )
    place = {"id": spec.id} if spec.id else {"entry_point": spec.env} if spec.env else {}
    own = {name: value for name, value in spec.result.items() if getattr(env.result, name) in (None, ())}
    return replace(env, **place, result=replace(env.result, **own)) if place or own else env  # type: ignore[arg-type]


def all_keys() -> list[str]:
    """Every dotted key of every algorithm, for "did you mean"."""
    below = (f"algo.{key}" for cls in ALGO_CLASSES.values() for key, _ in settings_of(cls))
    groups = (one.name for one in fields(Config))
    return sorted({*groups, *(key for key, _ in settings_of(Config, parts=True)), *below, "profile", "tuned"})


def key_message(key: str, algorithms: Iterable[str]) -> str:
    """The message about a key that does not exist: it is another algorithm's or SB3's, was removed, or is a typo."""
    if message := argument_message(key):
        return message
    owners = [name for name, cls in ALGO_CLASSES.items() if key in {f"algo.{field.name}" for field in fields(cls)}]
    other = next((name for name in algorithms if name in ALGO_CLASSES and name not in owners), "")
    if owners and other:
        return f"{key} has no effect with algo={other} (only for {', '.join(owners)}); remove it"
    message = removal_message(key) or missing_text(key.partition(".")[0])
    group, dot, name = key.rpartition(".")
    near = did_you_mean(name, [one.removeprefix(group + dot) for one in all_keys() if one.startswith(group + dot)])
    hint = re.sub("'(.+?)'", rf"'{group}{dot}\1'", near) or did_you_mean(key, all_keys())
    return message or f"unknown key '{key}'{hint}"
