"""What was a setting is refused with what does its work now."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conftest import RunCommand, composed
from fasttrain.errors import ConfigError
from fasttrain.spec.config import Config, name_of_env
from fasttrain.spec.reading import all_keys, from_mapping
from fasttrain.spec.removed import LEARNED_WITH, MOVED, REMOVED, instead_of, put, without_removed


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_no_more_is_refused_and_dropped_from_what_is_stored(key: str):
    told, place = REMOVED[key], MOVED.get(key)
    plain = composed()
    given = without_removed(plain)
    put(given, key, 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is no setting any more: {re.escape(told)}$"):
        from_mapping(given)
    expected: dict[str, Any] = {**plain, "checkpoint_every": "4min"} if key == "checkpoint_every_minutes" else {**plain}
    if place:
        put(expected, place, 4)
    if key in LEARNED_WITH:  # a run that learned with it cannot go on without
        assert without_removed(given) == given
        put(given, key, False)
    assert without_removed(given) == expected
    assert key not in all_keys()
    assert not place or place in all_keys()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("engine_switch_at=5", "engine_switch_at is no setting any more: kernels work once they are compiled"),
        ("metrics={port: 9100}", "metrics is no setting any more: take loggers=[csv, stdout, {logger: prometheus"),
        ("metrics.port=9100", "metrics.port is no setting any more: take loggers="),
        ("+guard.at_limit=stop", "guard.at_limit is no setting any more: take nan_guard=stop or nan_guard=rollback"),
        ("daemons.recycle.games_=3", "unknown key 'daemons.recycle.games_'; did you mean 'daemons.recycle.games'"),
        ("env.result={won: x}", "unknown key 'env.result.won'"),
        ("checkpoint_every=5h", "checkpoint_every=5h: expected a number of env steps, or minutes as in 5min"),
        ("daemons.timeouts_s.game=0", "daemons.timeouts_s.game=0.0: must be at least 0.1"),
        ("warmup=all", "warmup=all: not one of off, only"),
        ("warmup=true", "warmup=True: not one of off, only"),
        ("batch_inference=false", "inference_batch_size is no setting any more: acting takes all envs in one forward"),
    ],
)
def test_typed_it_is_one_line(fasttrain: RunCommand, typed: str, told: str):
    done = fasttrain("env.id=CartPole-v1", "algo=ppo", typed)
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert told in done.err


def test_its_variable_is_named_too(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTTRAIN_CHECKPOINT_EVERY_MINUTES", "5")
    told = "take checkpoint_every=5min (environment: FASTTRAIN_CHECKPOINT_EVERY_MINUTES=5)"
    assert told in fasttrain("env.id=CartPole-v1", "algo=ppo").err


def test_a_key_that_never_was_is_no_former_one():
    assert instead_of("num_envs") == instead_of("env") == instead_of("daemons") == ""


def config(**changed: Any) -> Config:
    return from_mapping({**composed("env.id=CartPole-v1", "algo=ppo"), **changed})


def test_settings_with_parts_and_two_forms():
    assert config(env={"id": "A-v0", "result": {"win": "winner"}}).env.result.win == "winner"
    assert [config(nan_guard=it).nan_guard for it in (True, "false", "rollback")] == ["stop", "off", "rollback"]
    every = ("1e5", 0, "5min", "0.5min")
    assert [config(checkpoint_every=it).checkpoint_interval for it in every] == [
        (100_000, 0),
        (0, 0),
        (0, 300),
        (0, 30),
    ]


@pytest.mark.parametrize(
    ("env_id", "entry", "name"),
    [
        ("ALE/Pong-v5", None, "ALE-Pong-v5"), ("a:B-v0", None, "B-v0"), (None, "my.envs:My", "My"),
        ("fasttrain/SkullKing-v0", None, "skullking"), (None, "fasttrain.daemons.go:Go", "go"),
        ("pettingzoo.classic.connect_four_v3", None, "pettingzoo.classic.connect_four_v3"), (None, None, "env"),
    ],
)  # fmt: skip
def test_folders_are_called_by_the_env(env_id: str | None, entry: str | None, name: str):
    assert name_of_env(env_id, entry) == name
