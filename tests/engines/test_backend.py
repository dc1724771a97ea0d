from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain_engines.backend import BACKEND
from fasttrain_engines.settings import DaemonsConfig


def config(**changed: Any) -> Any:
    return SimpleNamespace(num_envs=8, daemons=DaemonsConfig(command=("engine",), **changed))


@pytest.mark.parametrize(
    ("requested", "expected"),
    [("auto", (1, "they play with the engines")), (0, (1, "they play with the engines")), (2, (2, "")),
     (5, (4, "no more than there are daemons"))],
)  # fmt: skip
def test_processes_that_play(requested: Any, expected: tuple[int, str]):
    assert BACKEND.workers(config(count=4), requested, 8, 2) == expected


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "evaluations play 4 games with the training's engines"),
        ({"count": 3, "games_per_daemon": 4}, "evaluations play 4 games"),
        ({"count": 2, "games_per_daemon": 4}, "daemons.games_per_daemon=4: evaluations end the training's games"),
    ],
)
def test_where_the_games_of_evaluations_find_place(changed: dict[str, Any], told: str):
    assert BACKEND.evaluations(config(**changed), 4, 2).startswith(told)
