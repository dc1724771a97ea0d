"""Packages are found by their entry points, imported when a name is used, and refused in one sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from conftest import configured
from fasttrain.cli import main
from fasttrain.cli.commands import implementation, is_of_others
from fasttrain.errors import ConfigError
from fasttrain.runs.loggers import check_loggers
from fasttrain.spec import plugins
from installed import asked, install


def test_a_name_is_known_before_its_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plugins.names(plugins.GAMES)
    install(tmp_path, "chess-games", {plugins.GAMES: {"chess": "chess_of_mine:GAME"}}, chess_of_mine="GAME = 'chess'")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.names(plugins.GAMES) == sorted([*before, "chess"])
    assert "chess" not in plugins.names(plugins.ENGINES)
    assert "chess_of_mine" not in sys.modules
    assert plugins.load(plugins.GAMES, "chess") == "chess"


def test_a_package_can_offer_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    hello = "def main(arguments):\n    print('hello', *arguments)\n    return 3"
    offers = {"hello": "hello_of_mine", "wave": "wave_of_mine", "train": "hello_of_mine"}
    install(tmp_path, "greetings", {plugins.COMMANDS: offers}, hello_of_mine=hello)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["hello", "--help", "x=1"]) == 3
    assert main(["wave"]) == 2
    out, err = capsys.readouterr()
    assert out == "hello --help x=1\n"
    assert "the command 'wave' of the package greetings cannot be loaded from wave_of_mine" in err
    assert not is_of_others("train"), "a word of fasttrain's own stays its own"


SETTINGS = """
from dataclasses import dataclass, make_dataclass
from fasttrain.errors import ConfigError
from fasttrain.spec.plugins import Owner, Part
from fasttrain.spec.setting import setting

@dataclass(frozen=True)
class Hello:
    size: int = setting(9, "Letters of the greeting.", least=3)

@dataclass(frozen=True)
class Settings:
    hello: Hello = Hello()
    word: str = setting("hi", "The greeting.")

def check_size(config):
    if config.hello.size == 13:
        raise ConfigError("hello.size=13: brings bad luck")

class Greetings(Part):
    name, settings, rules = "hello", Settings, (check_size,)
    owners = {"hello.": Owner(("hello",), "to greet: fasttrain hello"), "word": Owner(("hello",), "nobody listens")}

class Other(Part):
    name, settings = "other", make_dataclass("Taken", [("gate", int, setting(1, "A name that fasttrain has."))])

class Rude(Part):
    name, settings = "rude", make_dataclass("Rude", [("rude", int, setting(1, "A number."))])
    owners = {"seed": Owner(("rude",), "the seed is mine")}

PART, OTHER, RUDE, NONE = Greetings(), Other(), Rude(), 3
"""
HELLO = """
def main(arguments):
    from fasttrain.cli.compose import configured
    from fasttrain.spec.plugins import without_unused
    config = configured(["env.id=CartPole-v1", "algo=ppo", *arguments])
    print(config.hello, config.word, without_unused({"hello": 1, "word": 2, "gate": 3}))
    return 0
