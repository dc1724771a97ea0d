"""The run's figures for Prometheus, at http://host:port/metrics. They are computed on request only."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.errors import ConfigError
from fasttrain.runs.envs import engines_of
from fasttrain.runs.loggers import PROMETHEUS
from fasttrain.runs.progress import Progress
from fasttrain.spec.config import Config
from fasttrain.spec.setting import named


class Endpoint(NamedTuple):
    """Where Prometheus reads the figures."""

    port: int
    host: str = "127.0.0.1"  # only this machine can read the figures


def endpoint_of(config: Config) -> Endpoint:
    """The endpoint that `loggers` names for Prometheus. Raises ConfigError if it names no port."""
    entries = (named(entry, "logger", "loggers") for entry in config.loggers or ())
    given = next(given for name, given in entries if name == PROMETHEUS)
    port, host = given.get("port"), given.get("host", Endpoint(0).host)
    if {*given} - {"port", "host"} or not (isinstance(port, int) and 1 <= port <= 65535 and isinstance(host, str)):
        raise ConfigError(f"loggers: {PROMETHEUS}: expected {{logger: prometheus, port: 9100}}, perhaps with host")
    return Endpoint(port, host)


def check_metrics(endpoint: Endpoint) -> None:
    """Raises ConfigError if the package is missing or the port is taken. Called before anything starts."""
    try:
        import_module("prometheus_client")
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        socket.create_server(endpoint[::-1], family=family).close()
    except ImportError as error:
        why = f"prometheus_client is not installed ({error}); pip install 'fasttrain[metrics]'"
        raise ConfigError(f"loggers: {PROMETHEUS}: {why}") from error
    except OSError as error:
        why = f"nobody can listen on {endpoint.host}:{endpoint.port} ({error.strerror}); use another port"
        raise ConfigError(f"loggers: {PROMETHEUS}: {why}") from error


@contextmanager
def serving(endpoint: Endpoint, progress: Progress, env: VecEnv, model: BaseAlgorithm) -> Iterator[None]:
    """Serve the figures at the endpoint inside the block."""
    prometheus = import_module("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(Figures(progress, env, model))
    server, thread = prometheus.start_http_server(endpoint.port, endpoint.host, registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Figures:
    """A collector of prometheus_client."""

    def __init__(self, progress: Progress, env: VecEnv, model: BaseAlgorithm) -> None:
        self._progress, self._env, self._model, self._began = progress, env, model, time.perf_counter()
        self._kinds = import_module("prometheus_client.core")

    def collect(self) -> Iterator[Any]:
        """All figures at this moment. Called from the server's threads."""
        progress, games = self._progress, engines_of(self._env)
        yield self._family("counter", "env_steps", "Environment steps.", progress.env_steps)
        yield self._family("counter", "updates", "Gradient updates.", progress.updates)
        yield self._family("gauge", "steps_per_second", "Environment steps per second.", progress.steps_per_s)
        if (reward := progress.mean_return) is not None:
            yield self._family("gauge", "episode_reward_mean", "Mean reward of the last episodes.", reward)
        buffered = _buffered(self._model)
        yield self._family("gauge", "buffer_transitions", "Transitions in the replay or rollout buffer.", buffered)
        if games is not None:
            for figure in games.figures(games.summary(time.perf_counter() - self._began)):
                yield self._family(*figure)

    def _family(self, kind: str, name: str, text: str, value: Any, label: str = "") -> object:
        """A metric. `value`: with a `label` a mapping; of a histogram ({upper bound: count}, total count, sum)."""
        name = f"fasttrain_{name}"
        if kind == "histogram":
            up_to, count, sum_s = value
            return self._kinds.HistogramMetricFamily(name, text, [*up_to.items(), ("+Inf", count)], sum_s)
        family = getattr(self._kinds, f"{kind.capitalize()}MetricFamily")(name, text, labels=[label] if label else [])
        for of, one in value.items() if label else [(None, value)]:
            family.add_metric([of] if label else [], one)
        return family


def _buffered(model: Any) -> int:
    """Transitions in the model's buffer."""
    replay, rollout = getattr(model, "replay_buffer", None), getattr(model, "rollout_buffer", None)
    if replay is not None:
        return int((replay.buffer_size if replay.full else replay.pos) * model.n_envs)
    return 0 if rollout is None else int(rollout.pos * model.n_envs)
