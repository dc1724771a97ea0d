"""The run's figures for Prometheus, at http://host:port/metrics: read when asked for, so that training pays nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from fasttrain.daemons.stats import PARTS
from fasttrain.errors import ConfigError
from fasttrain.runs.progress import Progress
from fasttrain.runs.times import engines_dict
from fasttrain.spec.daemons import MetricsConfig


def check_metrics(settings: MetricsConfig) -> None:
    """Before anything starts.

    Raises:
        ConfigError: the package is missing, or the port cannot be had.
    """
    if settings.port is None:
        return
    try:
        import_module("prometheus_client")
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.create_server((settings.host, settings.port), family=family).close()
    except ImportError as error:
        why = f"prometheus_client is not installed ({error}); pip install 'fasttrain[metrics]'"
        raise ConfigError(f"metrics.port={settings.port}: {why}") from error
    except OSError as error:
        why = f"nobody can listen on {settings.host}:{settings.port} ({error.strerror}); take another port"
        raise ConfigError(f"metrics.port={settings.port}: {why}") from error


@contextmanager
def served(settings: MetricsConfig, progress: Progress, env: VecEnv) -> Iterator[None]:
    """Inside, the figures can be read, if `settings` say where."""
    if settings.port is None:
        yield
        return
    prometheus: Any = import_module("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(Figures(progress, env))
    server, thread = prometheus.start_http_server(settings.port, settings.host, registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Figures:
    """What Prometheus calls a collector."""

    def __init__(self, progress: Progress, env: VecEnv) -> None:
        self._progress, self._env, self._began = progress, env, time.perf_counter()
        self._kinds: Any = import_module("prometheus_client.core")

    def collect(self) -> Iterator[Any]:
        """All figures as they are now; called from the server's threads."""
        progress = self._progress
        yield self._counter("env_steps", "Environment steps.", progress.env_steps)
        yield self._counter("updates", "Gradient updates.", progress.updates)
        yield self._gauge("steps_per_second", "Environment steps per second.", progress.steps_per_s)
        if (reward := progress.mean_return) is not None:
            yield self._gauge("episode_reward_mean", "Mean reward of the last episodes.", reward)
        wall_s = time.perf_counter() - self._began
        for engines in engines_dict(self._env, wall_s).values():
            yield from self._of(engines)

    def _of(self, found: dict[str, Any]) -> Iterator[Any]:
        yield self._counter("decisions", "Decisions of the policy in games with engines.", found["decisions"])
        yield self._counter("games", "Games that ended by their rules or limits.", found["games"])
        lost = {cause: one["games"] for cause, one in found["lost_games"].items()}
        yield self._counter("lost_games", "Games that a fault ended.", lost, "cause")
        for name in ("forced", "refused"):
            yield self._counter(f"decisions_{name}", f"Decisions {name}.", found[name])
        made = found["decisions"] + found["forced"]
        parts = {name: made * found[f"{name}_ms"] / 1000 for name in PARTS}
        yield self._counter("game_seconds", "Where the time of all games in flight went.", parts, "part")
        yield self._counter("daemon_restarts", "Engines started again.", found["restarts"], "cause")
        for name in ("decision", "game"):
            times = {str(int(key[1:]) / 100): ms / 1000 for key, ms in found[f"{name}_ms"].items() if ms is not None}
            yield self._gauge(f"{name}_seconds", f"Time of a {name}.", times, "quantile")
        for share in ("busy_share", "cpu_share"):
            each = {str(one["daemon"]): one[share] for one in found["daemons"]}
            yield self._gauge(f"daemon_{share}", "Of the time, 0 to 1 per core.", each, "daemon")
        memory = {str(one["daemon"]): one["memory_mb"] * 2**20 for one in found["daemons"]}
        yield self._gauge("daemon_memory_bytes", "Resident memory of an engine.", memory, "daemon")

    def _counter(self, name: str, text: str, value: Any, label: str = "") -> Any:
        return _filled(self._kinds.CounterMetricFamily, name, text, value, label)

    def _gauge(self, name: str, text: str, value: Any, label: str = "") -> Any:
        return _filled(self._kinds.GaugeMetricFamily, name, text, value, label)


def _filled(kind: Any, name: str, text: str, value: Any, label: str) -> Any:
    """A figure; of several by `label`, `value` is a mapping."""
    family = kind(f"fasttrain_{name}", text, labels=[label] if label else [])
    for of, one in value.items() if label else [(None, value)]:
        family.add_metric([of] if label else [], one)
    return family
