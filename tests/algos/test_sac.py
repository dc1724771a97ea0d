"""SAC's seams: what is refused, and what flags of ours ask of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from accelerated import UNEVEN, Careful, toy_sac
from fasttrain.errors import ConfigError


def test_a_foreign_buffer_does_not_pass_by_an_overridden_loss():
    class Foreign(ReplayBuffer):
        """SB3's own update would serve it."""

    assert toy_sac(replay_buffer_class=Foreign).learn(40)._n_updates > 0
    with pytest.raises(ConfigError, match=r"Careful.critic_loss is overridden.* with replay_buffer_class=Foreign"):
        toy_sac(Careful, replay_buffer_class=Foreign)


WHOLE = spaces.Box(np.array([-1, 0], np.int8), np.array([1, 2], np.int8), dtype=np.int8)


@pytest.mark.parametrize("acting", [UNEVEN, WHOLE], ids=str)
def test_random_actions_in_one_draw_are_those_of_many(acting: spaces.Box):
    alone, together = toy_sac(acting=acting), toy_sac(engine="kernels", acting=acting)
    together.action_space.sample = None  # type: ignore[method-assign]
    for model in (alone, together):
        model.learn(30)
    drawn = alone.replay_buffer.actions[:10]
    np.testing.assert_array_equal(together.replay_buffer.actions[:10], drawn)
    assert np.unique(drawn).tolist() == [-1, 0, 1] if acting is WHOLE else np.abs(drawn).min() > 0


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_batches_are_drawn_ahead_in_a_thread(engine: str):
    model = toy_sac(engine=engine)
    model.prefetch_batches()
    model.learn(60)
    assert model.collector.sampler.hits + model.collector.sampler.waits == model._n_updates
    model.prefetch_batches(deterministic=True)
    expected = toy_sac(engine=engine).learn(60)
    again = toy_sac(engine=engine)
    again.prefetch_batches(deterministic=True)
    again.learn(60)
    for mine, theirs in zip(again.policy.parameters(), expected.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_plain_engine_acts_in_the_form_that_replay_stores():
    model = toy_sac()
    actions = model.engine.act(np.zeros((4, 5), np.float32), None).actions
    assert actions.shape == (4, 3)
    assert np.abs(actions).max() <= 1
