"""The checkup of a game with an engine: what an honest one costs, and what is said of one with faults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pig_games
from conftest import RunCommand
from fasttrain.envs.checkup import CheckupResult
from fasttrain.runs.batches import checkup_of_game
from fasttrain_engines.vec_env import DaemonVecEnv

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
Look = Callable[..., CheckupResult]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.chdir(pig_games.ENGINES)

    def one(*arguments: Any, game: str = "pig:Pig", **kwargs: Any) -> CheckupResult:
        with closing(DaemonVecEnv(game, kwargs, 1, pig_games.settings(*arguments), 2, 1, tmp_path)) as games:
            return checkup_of_game(games, use_masks=True, max_steps=200, max_seconds=60.0)

    return one


@pytest.mark.parametrize("game", ["pig:Pig", "pig:PigByRequest"])
def test_an_honest_game_has_no_findings_and_plays_the_same_from_a_seed(look: Look, game: str):
    result = look(game=game)
    assert (result.findings, result.not_checked) == ((), ())
    assert result.costs is not None
    assert result.costs.has_masks
    assert result.reward_range == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--fault", "refuse=0.3"), "mask_not_respected", r"refused \d+ actions in \d+ decisions"),
        (("--fault", "close=0.02"), "lost_games", r"\d+ of \d+ games were lost \(closed\)"),
    ],
)
def test_a_fault_of_the_engine_is_a_warning(look: Look, arguments: tuple[str, ...], code: str, text: str):
    (finding,) = look(*arguments).findings
    assert (finding.severity, finding.code) == ("warning", code)
    assert re.search(text, finding.message)


def test_check_shows_what_a_decision_costs(fasttrain: RunCommand):
    done = fasttrain("check", *pig_games.overrides("--think-ms", "1"))
    assert done.exit_code == 0, done.err
    assert done.out.startswith("Checkup of env.entry_point=pig:Pig: ")
    assert "\nnothing found\n" in done.out
    assert done.json("checkup.json")["costs"]["step_s"] > 0.001
