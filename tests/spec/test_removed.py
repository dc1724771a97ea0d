"""What was a setting is refused with what does its work now."""

from __future__ import annotations

import pickle
import re
import sys
from importlib import import_module
from typing import Any

import pytest

from conftest import RunCommand, composed
from fasttrain.algos.q_networks import DuelingDQNPolicy
from fasttrain.algos.recurrent_policies import MaskableRecurrentActorCriticPolicy
from fasttrain.errors import ConfigError
from fasttrain.spec.backends import name_of_env
from fasttrain.spec.config import Config
from fasttrain.spec.reading import all_keys, from_mapping
from fasttrain.spec.removed import CLASS_PATHS, MOVED, REMOVED, removal_message, set_key
from messages import assert_says, wrong_inputs

CART = ("env.id=CartPole-v1", "algo=ppo")


def config(**changed: Any) -> Config:
    return from_mapping({**composed(*CART), **changed})


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_no_more_is_refused(key: str):
    given, place = composed(), MOVED.get(key)
    set_key(given, key, 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is no setting any more: {re.escape(REMOVED[key])}$"):
        from_mapping(given)
    assert key not in all_keys()
    assert not place or place in all_keys()


@pytest.mark.parametrize("typed", wrong_inputs("settings of before"))
def test_typed_it_is_one_line(fasttrain: RunCommand, typed: str, monkeypatch: pytest.MonkeyPatch):
    if exported := typed.startswith("FASTTRAIN_"):
        monkeypatch.setenv(*typed.split("="))
    done = fasttrain(*CART, *[typed][exported:])
    done.refused()
    assert_says("settings of before", typed, done.err)


def test_it_is_refused_whatever_its_value_is_and_a_key_that_never_was_is_none():
    stored = {"env.win_key": {"env": {"win_key": None}}, "daemons.recycle_games": {"daemons": {"recycle_games": None}},
              "metrics.port": {"metrics": {"port": None}}, "study": {"study": None},
              "guard": {"guard": "rollback"}}  # fmt: skip
    for told, given in stored.items():
        with pytest.raises(ConfigError, match=f"^{told} is no setting any more: "):
            config(**given)
    assert removal_message("num_envs") == removal_message("env") == removal_message("daemons") == ""


def test_settings_with_parts_and_two_forms():
    assert config(env={"id": "A-v0", "result": {"win": "winner"}}).env.result.win == "winner"
    assert [config(nan_guard=it).nan_guard for it in (True, "false", "rollback")] == ["stop", "off", "rollback"]
    every = {"1e5": (100_000, 0), 0: (0, 0), "5min": (0, 300), ".5min": (0, 30), "1e+06min": (0, 60_000_000)}
    assert {it: config(checkpoint_every=it).checkpoint_interval for it in every} == every


def test_a_module_of_before_is_that_of_today(capsys: pytest.CaptureFixture[str]):
    for before, now in ((before, now) for before, now in CLASS_PATHS.items() if ":" not in before):
        sys.modules.pop(before, None)
        assert pickle.loads(f"c{before}\n__doc__\n.".encode()) == import_module(now).__doc__
        assert sys.modules[before] is import_module(now)
        assert capsys.readouterr().err.endswith(f"fasttrain: the module {before} is now {now}\n")
    assert pickle.loads(b"cfasttrain.engines.q_networks\nDuelingDQNPolicy\n.") is DuelingDQNPolicy
    recurrent = pickle.loads(b"cfasttrain.engines.recurrent_policies\nMaskableRecurrentActorCriticPolicy\n.")
    assert recurrent is MaskableRecurrentActorCriticPolicy
    found = pickle.loads(b"cfasttrain.games.skullking.game\nSkullKingGame\n.")
    assert found is import_module("fasttrain_games.skullking.game").SkullKingGame
    assert found.__module__ == sys.modules[found.__module__].__spec__.name  # type: ignore[union-attr]
    with pytest.raises(ModuleNotFoundError, match="fasttrain_games.chess"):
        import_module("fasttrain.games.chess")


@pytest.mark.parametrize(
    ("env_id", "entry", "name"),
    [
        ("ALE/Pong-v5", None, "ALE-Pong-v5"), ("a:B-v0", None, "B-v0"), (None, "my.envs:My", "My"),
        ("fasttrain/SkullKing-v0", None, "skullking"), (None, "fasttrain_engines.go:Go", "go"),
        ("pettingzoo.classic.connect_four_v3", None, "pettingzoo.classic.connect_four_v3"), (None, None, "env"),
    ],
)  # fmt: skip
def test_folders_are_called_by_the_env(env_id: str | None, entry: str | None, name: str):
    assert name_of_env(env_id, entry) == name
