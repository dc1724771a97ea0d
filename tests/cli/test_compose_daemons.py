"""`+daemons=small_jvm`: flags for a Java engine."""

from __future__ import annotations

import pytest

from fasttrain.cli.compose import composed_before, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.precedence import normalise

GAME = ("env.backend=daemons", "env.entry_point=game:Game", "daemons.command=[java, Engine, --port, '{port}']")


@pytest.mark.parametrize("typed", ["daemons=small_jvm", "+daemons=small_jvm"])
def test_it_sets_flags_alone(typed: str):
    found = configured([*GAME, typed, "daemons.count=3"]).daemons
    assert "-XX:ActiveProcessorCount={threads}" in found.jvm_flags
    assert (found.count, found.command[0]) == (3, "java")
    assert configured([*GAME, typed, "daemons.jvm_flags=[-Xmx64m]"]).daemons.jvm_flags == ("-Xmx64m",)


def test_a_typo_is_told():
    with pytest.raises(ConfigError, match=r"daemons=smal_jvm: no such daemons.*did you mean 'small_jvm'"):
        composed_before(normalise([*GAME, "daemons=smal_jvm"], {}))
