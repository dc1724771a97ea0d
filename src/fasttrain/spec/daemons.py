"""Settings of external engines and of what watches them; apart, so that the processes of engines load nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import setting

ROWS_PER_WORKER = 128  # games above which another process that plays them pays, where there are cores for it


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonsConfig:
    """Engines of `env.backend=daemons`: their processes, and the games with them."""

    command: tuple[int | float | str, ...] = setting(
        (), "[java, Engine, --port, '{port}']; {socket}: a unix socket; neither: its pipes; also {threads}, {index}"
    )
    build: tuple[int | float | str, ...] = setting((), "a command run once before, [javac, Engine.java]")
    env: dict[str, Any] = setting({}, "environment of the engines, besides the trainer's")
    cwd: str | None = setting(None, "the folder they run in")
    count: int | Literal["auto"] = setting("auto", "processes; auto: one per core", least=1)
    games_per_daemon: int | Literal["auto"] = setting(
        "auto", "at once; auto: num_envs shared out, less if it takes less", least=1
    )
    games_per_connection: int | None = setting(None, "games after which a new connection is made", least=1)
    ports: int | str = setting("20000-29999", "from which free ones are taken")
    start_timeout_s: float = setting(60.0, "from the start of a process to its first answer", least=0.1)
    request_timeout_s: float = setting(30.0, "of each request: later answers count as none", least=0.01)
    game_timeout_s: float = setting(3600.0, "of the engine, for a whole game", least=0.1)
    recycle_games: int | None = setting(None, "games after which a process is replaced", least=1)
    recycle_mb: float | None = setting(None, "memory above which a process is replaced", least=1)
    max_failures: int | Literal["auto"] = setting(
        "auto",
        "games in a row that failed, after which the run ends; auto: 100, or four for each game at once",
        least=1,
    )
    jvm_flags: tuple[str, ...] = setting((), "put before a Java engine's own; +daemons=small_jvm has some")
    profile: Literal["off", "jfr"] = setting("off", "jfr: Java's Flight Recorder, in the run's folder")
    log_mb: float = setting(16.0, "of each process, after which its log is rotated", least=0.01)
    skip_forced: bool = setting(False, "decisions with one legal action never reach the policy")
    max_wait_ms: float = setting(
        0.0, "how long more ready games are waited for, while daemons have two each to play", least=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """For Prometheus: pip install fasttrain[metrics]."""

    port: int | None = setting(None, "where the run's figures can be read; null: nowhere", least=1, most=65535)
    host: str = setting("127.0.0.1", "who may read them: this machine alone")


NO_DAEMONS, NO_METRICS = DaemonsConfig(), MetricsConfig()


def shared_out(settings: DaemonsConfig, num_envs: int, cores: int) -> tuple[int, int]:
    """How many daemons, and how many games each plays at once."""
    count, per_daemon = settings.count, settings.games_per_daemon
    if isinstance(count, int):
        daemons = min(count, num_envs)
    else:
        daemons = min(num_envs, cores) if per_daemon == "auto" else math.ceil(num_envs / per_daemon)
    return daemons, per_daemon if isinstance(per_daemon, int) else math.ceil(num_envs / daemons)


def workers_for(settings: DaemonsConfig, num_envs: int, cores: int) -> int:
    """Processes that play: each serves hundreds of games."""
    daemons, _ = shared_out(settings, num_envs, cores)
    return max(1, min(daemons, cores // 4, math.ceil(num_envs / ROWS_PER_WORKER)))


def check_daemons(config: Any) -> None:
    """Rules about engines, and that nothing is said of them where there are none.

    Raises:
        ConfigError: names the key and a way out.
    """
    settings, env = config.daemons, config.env
    if env.backend != "daemons":
        said = [one.name for one in fields(settings) if getattr(settings, one.name) != getattr(NO_DAEMONS, one.name)]
        if said:
            raise ConfigError(f"daemons.{said[0]} is for games with external engines: take env.backend=daemons")
        return
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
    beside = settings.recycle_games is not None or settings.recycle_mb is not None  # a successor starts beside it
    if "{port}" in words and last - first + 1 < (count if isinstance(count, int) else min(needed, 2)) + beside:
        also = " and the one more that recycling needs" if beside else ""
        raise ConfigError(f"daemons.ports={settings.ports} are fewer than the daemons{also}: take more")
    if "{port}" not in words and "{socket}" not in words and per_daemon != 1:
        raise ConfigError(
            "daemons.command names neither {port} nor {socket}, so that its pipes are the only connection: take "
            "daemons.games_per_daemon=1"
        )
    java = re.fullmatch(r"(.*/)?java", str(settings.command[0])) is not None
    for key, asked in {"jvm_flags": settings.jvm_flags, "profile=jfr": settings.profile == "jfr"}.items():
        if asked and not java:
            raise ConfigError(f"daemons.{key} is for a command that begins with java; leave it out")
