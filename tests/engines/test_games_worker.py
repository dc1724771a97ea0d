from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces

import pig_games
from fasttrain.errors import EnvSpecError
from fasttrain_engines.game_row import STEP
from fasttrain_engines.games_worker import GamesSettings, Worker, made
from fasttrain_engines.settings import Timeouts
from messages import assert_says, wrong_inputs


def given(entry_point: str, kwargs: dict[str, Any], folder: str = ".", rows: int = 1, **changed: Any) -> GamesSettings:
    settings = pig_games.settings(timeouts_s=Timeouts(start=15.0, request=3.0), **changed)
    return GamesSettings(entry_point, kwargs, str(pig_games.ENGINES), folder, settings, 0, 1, rows, 1, rows, 1)


def test_a_game_has_the_runs_deadline():
    game = made(given("pig:Pig", {"goal": 20}))
    assert game.timeout_s == 3.0
    assert game.read({"type": "note"}) is None


@pytest.mark.parametrize("wrong", wrong_inputs("classes of games with engines"))
def test_classes_that_are_no_games(wrong: str):
    entry_point, _, kwargs = wrong.partition(" ")
    with pytest.raises(EnvSpecError) as told:
        made(given(entry_point, yaml.safe_load(kwargs)))
    assert_says("classes of games with engines", wrong, str(told.value))


def test_a_game_without_spaces_of_a_fixed_shape_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pig.spaces", SimpleNamespace(Box=spaces.Box, Discrete=spaces.Text))
    with pytest.raises(EnvSpecError, match="shared memory needs Box.*found Text"):
        made(given("pig:Pig", {}))


class Loop:
    """An event loop whose time is what the test says."""

    def __init__(self) -> None:
        self.timers: list[Any] = []
        self.soon: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, what: Callable[[], None]) -> Any:
        self.timers.append(timer := SimpleNamespace(delay_s=delay_s, what=what))
        timer.cancel = lambda: self.timers.remove(timer)
        return timer

    def call_soon(self, what: Callable[[], None]) -> None:
        self.soon.append(what)

    def round(self) -> None:
        due, self.soon = self.soon, []
        for what in due:
            what()


def worker_of(folder: Path, wait_s: float = 0.004) -> tuple[Any, Loop, list[list[int]]]:
    """The table of one daemon's eight rows, of which all are under way; its loop, and what the trainer is told."""
    no_arrays: Any = SimpleNamespace()
    settings = given("pig:Pig", {}, str(folder), rows=8)
    made: Any = Worker(settings, no_arrays, np.zeros(16, np.int64), spaces.Discrete(2))
    loop, sent = Loop(), list[list[int]]()
    made._loop, made._under_way, made.wait_s = loop, {*range(8)}, wait_s
    made._send = lambda kind, rows: sent.append([row for row, *_ in rows])
    return made.table, loop, sent


def test_news_wait_for_others_until_their_time_is_up(tmp_path: Path):
    table, loop, sent = worker_of(tmp_path)
    table.tell(3, STEP)
    table.tell(5, STEP)
    loop.round()
    assert (sent, [timer.delay_s for timer in loop.timers]) == ([], [0.004])
    loop.timers[0].what()
    assert sent == [[3, 5]]
    table.tell(0, STEP)
    assert len(loop.timers) == 1, "the next wait their own time"


def test_news_go_out_when_fewer_than_two_games_are_under_way(tmp_path: Path):
    table, loop, sent = worker_of(tmp_path)
    for row in range(6):
        table.tell(row, STEP)
    loop.round()
    assert (sent, len(loop.timers)) == ([], 1)
    table.tell(6, STEP)
    table.tell(7, STEP)
    loop.round()
    assert (sent, loop.timers) == ([[*range(8)]], []), "one message, and no timer that is left"


def test_without_a_wait_a_round_of_the_loop_is_one_message(tmp_path: Path):
    table, loop, sent = worker_of(tmp_path, wait_s=0.0)
    for row in range(3):
        table.tell(row, STEP)
    loop.round()
    table.tell(3, STEP)
    loop.round()
    assert (sent, loop.timers) == ([[0, 1, 2], [3]], [])
