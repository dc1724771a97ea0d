"""Rules about engines: each message names the key and a way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.errors import ConfigError
from fasttrain.spec.backends import check_backend
from fasttrain_engines.settings import DaemonsConfig, shared_out, workers_for

COMMAND = ("engine", "--port", "{port}")


def config(backend: str = "daemons", num_envs: int = 4, entry: Any = "m:G", **changed: Any) -> Any:
    daemons = DaemonsConfig(**{"command": COMMAND, **changed})
    env = SimpleNamespace(backend=backend, entry_point=entry)
    return SimpleNamespace(daemons=daemons, env=env, opponent=None, num_envs=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("gymnasium"), "daemons.command is for games with external engines"),
        (config(entry=None), "needs env.entry_point=my_game:MyGame"),
        (config(command=()), "needs daemons.command="),
        (config(ports="80"), "daemons.ports=80: expected two ports"),
        (config(ports="2000-1999"), "expected two ports"),
        (config(ports="2000-70000"), "expected two ports"),
        (config(ports="many"), "expected two ports"),
        (config(count=1, games_per_daemon=2), "2 places for num_envs=4 games"),
        (config(ports="2000-2001", count=3), "has too few ports: give one for each daemon"),
        (config(command=("engine",)), "use daemons.games_per_daemon=1"),
        (config(jvm_flags=("-Xmx1g",)), "daemons.jvm_flags is for a command that begins with java"),
    ],
)
def test_contradictions_are_named(given: Any, message: str):
    with pytest.raises(ConfigError) as found:
        check_backend(given)
    assert message in str(found.value)


@pytest.mark.parametrize(
    "given",
    [
        config(), config(ports=2000, count=1), config(command=("engine",), games_per_daemon=1),
        config(command=("/opt/bin/java", "E", "{port}"), jvm_flags=("-Xmx1g",)),
        config(command=("engine", "{socket}")),
    ],
)  # fmt: skip
def test_what_fits_together_passes(given: Any):
    check_backend(given)


def test_nothing_is_said_of_engines_where_there_are_none():
    plain = config("gymnasium")
    plain.daemons = DaemonsConfig()
    check_backend(plain)


@pytest.mark.parametrize(
    ("changed", "num_envs", "cores", "expected"),
    [({}, 16, 4, (4, 4)), ({}, 2, 4, (2, 1)), ({}, 7, 2, (2, 4)), ({"count": 3}, 7, 2, (3, 3)),
     ({"count": 9}, 4, 2, (4, 1)), ({"games_per_daemon": 1}, 5, 2, (5, 1)), ({"games_per_daemon": 4}, 9, 2, (3, 4)),
     ({"count": 2, "games_per_daemon": 8}, 9, 2, (2, 8))],
)  # fmt: skip
def test_games_are_shared_out(changed: dict[str, Any], num_envs: int, cores: int, expected: tuple[int, int]):
    assert shared_out(DaemonsConfig(command=COMMAND, **changed), num_envs, cores) == expected
    assert expected[0] * expected[1] >= num_envs


@pytest.mark.parametrize(
    ("num_envs", "cores", "expected"), [(16, 2, 1), (512, 2, 1), (512, 16, 4), (128, 16, 1), (129, 16, 2)]
)
def test_more_than_a_hundred_games_are_worth_another_worker(num_envs: int, cores: int, expected: int):
    assert workers_for(DaemonsConfig(command=COMMAND), num_envs, cores) == expected
