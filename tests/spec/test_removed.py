"""What was a setting is refused with what does its work now."""

from __future__ import annotations

import pickle
import re
import sys
from importlib import import_module
from typing import Any

import pytest

from conftest import RunCommand, composed, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.backends import name_of_env
from fasttrain.spec.config import Config
from fasttrain.spec.reading import all_keys, from_mapping
from fasttrain.spec.removed import (
    CLASS_PATHS,
    LEARNED_WITH,
    MOVED,
    REMOVED,
    former_paths,
    removal_message,
    set_key,
    texts_without_removed,
    without_removed,
)  # fmt: skip

CART = ("env.id=CartPole-v1", "algo=ppo")


def config(**changed: Any) -> Config:
    return from_mapping({**composed(*CART), **changed})


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_no_more_is_refused_and_dropped_from_what_is_stored(key: str):
    told, place = REMOVED[key], MOVED.get(key)
    plain = composed()
    given = without_removed(plain)
    set_key(given, key, 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is no setting any more: {re.escape(told)}$"):
        from_mapping(given)
    expected: dict[str, Any] = {**plain, "checkpoint_every": "4min"} if key == "checkpoint_every_minutes" else {**plain}
    if key == "metrics.port":
        expected["loggers"] = ["csv", "stdout", {"logger": "prometheus", "port": 4, "host": "127.0.0.1"}]
    if place:
        set_key(expected, place, 4)
    if key == "env.opponent_key":  # self-play of an env of somebody's own
        set_key(given, "env.kwargs.4", "self")
        set_key(expected, "env.kwargs.4", "self")
    if key in LEARNED_WITH:  # a run that learned with it cannot go on without
        assert without_removed(given) == given
        set_key(given, key, False)
    assert without_removed(given) == expected
    assert key not in all_keys()
    assert not place or place in all_keys()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("engine_switch_at=5", "engine_switch_at is no setting any more: kernels are used once they are compiled"),
        ("metrics={port: 9100}", "metrics is no setting any more: use loggers=[csv, stdout, {logger: prometheus"),
        ("metrics.port=9100", "metrics.port is no setting any more: use loggers="),
        ("+guard.at_limit=stop", "guard.at_limit is no setting any more: use nan_guard=stop or nan_guard=rollback"),
        ("daemons.recycle.games_=3", "unknown key 'daemons.recycle.games_'; did you mean 'daemons.recycle.games'"),
        ("env.result={won: x}", "unknown key 'env.result.won'"),
        ("checkpoint_every=5h", "checkpoint_every=5h: expected a number of env steps, or minutes as in 5min"),
        ("daemons.timeouts_s.game=0", "daemons.timeouts_s.game=0.0: must be at least 0.1"),
        (
            "env.own.num_envs=3",
            "env.own is no setting any more: a GameSpec declares it: write GAME = fasttrain.native.",
        ),
        ("warmup=all", "warmup=all: not one of off, only"),
        ("warmup=true", "warmup=True: not one of off, only"),
        (
            "batch_inference=false",
            "inference_batch_size is no setting any more: one forward pass always serves all envs",
        ),
        ("FASTTRAIN_CHECKPOINT_EVERY_MINUTES=5", "(environment: FASTTRAIN_CHECKPOINT_EVERY_MINUTES=5)"),
    ],
)
def test_typed_it_is_one_line(fasttrain: RunCommand, typed: str, told: str, monkeypatch: pytest.MonkeyPatch):
    if typed.startswith("FASTTRAIN_"):
        monkeypatch.setenv(*typed.split("="))
    fasttrain(*CART, *([] if typed.startswith("FASTTRAIN_") else [typed])).refused(told)


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


def test_what_was_typed_before_is_typed_as_today():
    typed = ["--config-dir=here", "env=gym", "env.name=A-v0", "+env.win_key=won", "env.end_key=null", "profile_name=x",
             "guard.at_limit=rollback", "nan_guard=true", "checkpoint_every_minutes=2.5", "metrics={port: 1}",
             "horizon_minutes=3", "ablate.flags=[a,b]", "env.kwargs.name=x"]  # fmt: skip
    assert texts_without_removed(typed) == [
        "--config-dir=here", "env=gym", "env.result.win=won", "nan_guard=rollback", "checkpoint_every=2.5min",
        "minutes=3", "candidates='{ablate: [a,b]}'", "env.kwargs.name=x",
    ]  # fmt: skip
    kept = ["nan_guard=off", "checkpoint_every=1000", "overlap=on"]
    former = ["guard.at_limit=rollback", "checkpoint_every_minutes=2", "algo.burn_in=0"]
    assert texts_without_removed([*kept, *former]) == kept


def test_what_a_run_recorded_and_showed_goes_on():
    stored = {"metrics": {"port": 9100, "host": "::"}, "loggers": None, "train_log_enabled": True,
              "train_log_to_console": False, "train_log_to_file": True, "checkpoint_every_minutes": 1234567.0,
              "daemons": {"profile": "jfr", "jvm_flags": ["-Xmx1g"]}}  # fmt: skip
    found = without_removed(stored)
    assert found["loggers"] == ["csv", {"logger": "prometheus", "port": 9100, "host": "::"}]
    assert found["checkpoint_every"] == "1234567min"
    first, second = found["daemons"]["jvm_flags"]
    assert (first, second[:42]) == ("-Xmx1g", "-XX:StartFlightRecording:filename={folder}")
    assert stored["daemons"] == {"profile": "jfr", "jvm_flags": ["-Xmx1g"]}
    engine = {"env": {"LEVEL": 3, "MODE": "fast"}, "command": ["engine", "{port}"]}
    command = ["env", "LEVEL=3", "MODE=fast", "engine", "{port}"]
    assert without_removed({"daemons": engine}) == {"daemons": {"command": command}}


