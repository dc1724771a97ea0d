"""`env.backend=NAME`: found by its name, asked by checks and plan, with settings of its own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec import plugins
from fasttrain.spec.backends import OF_VECTORS, Backend, backend_of, name_of_env, option_of
from fasttrain.spec.config import Config, EnvConfig
from fasttrain.spec.plugins import missing_text, without_unused
from installed import asked, install

THIRD = """
from dataclasses import dataclass
from pathlib import Path

from fasttrain.spec.backends import Backend
from fasttrain.spec.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    size: int = setting(9, "lines of the board", least=3)


class Boards(Backend):
    name, settings, what = "boards", Board, "the board's own program"
    conf = Path(__file__).parent / "files"

    def check(self, config):
        from fasttrain.errors import ConfigError
        if self.own(config).size == 13:
            raise ConfigError("boards.size=13: brings bad luck")


BACKEND = Boards()
"""


def env(**given: Any) -> EnvConfig:
    return EnvConfig(**{"id": "CartPole-v1", **given})


def test_it_is_found_by_its_name_or_refused_with_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert backend_of(env()) is None
    assert backend_of(env(backend="vector")) is OF_VECTORS
    assert OF_VECTORS.option(env()) == "the VectorEnv of env.id=CartPole-v1"
    with pytest.raises(ConfigError, match="env.backend=envpol: not one of gymnasium, vector, .*did you mean 'envpool'"):
        backend_of(env(backend="envpol"))
    install(tmp_path, "notes", {plugins.INTEGRATIONS: {"notes": "notes:Notes"}}, notes="class Notes: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="env.backend=notes: not one of gymnasium, vector"):  # it steps no envs
        backend_of(env(backend="notes"))
    with pytest.raises(ConfigError, match="Backend has no method build"):
        Backend().build(None, 1, None)


def test_messages_name_the_game_behind_an_adapter():
    assert option_of(None, "fasttrain_integrations.pettingzoo:Seat", {"game": "my.game"}) == "env.id=my.game"
    assert option_of(None, "my.envs:Mine", {"game": "chess"}) == "env.entry_point=my.envs:Mine"
    assert name_of_env(None, "fasttrain_games.skirmish.env:SkirmishEnv") == "skirmishenv"
    assert name_of_env(None, "fasttrain_of_mine.envs:Mine") == "Mine"


def test_without_the_engines_each_of_their_names_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    assert missing_text("env=go") == ""
    monkeypatch.setattr(plugins, "_parts", lambda group: {})
    told = "env.backend=daemons plays with external engines, which this installation of fasttrain lacks; install"
    with pytest.raises(ConfigError, match=told):
        backend_of(env(backend="daemons"))
    assert missing_text("env=go").startswith("env=go plays with external engines")
    assert (missing_text("env=gym"), missing_text("boards")) == ("", "")
    assert without_unused({"tune": {}, "seed": 3}) == {"seed": 3}, "a run with settings of what is not installed"


def test_settings_of_engines_that_do_not_play_are_not_stored():
    values = {"env": {"backend": "gymnasium"}, "daemons": {"command": []}, "seed": 3}
    assert without_unused(values) == {"env": {"backend": "gymnasium"}, "seed": 3}
    assert without_unused(playing := {**values, "env": {"backend": "daemons"}}) == playing


def test_a_third_package_brings_settings_checks_and_files(tmp_path: Path):
    install(tmp_path, "boards", {plugins.ENGINES: {"boards": "boards:BACKEND"}}, boards=THIRD)
    (tmp_path / "files" / "env").mkdir(parents=True)
    (tmp_path / "files" / "env" / "board.yaml").write_text("backend: boards\nentry_point: a.b:C\n", encoding="utf-8")
    found = asked(tmp_path, "env=board boards.size=5", "env=board boards.size=2", "env=board boards.sise=5",
                  "env=board boards.size=13", "env.id=CartPole-v1 algo=ppo boards.size=5")  # fmt: skip
    assert found == [
        "boards Board(size=5)", "boards.size=2: must be at least 3",
        "unknown key 'boards.sise'; did you mean 'boards.size'?",
        "boards.size=13: brings bad luck",
        "boards.size is for games with external engines: use env.backend=boards",
    ]  # fmt: skip


FAULTY = """
from dataclasses import dataclass
from fasttrain.spec.backends import Backend

@dataclass(frozen=True)
class Part:
    size: int

def engine(name, settings=None):
    found = Backend()
    found.name, found.settings = name, settings
    return found

@dataclass(frozen=True)
class Odd:
    size: object = open

UNSET, STOP, RENAMED, NONE = engine("unset", Part), engine("stop"), engine("chess"), Backend
ODD, LOST = engine("odd", Odd), engine("lost")
LOST.conf = "nowhere"
"""


def test_an_engine_with_a_fault_is_left_out_and_told_where_it_is_named(tmp_path: Path):
    offers = {name: f"faulty:{name.upper()}" for name in ("unset", "stop", "renamed", "none", "odd", "lost")}
    install(tmp_path, "faults", {plugins.ENGINES: {**offers, "broken": "broken:X"}}, faulty=FAULTY)
    (tmp_path / "broken.py").write_text("print('imported')\n1 / 0\n", encoding="utf-8")
    typed = ("seed=1", "env=board", "unset.size=3", "env.backend=stop", "renamed.size=3", "env.backend=none",
             "broken.size=3", "odd.size=1", "env.backend=lost")  # fmt: skip
    _, gymnasium, no_env, *lines = asked(tmp_path, *(f"{text} env.id=CartPole-v1 algo=ppo" for text in typed))
    assert gymnasium == "gymnasium "
    assert no_env.startswith("env=board: no such env, choose from ")
    assert no_env.count(" of the package faults ") == 7
    told = [line.replace("; install faults again, or uninstall it", " …") for line in lines]
    assert told == [
        "the engine 'unset' of the package faults has wrong settings or files: TypeError: "
        "Part.__init__() missing 1 required positional argument: 'size' …",
        "the engine 'stop' of the package faults has a name that means something else in a configuration …",
        "the engine 'renamed' of the package faults has the name 'chess': its entry point must have the same name …",
        "the engine 'none' of the package faults is no fasttrain.spec.backends.Backend but "
        "<class 'fasttrain.spec.backends.Backend'> …",
        "the engine 'broken' of the package faults cannot be loaded from broken:X: "
        "ZeroDivisionError: division by zero …",
        "the engine 'odd' of the package faults has wrong settings or files: TypeError: "
        "builtin_function_or_method is no plain value …",
        "the engine 'lost' of the package faults has wrong settings or files: "
        "NotADirectoryError: nowhere …",
    ]  # fmt: skip


def test_a_configuration_can_be_pickled_whatever_engines_add():
    assert Config.__module__ == "fasttrain.spec.config", "Python 3.12 names the module that makes the class"
    assert {type(config).__module__ for config in (configured(), configured().algo)} == {Config.__module__}
    assert pickle.loads(pickle.dumps(configured())) == configured()
