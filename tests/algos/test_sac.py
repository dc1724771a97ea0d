"""SAC's seams: a subclass's own terms, what is refused, and what flags of ours ask of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.algos.sac import Evaluated
from fasttrain.errors import ConfigError
from toys import RandomEnv

SETTINGS: dict[str, Any] = {"learning_starts": 20, "batch_size": 16, "buffer_size": 100, "seed": 0, "device": "cpu"}


class Careful(fasttrain.SAC):
    """As the docstring of SAC has it."""

    def critic_loss(self, batch: Any, evaluated: Evaluated) -> dict[str, Any]:
        drawn = self.critic(batch.observations, evaluated.actions.detach())
        gaps = [mine.mean() - theirs.mean() for mine, theirs in zip(drawn, evaluated.q_values, strict=True)]
        return super().critic_loss(batch, evaluated) | {"cql_loss": torch.stack(gaps).sum()}

    def actor_loss(self, batch: Any, evaluated: Evaluated) -> dict[str, torch.Tensor]:
        imitation = (evaluated.actions - batch.actions).square().mean()
        return super().actor_loss(batch, evaluated) | {"bc_loss": imitation}


ACTING = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.5], np.float32))


def made(kind: Any = fasttrain.SAC, engine: str = "torch", acting: spaces.Box = ACTING, **changes: Any) -> Any:
    acting = copy.deepcopy(acting)  # it has a stream of its own
    env = DummyVecEnv([lambda: RandomEnv(spaces.Box(-1.0, 1.0, (3,), np.float32), acting)] * 2)
    return kind("MlpPolicy", env, engine=engine, policy_kwargs={"net_arch": [8]}, **{**SETTINGS, **changes})


def test_terms_of_a_subclass_act_and_are_logged_under_kernels_too():
    plain, ours, fused = (made(*each).learn(80) for each in ((), (Careful,), (Careful, "kernels")))
    for part in ("actor", "critic"):
        weights = [torch.cat([each.detach().flatten() for each in getattr(model, part).parameters()])
                   for model in (plain, ours, fused)]  # fmt: skip
        torch.testing.assert_close(weights[2], weights[1], rtol=0, atol=1e-5)  # Adam by torch's fused kernel
        assert (weights[1] - weights[0]).abs().max() > 1e-4, part
    assert "Careful.critic_loss is overridden" in fused.engine.unsupported_reason
    logged = fused.logger.name_to_value
    assert {f"train/{name}" for name in ("critic_loss", "cql_loss", "actor_loss", "bc_loss", "ent_coef_loss",
                                         "ent_coef")} < set(logged)  # fmt: skip
    assert logged["train/bc_loss"] > 0


@pytest.mark.parametrize(
    ("seam", "terms", "told"),
    [
        ("critic_loss", lambda q: {}, "{}, not a dict of named scalar tensors"),
        ("critic_loss", lambda q: {"actor_loss": q}, "the term 'actor_loss': that name is taken"),
        ("critic_loss", lambda q: {"own": q.detach()}, "terms without a gradient"),
        ("actor_loss", lambda q: {"critic_loss": q}, "the term 'critic_loss': that name is taken"),
        ("actor_loss", lambda q: {"ent_coef": q}, "the term 'ent_coef': that name is taken"),
    ],
)
def test_terms_that_cannot_be_minimised_are_told(seam: str, terms: Any, told: str):
    model = made()
    model.learn(30)
    setattr(model, seam, lambda batch, evaluated: terms(evaluated.q_values[0].mean()))
    with pytest.raises(ConfigError, match=rf"SAC\.{seam} returned {told}"):
        model.train(1, 16)


def test_a_foreign_buffer_does_not_pass_by_an_overridden_loss():
    class Foreign(ReplayBuffer):
        """SB3's own update would serve it."""

    assert made(replay_buffer_class=Foreign).learn(40)._n_updates > 0
    with pytest.raises(ConfigError, match=r"Careful.critic_loss is overridden.* with replay_buffer_class=Foreign"):
        made(Careful, replay_buffer_class=Foreign)


WHOLE = spaces.Box(np.array([-1, 0], np.int8), np.array([1, 2], np.int8), dtype=np.int8)


@pytest.mark.parametrize("acting", [ACTING, WHOLE], ids=str)
def test_random_actions_in_one_draw_are_those_of_many(acting: spaces.Box):
    alone, together = made(acting=acting), made(engine="kernels", acting=acting)
    together.action_space.sample = None  # type: ignore[method-assign]
    for model in (alone, together):
        model.learn(30)
    drawn = alone.replay_buffer.actions[:10]
    np.testing.assert_array_equal(together.replay_buffer.actions[:10], drawn)
    assert np.unique(drawn).tolist() == [-1, 0, 1] if acting is WHOLE else np.abs(drawn).min() > 0


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_batches_are_drawn_ahead_in_a_thread(engine: str):
    model = made(engine=engine)
    model.prefetch_batches()
    model.learn(60)
    assert model.collector.sampler.hits + model.collector.sampler.waits == model._n_updates
    model.prefetch_batches(deterministic=True)
    expected = made(engine=engine).learn(60)
    again = made(engine=engine)
    again.prefetch_batches(deterministic=True)
    again.learn(60)
    for mine, theirs in zip(again.policy.parameters(), expected.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_plain_engine_acts_in_the_form_that_replay_stores():
    model = made()
    actions = model.engine.act(np.zeros((4, 3), np.float32), None).actions
    assert actions.shape == (4, 2)
    assert np.abs(actions).max() <= 1
