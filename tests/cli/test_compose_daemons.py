"""`+daemons=small_jvm`: flags for a Java engine; and other files that an engine's package has."""

from __future__ import annotations

import pytest

from fasttrain.cli.compose import configured
from fasttrain.cli.library import _group
from fasttrain.errors import ConfigError

GAME = ("env.backend=daemons", "env.entry_point=game:Game", "daemons.command=[java, Engine, --port, '{port}']")


@pytest.mark.parametrize("typed", ["daemons=small_jvm", "+daemons=small_jvm"])
def test_it_sets_flags_alone(typed: str):
    found = configured([*GAME, typed, "daemons.count=3"]).daemons
    assert "-XX:ActiveProcessorCount={threads}" in found.jvm_flags
    assert (found.count, found.command[0]) == (3, "java")
    assert configured([*GAME, typed, "daemons.jvm_flags=[-Xmx64m]"]).daemons.jvm_flags == ("-Xmx64m",)


def test_a_typo_is_told():
    with pytest.raises(ConfigError, match=r"daemons=smal_jvm: no such daemons.*did you mean 'small_jvm'"):
        configured([*GAME, "daemons=smal_jvm"])


def test_a_game_of_an_engine_is_known_by_its_name():
    assert (_group("go"), _group("skullking"), _group("CartPole-v1")) == ("go", "skullking", "gym")
    found = configured(["env=go", "env.kwargs.size=5"])
    assert (found.env.backend, found.daemons.command[0], found.daemons.games_per_daemon) == ("daemons", "gnugo", 1)


def test_a_class_where_it_was_before_is_read_and_told(capsys: pytest.CaptureFixture[str]):
    typed = ["env.backend=daemons", "env.entry_point=fasttrain.daemons.go:Go", "daemons.command=[gnugo]",
             "daemons.games_per_daemon=1"]  # fmt: skip
    assert configured(typed).env.entry_point == configured(typed).env.entry_point == "fasttrain_engines.go:Go"
    told = "fasttrain: env.entry_point=fasttrain.daemons.go:Go is fasttrain_engines.go:Go now\n"
    assert capsys.readouterr().err == told
