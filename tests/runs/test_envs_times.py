"""What the envs of a run say of their time, games with engines among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conftest import configured
from fasttrain.runs import envs as times
from fasttrain.runs.envs import engines_of, env_times

PARTS = (("engine", 1000), ("queue", 1250))


class Games:
    """Stands for an ExternalVecEnv."""

    def __init__(self) -> None:
        self.unwrapped = self

    def env_times(self) -> dict[str, Any]:
        return {"games": PARTS, "restarts": 2, "lost_steps": 7}


@pytest.fixture(autouse=True)
def _they_count_as_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "ExternalVecEnv", Games)


def test_games_with_engines_tell_of_their_time():
    env: Any = Games()
    found = env_times(env, configured("schedule=first_ready"), 3, counted=False)
    assert found.games == PARTS
    assert (found.opponents_ns, found.restarts, found.lost_steps, found.in_step) == (3, 2, 7, False)


def test_in_self_play_the_trainer_counts_the_opponents_time_and_games_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
):
    env: Any = SimpleNamespace(inner=Games(), opponents_ns=11)
    monkeypatch.setattr(times, "SelfPlayVecEnv", SimpleNamespace)
    found = env_times(env, configured("schedule=lockstep"), 0, counted=True)
    assert (found.opponents_ns, found.in_step) == (11, True)
    assert engines_of(env) is env.inner


def test_other_envs_have_none():
    env: Any = SimpleNamespace(unwrapped=None)
    assert engines_of(env) is None
    assert env_times(env, configured(), 3, counted=False).games == ()
