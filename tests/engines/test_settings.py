from __future__ import annotations

from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain_engines.settings import DaemonsConfig, shared_out, workers_for
from messages import assert_says, wrong_inputs

COMMAND = ("engine", "--port", "{port}")
BEGIN = ("env.backend=daemons", "env.entry_point=m:G", "daemons.command=[engine,--port,'{port}']", "num_envs=4")


@pytest.mark.parametrize("overrides", wrong_inputs("settings of engines that contradict each other"))
def test_contradictions_are_named(overrides: str):
    with pytest.raises(ConfigError) as found:
        configured(*BEGIN, *overrides.split())
    assert_says("settings of engines that contradict each other", overrides, str(found.value))


@pytest.mark.parametrize(
    "overrides",
    ["", "daemons.ports=2000 daemons.count=1", "daemons.command=[engine] daemons.games_per_daemon=1",
     "daemons.command=[/opt/bin/java,E,'{port}'] daemons.jvm_flags=[-Xmx1g]", "daemons.command=[engine,'{socket}']",
     "env.backend=gymnasium daemons.command=[]"],
)  # fmt: skip
def test_what_fits_together_passes(overrides: str):
    configured(*BEGIN, *overrides.split())


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
