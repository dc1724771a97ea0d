"""What games with engines come to, in numbers and words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conftest import configured
from fasttrain.runs import times
from fasttrain.runs.times import BIASED, engine_lines, engines_dict, env_times
from fasttrain_engines.stats import GameTimes, Tally

TIMES = GameTimes(4000, 800, 200, 5000, 400, decisions=100, games=99, lost=1, lost_decisions=7, restarts=2)


class Games:
    """Stands for a DaemonVecEnv."""

    num_envs = 4

    def __init__(self, lost_after: int = 0, causes: int = 1) -> None:
        self.told, self.unwrapped = Tally(), self
        for _ in range(99):
            self.told.games.add(2e9)
            self.told.decisions.add(1e6)
        self.told.steps = 99 * 5
        if lost_after:
            self.told.lost["timeout"], self.told.lost_steps["timeout"] = causes, causes * lost_after
        self.told.daemons = [{"daemon": 0, "seconds": 1.0, "busy_share": 0.5, "cpu_share": 0.1, "memory_mb": 30.0}]

    def times(self) -> GameTimes:
        return TIMES

    def tally(self, fresh: bool) -> Tally:
        return self.told


@pytest.fixture(autouse=True)
def _they_count_as_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "DaemonVecEnv", Games)


def test_a_games_time_is_that_of_one_game():
    env: Any = Games()
    found = env_times(env, configured("schedule=first_ready"), 3, counted=False)
    assert dict(found.games) == {"engine": 1000, "network": 200, "decode": 50, "queue": 1250, "idle": 100}
    assert (found.opponents_ns, found.restarts, found.lost_steps, found.in_step) == (3, 2, 7, False)


def test_in_self_play_the_trainer_counts_the_opponents_time_and_games_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
):
    env: Any = SimpleNamespace(inner=Games(), opponents_ns=11)
    monkeypatch.setattr(times, "SelfPlayVecEnv", SimpleNamespace)
    found = env_times(env, configured("schedule=lockstep"), 0, counted=True)
    assert (found.opponents_ns, found.in_step) == (11, True)
    assert engines_dict(env, 1.0)["engines"]["decisions"] == 100


def test_other_envs_have_none():
    env: Any = SimpleNamespace(unwrapped=None)
    assert (engines_dict(env, 1.0), engine_lines({})) == ({}, [])
    assert env_times(env, configured(), 3, counted=False).games == ()


@pytest.mark.parametrize(("after", "causes", "warns"), [(0, 0, False), (5, 1, False), (6, 1, True), (2, 2, True)])
def test_lost_games_warn_where_they_are_many_or_long(after: int, causes: int, warns: bool):
    env: Any = Games(after, causes)
    told = engine_lines(engines_dict(env, 2.0))
    assert told[0] == "engines: 1, busy 50 %, 30 MB; 99 games (49.5/s), 100 decisions (50/s)"
    assert told[1].startswith("a decision took 1.0")
    assert "a game took 2,0" in told[1]
    assert (told[-1] == BIASED) == warns
    lost = f"{causes} games were lost after {after} decisions in the mean (timeout {causes}); finished ones have 5"
    assert (lost in told) == bool(after)
