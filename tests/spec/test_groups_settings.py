"""The groups of settings around a training: what they hold where nobody chose."""

from __future__ import annotations

from conftest import configured


def test_a_seed_leaves_room_for_every_env():
    config = configured("env.id=CartPole-v1", "algo=ppo", "eval.seed=4293967295")
    assert config.eval.seed + 1_000_000 == 2**32 - 1
    assert (config.checkpoint.keep, config.stop.patience) == (3, None)
