"""From plain values to the typed configuration, once; nothing below sees YAML. And what can be asked of one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from fasttrain import terminal
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, TIERS, instead, own_values
from fasttrain.spec.backends import SINGLE, VECTOR, backend_of, lends_games
from fasttrain.spec.checks import BATCHED, check
from fasttrain.spec.config import ALGO_CLASSES, SELF, Config, EnvConfig
from fasttrain.spec.curriculum import CurriculumConfig
from fasttrain.spec.games import DEFAULT
from fasttrain.spec.removed import former_key, instead_of, lookup, put, today
from fasttrain.spec.setting import Named, build, named, settings_of


def from_mapping(values: Mapping[str, Any]) -> Config:
    """The typed and checked configuration. Raises ConfigError: unknown key, wrong type, out of range, or fields that
    contradict each other."""
    values = dict(values)
    if removed := former_key(values):
        raise ConfigError(instead_of(removed))
    algo = values.get("algo")
    if not isinstance(algo, Mapping):
        raise ConfigError(f"algo: choose one of {', '.join(ALGORITHMS)}")
    if "name" not in algo:
        raise ConfigError(
            f"algo: its file names no algorithm; write name: ppo in it, or one of {', '.join(ALGORITHMS)}"
        )
    spec = ALGORITHMS.get(str(algo["name"]), ALGORITHMS["ppo"])  # of an unknown one `build` says so
    for key in algo:
        if why := foreign_key(f"algo.{key}", str(algo["name"])):
            raise ConfigError(why)
    values["env"] = env = _build_env(values.get("env"))
    tier = str(values.get("tier"))
    own = own_values(env.spec.own, spec, tier if tier in TIERS else TIERS[0])  # of an unknown one `build` says so
    own_names = {"learning_rate", "n_epochs", "rollout_size"} & {*spec.keys()}
    algo = {**algo, **{name: getattr(own, name) for name in own_names if algo.get(name) is None}}  # nobody chose others
    values["algo"] = build(ALGO_CLASSES[spec.name], algo, "algo.")
    evaluation = values.get("eval")
    if isinstance(evaluation, Mapping) and evaluation.get("episodes") is None:
        values["eval"] = {**evaluation, "episodes": own.eval_episodes}
    if values.get("total_timesteps") is None:
        values["total_timesteps"] = own.total_timesteps
    config = build(Config, values, known=all_keys())
    config = config if config.opponent is None else against(config, config.opponent)
    check(config)
    return config


def against(config: Config, opponent: Named) -> Config:
    """The same with these opponents in the env; for a class of the user's somebody outside decides, as in self-play.
    Raises ConfigError: the env names no opponents."""
    key = config.env.spec.opponent_key
    if key is None:
        raise ConfigError(
            f"opponent={opponent} with {config.env.option}: this env has no opponents that fasttrain knows of; name "
            "the entry of env.kwargs that chooses them in a GameSpec (env.game=module:GAME), or remove opponent"
        )
    name = named(opponent, "opponent", "opponent")[0]
    env = replace(config.env, kwargs={**config.env.kwargs, key: SELF if ":" in name else name})
    return replace(config, env=env, opponent=opponent)


def env_kwargs(config: Config) -> dict[str, Any]:
    """What the env is made with: `env.kwargs`, and what flags add to them."""
    key = config.env.spec.reward_debug_key
    return {**config.env.kwargs, key: True} if config.reward_debug and key else config.env.kwargs


def plays_itself(config: Config) -> bool:
    """Whether somebody outside decides for opponents: snapshots of the learner, or a class of the user's."""
    key = config.env.spec.opponent_key
    chosen = config.env.kwargs.get(key) if key else None
    return chosen == SELF or (isinstance(chosen, (Mapping, list, tuple)) and SELF in chosen)


def lends_env(config: Config) -> bool:
    """Whether evaluations play the training's one env: perhaps no second one can live on this machine."""
    alone = config.num_envs == 1 and config.env.backend == SINGLE and config.vec_env not in BATCHED
    return alone and not (plays_itself(config) or config.eval.env_kwargs) and config.eval.num_envs in (None, 1)


def lends_engines(config: Config) -> bool:
    """Whether the last evaluation may play on in the training's own games with engines, which are ended."""
    other = plays_itself(config) or config.eval.env_kwargs or config.eval.num_envs not in (None, config.num_envs)
    return lends_games(config) and not other


def guests_of(config: Config) -> int:
    """Games that evaluations play with the training's engines, beside the training's games."""
    asked = config.eval.episodes and (config.eval_every or not lends_engines(config))
    return evaluation_envs(config) if asked and lends_games(config) else 0


def evaluation_envs(config: Config) -> int:
    if config.env.backend == VECTOR or lends_env(config):
        return config.num_envs  # a VectorEnv may take multiples of its agents alone
    usual = 64 if config.vec_env in BATCHED else 8  # these cost next to nothing
    count = min(config.eval.episodes, config.eval.num_envs or usual)
    return min(count, config.num_envs) if lends_games(config) else count


def no_second_env(config: Config) -> str:
    """To be added where an env could not be opened beside the training's one."""
    return "; perhaps no second env can be open beside the training's one" if lends_env(config) else ""


