"""GameSpec, the declaration of a game, and how a game is found: by an entry point's name or as module:NAME."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import fasttrain
from fasttrain.errors import ConfigError
from fasttrain.spec import plugins

DEFAULT = "skullking"  # the default of `env=` in conf/config.yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class GameSpec:
    """The declaration of a game, so that `env=NAME` trains it without further settings.

    A package offers it as the entry point NAME of the group `fasttrain.games`. Without a package, use
    `env.game=module:GAME`. The module is imported whenever a configuration is read, so it should import little and name
    classes as text. `native` must have the same observation and action space as `env`.

    Args:
        env: str | None. "module:Class" of the Gymnasium environment. None: `env.id` in the game's YAML file names it.
        id: str | None. The Gymnasium id of `env`, "my_games/TicTacToe-v0". It is registered when it is used.
        native: str | None. "module:Class" of a `fasttrain.native.NativeGame`. It is called with
            (num_envs, **env.kwargs).
        own: Mapping[str, Any]. Defaults of the game for settings that the user does not set. A value may depend on the
            profile and the algorithm:
            {"total_timesteps": 3_000_000, "num_envs": {"speed": 256}, "ppo": {"speed": {"batch_size": 1024}}}.
        opponent_key: str | None. The entry of env.kwargs that names the opponents; opponent=… sets it.
        eval_opponent: str | None. A fixed opponent for evaluations in self-play.
        result: Mapping[str, Any]. Entries of an episode's last info that say how it ended: keys of `env.result`.
        reward_debug_key: str | None. The entry of env.kwargs that makes the env report the terms of its reward.
        phases: Mapping[str, int | None]. Phase → the column of the observation that is 1 in this phase; None: all
            decisions outside of the other phases. `policies` can name these phases.
        conf: Path | None. A folder of YAML files with env/NAME.yaml, which has `game: NAME` and its kwargs; None: the
            game is made with the defaults of its constructor.
    """

    env: str | None = None
    id: str | None = None
    native: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    opponent_key: str | None = None
    eval_opponent: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    reward_debug_key: str | None = None
    phases: Mapping[str, int | None] = field(default_factory=dict)
    conf: Path | None = None


NO_GAME = GameSpec()


def game_of(name: str | None) -> GameSpec:
    """The GameSpec that `env.game` names.

    Raises ConfigError: the object does not exist, is no GameSpec, or its module cannot be imported.
    """
    if name is None:
        return NO_GAME
    if name == DEFAULT and name not in plugins.names(plugins.GAMES):
        hint = plugins.outdated_metadata_hint()
        raise ConfigError(
            f"env={DEFAULT}, the default: no package that offers this game is installed{hint}; use another "
            "environment, as in fasttrain algo=ppo env.id=CartPole-v1"
        )
    game = _from_module(name) if ":" in name else plugins.load(plugins.GAMES, name)
    if not isinstance(game, GameSpec):
        raise ConfigError(f"env.game={name}: expected a fasttrain.native.GameSpec, it is {game!r:.80}")
    return game


def _from_module(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        fasttrain.put_behind_python(folder)
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.game={name} cannot be loaded: {type(error).__name__}: {error}") from error


def maker_of(env_id: str) -> str | None:
    """The class for a Gymnasium id, if a game of an installed package declares this id; else None."""
    for name in plugins.names(plugins.GAMES):
        with suppress(ConfigError):  # because another game may be broken
            if (game := game_of(name)).id == env_id and game.env:
                return game.env
    return None


def games_by_name(chosen: Iterable[str], everything: bool = False) -> dict[str, GameSpec]:
    """The installed games among `chosen`. `everything`: also all other games that can be loaded.

    Raises ConfigError: a chosen game cannot be loaded.
    """
    known = plugins.names(plugins.GAMES)
    games = {name: game_of(name) for name in sorted({*chosen} & {*known})}
    for name in known if everything else ():
        with suppress(ConfigError):
            games.setdefault(name, game_of(name))
    return games
