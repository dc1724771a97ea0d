"""Settings of external engines, in a module that imports little, because worker processes load it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import setting

if TYPE_CHECKING:
    from fasttrain.spec.config import Config

ROWS_PER_WORKER = 128  # games for one worker process; with more, another worker is faster if cores are free


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Deadlines of engines in seconds. After a missed deadline the connection is not used again."""

    start: float = setting(60.0, "Seconds from the start of a process to its first answer.", least=0.1)
    request: float = setting(30.0, "Seconds for each answer. A later one counts as none.", least=0.01)
    game: float = setting(3600.0, "Seconds of the engine's time for a whole game.", least=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recycle:
    """Limits at which an engine's process or connection is replaced by a new one; null: never."""

    games: int | None = setting(None, "Games after which a process is replaced.", least=1)
    mb: float | None = setting(None, "Megabytes of memory above which a process is replaced.", least=1)
    connection_games: int | None = setting(None, "Games after which a new connection is made.", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonsConfig:
    """Settings of `env.backend=daemons`: the processes of the engines, and the games that they play."""

    command: tuple[int | float | str, ...] = setting(
        (),
        "The engine's program: [java, Engine, --port, '{port}']. {port}: a TCP port. {socket}: a unix "
        "socket. Neither: its stdin and stdout. {threads}, {index} and {folder} are replaced too.",
    )
    cwd: str | None = setting(None, "Working directory of the engines.")
    count: int | Literal["auto"] = setting("auto", "Number of engine processes. auto starts one per core.", least=1)
    games_per_daemon: int | Literal["auto"] = setting(
        "auto", "Games that one process plays at once. auto divides num_envs among the processes.", least=1
    )
    ports: int | str = setting("20000-29999", "Range of TCP ports. Used ones are skipped.")
    timeouts_s: Timeouts = setting(Timeouts(), "deadlines: {start: 60, request: 30, game: 3600}")
    recycle: Recycle = setting(
        Recycle(), "when a process (games, mb) or a connection (connection_games) is replaced: {games: 200, mb: 1024}"
    )
    max_failures: int | Literal["auto"] = setting(
        "auto",
        "Failed games in a row that end the run. auto: 100, or four for each game at once.",
        least=1,
    )
    jvm_flags: tuple[str, ...] = setting(
        (), "Flags of the Java VM. +daemons=small_jvm has some for a machine that several engines share."
    )


def shared_out(settings: DaemonsConfig, num_envs: int, cores: int) -> tuple[int, int]:
    """The number of daemons, and the number of games that each daemon plays at once."""
    count, per_daemon = settings.count, settings.games_per_daemon
    if isinstance(count, int):
        daemons = min(count, num_envs)
    else:
        daemons = min(num_envs, cores) if per_daemon == "auto" else math.ceil(num_envs / per_daemon)
    return daemons, per_daemon if isinstance(per_daemon, int) else math.ceil(num_envs / daemons)


def workers_for(settings: DaemonsConfig, num_envs: int, cores: int) -> int:
    """The number of worker processes that play the games; each serves hundreds of games."""
    daemons, _ = shared_out(settings, num_envs, cores)
    return max(1, min(daemons, cores // 4, math.ceil(num_envs / ROWS_PER_WORKER)))


def check_daemons(settings: DaemonsConfig, config: Config) -> None:
    """Raises ConfigError if the settings of engines contradict each other or those of the run."""
    env = config.env
    if env.entry_point is None or not settings.command:
        missing = "daemons.command=[my_engine,--port,'{port}']" if env.entry_point else "env.entry_point=my_game:MyGame"
        raise ConfigError(f"env.backend=daemons needs {missing}: the class that speaks to the engine, and its command")
    ports = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(settings.ports))
    first, last = (int(ports[1]), int(ports[2] or ports[1])) if ports else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise ConfigError(f"daemons.ports={settings.ports}: expected two ports from 1024 to 65535, as in 20000-29999")
    count, per_daemon, words = settings.count, settings.games_per_daemon, " ".join(map(str, settings.command))
    if isinstance(count, int) and isinstance(per_daemon, int) and count * per_daemon < config.num_envs:
        raise ConfigError(
            f"daemons.count={count} with daemons.games_per_daemon={per_daemon}: {count * per_daemon} places for "
            f"num_envs={config.num_envs} games; leave one of them auto"
        )
    needed = shared_out(settings, config.num_envs, 1 << 16)[0]
    beside = (
        settings.recycle.games is not None or settings.recycle.mb is not None
    )  # one more port, because a successor starts before its predecessor ends
    if "{port}" in words and last - first + 1 < (count if isinstance(count, int) else min(needed, 2)) + beside:
        also = " and one more for recycling" if beside else ""
        raise ConfigError(f"daemons.ports={settings.ports} has too few ports: give one for each daemon{also}")
    if "{port}" not in words and "{socket}" not in words and per_daemon != 1:
        raise ConfigError(
            "daemons.command names neither {port} nor {socket}, so that its pipes are the only connection: use "
            "daemons.games_per_daemon=1"
        )
    java = re.fullmatch(r"(.*/)?java", str(settings.command[0])) is not None
    if settings.jvm_flags and not java:
        raise ConfigError("daemons.jvm_flags is for a command that begins with java; remove it")