"""


def test_a_package_brings_settings_of_its_command_with_rules_and_texts(tmp_path: Path) -> None:
    offers = {plugins.COMMANDS: {"hello": "hello_of_mine"}, plugins.SETTINGS: {
        "hello": "settings_of_mine:PART", "other": "settings_of_mine:OTHER", "none": "settings_of_mine:NONE",
        "lost": "lost", "rude": "settings_of_mine:RUDE"}}  # fmt: skip
    install(tmp_path, "greetings", offers, hello_of_mine=HELLO, settings_of_mine=SETTINGS)
    job = "fasttrain env.id=CartPole-v1 algo=ppo"
    found = asked(tmp_path, "fasttrain hello hello.size=5 word=ho", "fasttrain hello hello.size=2",
                  "fasttrain hello hello.size=13", f"{job} hello.size=5", f"{job} word=ho", f"{job} hello.sise=5",
                  "fasttrain settings hello.", "other.x=1", "none.x=1", "lost.x=1", "rude.x=1")  # fmt: skip
    assert [line.removeprefix("fasttrain: error: ") for line in found] == [
        "Hello(size=5) ho {'gate': 3}",  # runs do not store settings of other packages' commands
        "hello.size=2: must be at least 3", "hello.size=13: brings bad luck",
        "hello.size=5 has no effect with train; to greet: fasttrain hello",
        "word=ho has no effect with train; nobody listens",
        "unknown key 'hello.sise'; did you mean 'hello.size'?", "hello.size=9", "    Letters of the greeting.",
        *(f"the group of settings {told}; install greetings again, or uninstall it" for told in (
            "'other' of the package greetings has a name that means something else in a configuration: gate",
            "'none' of the package greetings is no fasttrain.spec.plugins.Part but 3",
            "'lost' of the package greetings cannot be loaded from lost: ModuleNotFoundError: No module named 'lost'",
            "'rude' of the package greetings has wrong settings or files: TypeError: owners must be an Owner for keys "
            "of its own, rules a tuple of functions",
        )),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "why"),
    [("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such'"),
     ("1 / 0", "ZeroDivisionError: division by zero"), ("OTHER = 1", "AttributeError: "),
     ("raise SystemExit", "SystemExit; ")],
)  # fmt: skip
def test_a_package_that_cannot_be_imported(module, why, tmp_path, monkeypatch):
    name = f"broken_{abs(hash(module))}"
    install(tmp_path, "broken-engines", {plugins.ENGINES: {"broken": f"{name}:ENGINE"}}, **{name: module})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="the engine 'broken' of the package broken-engines cannot be loaded") as told:
        plugins.load(plugins.ENGINES, "broken")
    assert why in str(told.value)
    assert str(told.value).endswith("install broken-engines again, or uninstall it")


def test_a_name_that_two_packages_claim_belongs_to_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mine", "yours"):
        offers = {"go": f"{package}_go:GAME", "shared": "common_go:GAME"}
        monkeypatch.syspath_prepend(str(install(tmp_path / package, package, {plugins.INTEGRATIONS: offers})))
    with pytest.raises(ConfigError, match=r"by two packages, yours \(yours_go:GAME\) and mine \(mine_go:GAME\)"):
        plugins.load(plugins.INTEGRATIONS, "go")
    with pytest.raises(ConfigError, match="cannot be loaded from common_go:GAME"):  # one thing, offered twice
        plugins.load(plugins.INTEGRATIONS, "shared")


def test_a_name_that_nobody_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "some-games", {plugins.GAMES: {"backgammon": "b:GAME"}})))
    with pytest.raises(ConfigError, match=r"called 'backgamon'; did you mean 'backgammon'\?; there are "):
        plugins.load(plugins.GAMES, "backgamon")


def test_metadata_that_are_older_than_the_source_are_told_wherever_a_name_is_missing(tmp_path, monkeypatch):
    config = configured("env.id=CartPole-v1", "algo=ppo", "loggers=[tensorboard]")
    monkeypatch.syspath_prepend(str(install(tmp_path, "fasttrain", {})))
    monkeypatch.setattr(plugins, "_parts", lambda group: {})
    told = "; fasttrain's installed metadata is missing, or older than its source: pip install -e . once more"
    for typed in ("env=skirmish", "env=go", "env=skullking", "env.backend=pettingzoo", "daemons.command=[x]"):
        with pytest.raises(ConfigError, match=told):
            configured(typed, "algo=ppo")
    with pytest.raises(ConfigError, match=told):
        check_loggers(config)
    for command in ("zoo", "tune"):
        with pytest.raises(ConfigError, match=told):
            implementation(command)
    keys = ("tune.trials", "seeds", "play.x")
    for key, line in zip(keys, asked(tmp_path, *(f"algo=ppo env.id=A {key}=3" for key in keys)), strict=True):
        lacks = " belongs to fasttrain_.*, which this installation of fasttrain lacks; fasttrain's installed metadata"
        assert re.match(key.partition(".")[0] + lacks, line)
    (line,) = asked(tmp_path, "fasttrain -m env.id=CartPole-v1 algo=ppo seed=1,2")
    assert line.startswith("fasttrain: error: sweep belongs to fasttrain_studies")
    monkeypatch.syspath_prepend(str(install(tmp_path / "older", "fasttrain", {plugins.GAMES: {"chess": "chess"}})))
    with pytest.raises(ConfigError, match=told):
        implementation("zoo")
