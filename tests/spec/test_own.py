from __future__ import annotations

from conftest import configured


def test_what_a_game_says_of_an_algorithm_or_a_tier_goes_before_the_rest():
    own = (
        "env.own.num_envs=2",
        "env.own.speed.num_envs=4",
        "env.own.ppo.speed.num_envs=8",
        "env.own.eval_episodes.ppo=9",
    )
    start = ("env.id=CartPole-v1", *own)
    found = [
        configured(*start, f"tier={tier}", f"algo={algo}") for tier in ("balance", "speed") for algo in ("a2c", "ppo")
    ]
    assert [config.own.num_envs for config in found] == [2, 2, 4, 8]
    assert [config.eval.episodes for config in found] == [100, 9, 100, 9]
