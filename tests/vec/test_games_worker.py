"""The process that plays: what it is given, what it says of itself, and which classes it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pig_games
from fasttrain.errors import EnvSpecError
from fasttrain.vec.games_worker import GamesSettings, made


def given(entry_point: str, **kwargs: Any) -> GamesSettings:
    return GamesSettings(
        entry_point,
        kwargs,
        str(pig_games.ENGINES),
        ".",
        pig_games.settings(request_timeout_s=3.0),
        0,
        1,
        (0, 1),
        1,
        1,
        1,
    )


def test_a_game_has_the_runs_deadline():
    game = made(given("pig:Pig", goal=20))
    assert game.timeout_s == 3.0
    assert game.read({"type": "note"}) is None


@pytest.mark.parametrize(
    ("entry_point", "kwargs", "says"),
    [
        ("pig:Nothing", {}, "Nothing"),
        ("pig:np", {}, "pig:np is no RequestEngine or DecisionServer"),
        ("collections:Counter", {}, "derive it from one"),
        ("pig:Pig", {"sides": 6}, r"could not be made with env.kwargs=\{'sides': 6\}: TypeError"),
        ("fasttrain.daemons:DecisionServer", {}, "TypeError"),
    ],
)
def test_classes_that_are_no_games(entry_point: str, kwargs: dict[str, Any], says: str):
    with pytest.raises(EnvSpecError, match=says):
        made(given(entry_point, **kwargs))


def test_a_game_without_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "spaceless.py").write_text(
        "from fasttrain.daemons import DecisionServer\n"
        "class Game(DecisionServer):\n"
        "    new_game = answer = read = lambda self, *given: None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvSpecError, match="could not be made"):
        made(given("spaceless:Game"))
