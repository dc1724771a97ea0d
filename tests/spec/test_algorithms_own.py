from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.native import GameSpec

GAME = GameSpec()
TEXTS = {"num_envs": 2, "speed": {"num_envs": 4}, "ppo": {"speed": {"num_envs": 8}}, "eval_episodes": {"ppo": 9}}


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `own` what the game of these tests declares."""
    return lambda own: monkeypatch.setattr("test_algorithms_own.GAME", GameSpec(own=own))


def test_what_a_game_says_of_an_algorithm_or_a_tier_goes_before_the_rest(declare: Any):
    declare(TEXTS)
    start = ("env.id=CartPole-v1", "env.game=test_algorithms_own:GAME")
    found = [
        configured(*start, f"tier={tier}", f"algo={algo}") for tier in ("balance", "speed") for algo in ("a2c", "ppo")
    ]
    assert [config.own.num_envs for config in found] == [2, 2, 4, 8]
    assert [config.eval.episodes for config in found] == [100, 9, 100, 9]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"ppo": {"speed": {"batch_size": 1}}}, "^GameSpec.own.batch_size=1: must be at least 2$"),
        ({"num_envs": {"speed": 0}}, "^GameSpec.own.num_envs=0: must be at least 1$"),
        ({"ppo": {"speed": {"n_epochs": 0.5}}}, "^GameSpec.own.n_epochs=0.5: expected a whole"),
        ({"total_timesteps": 0}, "^GameSpec.own.total_timesteps=0: must be at least 1$"),
        ({"eval_episode": 7}, "^GameSpec.own has no 'eval_episode'; did you mean 'eval_episodes'.; there are total_"),
        ({"ppo": {"fast": {"n_epochs": 7}}}, "^GameSpec.own has no 'ppo.fast.n_epochs'; there are .*for a tier or an"),
        ({"speed": 7}, "^GameSpec.own has no 'speed'; there are total_timesteps, "),
        ({"num_envs": {"batch_size": 7}}, "^GameSpec.own has no 'num_envs.batch_size'; "),
    ],
)
def test_what_no_game_can_say(declare: Any, own: Mapping[str, Any], told: str):
    declare(own)
    with pytest.raises(ConfigError, match=told):
        configured("env.id=CartPole-v1", "env.game=test_algorithms_own:GAME", "algo=ppo", "+profile=speed")