def tells_games(config: Config) -> bool:
    """Whether a Monitor among the wrappers tells of whole games, where wrappers around it end episodes with a life."""
    return any(
        named(wrapper, "wrapper", "env.wrappers")[0].endswith("monitor:Monitor") for wrapper in config.env.wrappers
    )


def uses_masks(config: Config) -> bool:
    """Whether the algorithm looks at action masks."""
    masks = config.algo.spec.masks
    return masks == "must" or (masks == "may" and config.engine == "fast" and config.algo.use_masking)


def memory_inputs(config: Config) -> tuple[str, ...]:
    """What each env shows beside its observation: `action`, `reward`."""
    return getattr(config.algo, "memory_inputs", ())


def against_bots(config: Config) -> Config:
    """For what is no training (checkup, evaluation): in self-play the opponents are the game's `eval_opponent`."""
    if not plays_itself(config):
        return config
    if (fixed := config.env.spec.eval_opponent) is None:
        raise ConfigError("opponent=self: the GameSpec names no eval_opponent, a fixed one that measures quality")
    return against(config, fixed)


def evaluated(config: Config) -> Config:
    """As quality is measured: with `eval.env_kwargs` over `env.kwargs`, against fixed opponents, without tasks."""
    kwargs = {**config.env.kwargs, **config.eval.env_kwargs}
    whole = replace(config, env=replace(config.env, kwargs=kwargs), curriculum=CurriculumConfig())
    return against_bots(whole)


def with_typed(config: Config, given: Config, typed: Iterable[str]) -> Config:
    """The configuration of a run with what was typed to evaluate it otherwise: keys below `eval` and `env.kwargs`, and
    `opponent`; `given` has the values. Raises ConfigError: the opponent is none of the game's own."""
    more, asked = dict(config.eval.env_kwargs), dict[str, Any]()
    for key in typed:
        group, _, name = key.partition(".")
        if key == "opponent" and given.opponent is not None:
            if given.opponent == SELF or ":" in str(given.opponent):
                raise ConfigError(f"opponent={given.opponent}: decides in training; here take one of the game's own")
            config = against(config, given.opponent)
            more[str(config.env.spec.opponent_key)] = str(given.opponent)
        elif key.startswith(("env.kwargs.", "eval.env_kwargs.")):
            below, of = key.split("kwargs.", 1)[1], given.eval.env_kwargs if group == "eval" else given.env.kwargs
            top = below.partition(".")[0]
            there = {top: more.get(top, config.env.kwargs.get(top))}
            put(there, below, lookup(of, below))
            more |= there
        elif key == "eval.env_kwargs":
            more |= given.eval.env_kwargs
        elif group == "eval":
            asked[name] = getattr(given.eval, name)
    return replace(config, eval=replace(config.eval, **{**asked, "env_kwargs": more}))


def _build_env(env: Any) -> EnvConfig:
    if not isinstance(env, Mapping):
        raise ConfigError(f"env: choose a game, as in env={DEFAULT}, or name an env by env.id or env.entry_point")
    for key in ("entry_point", "id"):
        if isinstance(path := env.get(key), str) and (now := today(path)) != path:
            _tell_of_the_move(f"env.{key}={path}", now)
            env = {**env, key: now}
    config = _of_game(build(EnvConfig, env, "env."))
    if (config.id is None) == (config.entry_point is None):
        state = "both are set" if config.id else "neither is set"
        raise ConfigError(f"env.id and env.entry_point: {state}; give exactly one, env.id=CartPole-v1 say")
    backend = backend_of(config)
    return config if backend is None else backend.adapted(config)


@functools.cache  # a command reads its configuration more than once
def _tell_of_the_move(typed: str, now: str) -> None:
    terminal.tell(f"fasttrain: {typed} is {now} now")


def _of_game(env: EnvConfig) -> EnvConfig:
    """With what the game declares: which env it is, and how its episodes tell how they ended."""
    spec, given = env.spec, env.id or env.entry_point
    if (played := spec.id or spec.env) and given not in (None, played):
        raise ConfigError(f"env.game={env.game} is played as {played}; remove env.id={given}, or use env=gym too")
    place = {"id": spec.id} if spec.id else {"entry_point": spec.env} if spec.env else {}
    own = {name: value for name, value in spec.result.items() if getattr(env.result, name) in (None, ())}
    return replace(env, **place, result=replace(env.result, **own)) if place or own else env  # type: ignore[arg-type]


def all_keys() -> list[str]:
    """Every key a user can set, dotted, of every algorithm: what "did you mean" chooses from."""
    below = (f"algo.{key}" for cls in ALGO_CLASSES.values() for key, _ in settings_of(cls))
    groups = (one.name for one in fields(Config))
    return sorted({*groups, *(key for key, _ in settings_of(Config, parts=True)), *below, "profile", "tuned"})


def foreign_key(key: str, algo: str) -> str:
    """The sentence that refuses another algorithm's key below `algo.`, or one of SB3's; empty for every other key."""
    if told := instead(key):
        return told
    owners = [name for name, cls in ALGO_CLASSES.items() if key in {f"algo.{field.name}" for field in fields(cls)}]
    if not owners or algo in owners or algo not in ALGO_CLASSES:
        return ""
    return f"{key} has no effect with algo={algo} (only for {', '.join(owners)}); remove it"
