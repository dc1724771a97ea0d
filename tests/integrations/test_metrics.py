from __future__ import annotations

import re
import socket
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest

from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.progress import Progress
from fasttrain_engines.stats import Tally, figures
from fasttrain_integrations import metrics
from fasttrain_integrations.metrics import Endpoint, check_metrics, serving

ENGINES = {
    "decisions": 90, "forced": 10, "refused": 3, "games": 8, "engine_ms": 4.0, "network_ms": 0.5, "decode_ms": 0.25,
    "queue_ms": 2.0, "idle_ms": 0.0, "lost_games": {"timeout": {"games": 2}}, "restarts": {"hung": 1},
    "daemons": [{"daemon": 0, "busy_share": 0.5, "cpu_share": 0.25, "memory_mb": 2.0}],
}  # fmt: skip
EXPECTED = {
    "fasttrain_env_steps_total": 100.0, "fasttrain_updates_total": 3.0, "fasttrain_episode_reward_mean": 1.5,
    "fasttrain_decisions_total": 90.0, "fasttrain_games_total": 8.0, 'fasttrain_lost_games_total{cause="timeout"}': 2.0,
    'fasttrain_game_seconds_total{part="engine"}': 0.4, "fasttrain_decisions_refused_total": 3.0,
    'fasttrain_daemon_restarts_total{cause="hung"}': 1.0, "fasttrain_buffer_transitions": 24.0,
    'fasttrain_game_duration_seconds_bucket{le="2.5"}': 1.0, 'fasttrain_game_duration_seconds_bucket{le="5.0"}': 2.0,
    'fasttrain_game_duration_seconds_bucket{le="+Inf"}': 3.0, "fasttrain_game_duration_seconds_sum": 705.0,
    "fasttrain_game_duration_seconds_count": 3.0,
    'fasttrain_daemon_busy_share{daemon="0"}': 0.5, 'fasttrain_daemon_cpu_share{daemon="0"}': 0.25,
    'fasttrain_daemon_memory_bytes{daemon="0"}': 2097152.0,
}  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_they_are_served_as_they_are_when_asked_and_no_longer(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("prometheus_client", reason="fasttrain[metrics] is not installed")
    settings, progress = Endpoint(free_port()), Progress(1000, PhaseClock())
    env: Any = SimpleNamespace()
    model: Any = SimpleNamespace(n_envs=2, rollout_buffer=SimpleNamespace(pos=12, full=True))
    tally = Tally()
    for seconds in (2, 3, 700):
        tally.games.add(1e9 * seconds)
    games = SimpleNamespace(summary=lambda wall_s: ENGINES, figures=lambda found: figures(found, tally))
    asked = dict[str, Any](games=None)
    monkeypatch.setattr(metrics, "engines_of", lambda env: asked["games"])
    check_metrics(settings)

    def scraped() -> dict[str, float]:
        where, headers = f"http://127.0.0.1:{settings.port}/metrics", {"Accept": "application/openmetrics-text"}
        with urlopen(Request(where, headers=headers), timeout=10) as answer:
            text = answer.read().decode()
        list(import_module("prometheus_client.openmetrics.parser").text_string_to_metric_families(text))  # it is valid
        return {name: float(value) for name, value in re.findall(r"^([^#\n].*) (\S+)$", text, re.M)}

    with serving(settings, progress, env, model):
        first = scraped()
        assert first["fasttrain_env_steps_total"] == 0
        assert "fasttrain_episode_reward_mean" not in first
        progress.env_steps, progress.updates = 100, 3
        progress.returns += [1.0, 2.0]
        asked["games"] = games
        second = scraped()
        assert {name: second[name] for name in EXPECTED} == EXPECTED
        assert second["fasttrain_steps_per_second"] > 0
        with pytest.raises(ConfigError, match="loggers: prometheus: nobody can listen on 127.0.0.1"):
            check_metrics(settings)
    check_metrics(settings)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"loggers: prometheus: .* pip install 'fasttrain\[metrics\]'"):
        check_metrics(Endpoint(9100))