OLD_ENV = {
    "id": "fasttrain/SkullKing-v0", "entry_point": None, "kwargs": {"num_players": 3, "opponents": "self"},
    "native_game": "fasttrain.games.skullking.game:SkullKingGame", "opponent_key": "opponents",
    "eval_opponent": "hard", "own": {"num_envs": {"speed": 256}}, "reward_debug_key": None,
}  # fmt: skip


def test_a_run_of_before_has_its_game():
    read = without_removed({**composed("env=skullking"), "env": OLD_ENV})
    env, today = from_mapping(read).env, composed("env=skullking")["env"]
    assert (env.game, env.id, env.spec.opponent_key) == ("skullking", "fasttrain/SkullKing-v0", "opponents")
    assert (env.kwargs, today["game"]) == ({"num_players": 3, "opponents": "self"}, "skullking")
    assert read["eval"]["env_kwargs"] == {"opponents": "hard"}, "by which its quality was measured"
    go = {"entry_point": "fasttrain.daemons.go:Go", "own": {"num_envs": 16}, "native_game": None, "backend": "daemons"}
    assert without_removed({"env": go})["env"] == {
        "entry_point": "fasttrain_engines.go:Go", "game": "go", "backend": "daemons"
    }  # fmt: skip
    connect = {"entry_point": "fasttrain.envs.pettingzoo:Seat", "kwargs": {"game": "four", "opponents": "self"},
               "own": {}, "opponent_key": "opponents", "eval_opponent": "random", "native_game": None}  # fmt: skip
    assert without_removed({"env": connect})["env"] == {
        "entry_point": "fasttrain.integrations.pettingzoo:Seat", "game": "fasttrain.integrations.pettingzoo:GAME",
        "kwargs": connect["kwargs"],
    }  # fmt: skip
    pong = {"id": "ALE/Pong-v5", "own": {"total_timesteps": 10}, "native_game": None}
    assert without_removed({"env": pong})["env"] == {"id": "ALE/Pong-v5", "game": "atari"}
    plain = {"id": "CartPole-v1", "own": {}, "native_game": None, "opponent_key": None}
    assert without_removed({"env": plain})["env"] == {"id": "CartPole-v1"}
    mine = {"id": "A-v0", "native_game": "mine:Batch", "own": {}}
    with pytest.raises(ConfigError, match="^env.native_game is no setting any more: a GameSpec declares it"):
        from_mapping(without_removed({**composed("env.id=A-v0", "algo=ppo"), "env": mine}))
    alone = {**OLD_ENV, "id": "fasttrain.envs:fasttrain/SkullKing-v0", "native_game": None}
    assert without_removed({"env": alone})["env"] == {
        "id": "fasttrain/SkullKing-v0", "entry_point": None, "kwargs": OLD_ENV["kwargs"], "game": "skullking"
    }  # fmt: skip
    other = {"id": "fasttrain/SkullKing-v0", "native_game": "mine:Batch", "own": {"num_envs": 3}}
    assert without_removed({"env": other})["env"] == {"id": other["id"], "native_game": "mine:Batch"}


def test_a_two_sided_env_of_the_users_own_is_read_unless_it_played_itself():
    stored: dict[str, Any] = {"entry_point": "mine:Env", "kwargs": {"foe": "hard"}, "own": {"total_timesteps": 7},
                              "native_game": None, "opponent_key": "foe", "eval_opponent": "easy"}  # fmt: skip
    assert without_removed({"env": stored})["env"] == {"entry_point": "mine:Env", "kwargs": {"foe": "hard"}}
    for chosen in ("self", ["easy", "self"], {"self": 1, "easy": 2}):
        read = without_removed({**composed("env.id=A-v0", "algo=ppo"), "env": {**stored, "kwargs": {"foe": chosen}}})
        with pytest.raises(ConfigError, match=r'^env.opponent_key is .*GameSpec\(env="my_game:MyEnv", opponent_key="'):
            from_mapping(read)


def test_what_a_cell_of_a_study_would_lack_is_refused_by_its_name():
    typed = ["env.opponent_key=foe", "env.eval_opponent=easy", "env.own={num_envs: 3}", "env.native_game=mine:Batch"]
    assert texts_without_removed([*typed, "env.reward_debug_key=debug"]) == typed
    assert texts_without_removed([f"{text.partition('=')[0]}=null" for text in typed]) == []
    where = ["env.entry_point=fasttrain.games.skullking.env:K", "env.id=fasttrain.envs:fasttrain/Skirmish-v0"]
    assert texts_without_removed(where) == [
        "env.entry_point=fasttrain_games.skullking.env:K", "env.id=fasttrain/Skirmish-v0"
    ]  # fmt: skip
    assert configured("algo=maskable_ppo", where[1]).env.id == "fasttrain/Skirmish-v0"


def test_a_module_of_before_is_that_of_today(capsys: pytest.CaptureFixture[str]):
    for before, now in ((before, now) for before, now in CLASS_PATHS.items() if ":" not in before):
        sys.modules.pop(before, None)
        assert pickle.loads(f"c{before}\n__doc__\n.".encode()) == import_module(now).__doc__
        assert sys.modules[before] is import_module(now)
        assert capsys.readouterr().err.endswith(f"fasttrain: the module {before} is now {now}\n")
        assert f"{before}.of:It" in former_paths(f"{now}.of:It")
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
