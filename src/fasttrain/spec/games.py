"""What a game declares of itself, and how it is found: by the name that a package offers, or as module:NAME."""

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

DEFAULT = "skullking"  # of `env=`, as conf/config.yaml has it


@dataclass(frozen=True, kw_only=True, slots=True)
class GameSpec:
    """What a game declares, so that `env=NAME` trains it and nothing of this need be typed.

    A package offers it under NAME among its entry points of the group `fasttrain.games`; without a package it is named
    as `env.game=module:GAME`. Its module is imported to read the configuration: keep it light, and name classes as
    texts. Observation and action space are those of `env`, and `native` must have the same.

    Args:
        env: str | None. One game as a Gymnasium environment, "module:Class"; None: the configuration names an id.
        id: str | None. The Gymnasium id by which `env` is made, "my_games/TicTacToe-v0"; registered where it is used.
        native: str | None. "module:Class" of N games stepped at once, made with (num_envs, **env.kwargs): see
            `fasttrain.native.NativeGame`.
        own: Mapping[str, Any]. Values that hold where nobody chose others, by tier and algorithm:
            {"total_timesteps": 3_000_000, "num_envs": {"speed": 256}, "ppo": {"speed": {"batch_size": 1024}}}.
        opponent_key: str | None. The entry of env.kwargs that names the opponents: opponent=… sets it.
        eval_opponent: str | None. A fixed opponent, by which quality is measured in self-play.
        result: Mapping[str, Any]. Which entries of an episode's last info tell how it ended: keys of `env.result`.
        reward_debug_key: str | None. The entry of env.kwargs that makes the env tell its reward term by term.
        conf: Path | None. A folder of YAML files, among them env/NAME.yaml with `game: NAME` and its kwargs; None: the
            game is played with its constructor's own values.
    """

    env: str | None = None
    id: str | None = None
    native: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    opponent_key: str | None = None
    eval_opponent: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    reward_debug_key: str | None = None
    conf: Path | None = None


NO_GAME = GameSpec()


def game_of(name: str | None) -> GameSpec:
    """What `env.game` names. Raises ConfigError: nothing, something else, it cannot be imported, or it is the default
    one and not installed."""
    if name is None:
        return NO_GAME
    if name == DEFAULT and name not in plugins.names(plugins.GAMES):
        raise ConfigError(
            f"env={DEFAULT}, the default: no package that offers this game is installed{plugins.outdated()}; "
            "use another environment, as in fasttrain algo=ppo env.id=CartPole-v1"
        )
    found = _of_module(name) if ":" in name else plugins.load(plugins.GAMES, name)
    if not isinstance(found, GameSpec):
        raise ConfigError(f"env.game={name}: expected a fasttrain.native.GameSpec, it is {found!r:.80}")
    return found


def _of_module(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        fasttrain.put_behind_python(folder)
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.game={name} cannot be loaded: {type(error).__name__}: {error}") from error


def maker_of(env_id: str) -> str | None:
    """What makes a Gymnasium id, by the game of an installed package that has it."""
    for name in plugins.names(plugins.GAMES):
        with suppress(ConfigError):  # of another game than the one that is asked for
            if (found := game_of(name)).id == env_id and found.env:
                return found.env
    return None


def attached(chosen: Iterable[str], everything: bool = False) -> dict[str, GameSpec]:
    """Games of installed packages by name: those `chosen` for `env=`; or all that can be loaded, because files of the
    user's may build upon any. Raises ConfigError: a chosen one cannot be loaded."""
    known = plugins.names(plugins.GAMES)
    found = {name: game_of(name) for name in sorted({*chosen} & {*known})}
    for name in known if everything else ():
        with suppress(ConfigError):
            found.setdefault(name, game_of(name))
    return found
