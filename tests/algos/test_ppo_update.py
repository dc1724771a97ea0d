"""The update: what is logged, when it stops, and that nothing is read from the device in between."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from accelerated import WithTerm, filled, masked_model, minibatch_terms, weights
from fasttrain.algos.engine import EngineSettings, Statistics
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import PPO
from fasttrain.algos.step import PPOStep

KEYS = {
    "learning_rate", "entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss",
    "explained_variance", "n_updates", "clip_range", "clip_range_vf",
}  # fmt: skip


def collected(**kwargs: Any) -> Any:
    """A model whose storage is filled and which has not been trained."""
    return filled(masked_model(EngineSettings(), **kwargs))


def test_ratio_is_one_before_the_first_step():
    model = collected()
    batch = next(model.rollout_buffer.storage.minibatches(20))
    terms = minibatch_terms(model.work(), view_of(model.policy, model.action_space), batch)
    assert abs(terms["approx_kl"].item()) < 1e-6
    assert terms["clip_fraction"].item() == 0
    # With a ratio of one the policy loss is minus the mean of the normalised advantages, which is zero.
    assert abs(terms["policy_gradient_loss"].item()) < 1e-6


def test_the_log_has_the_keys_of_sb3_and_its_explained_variance():
    model = collected(clip_range_vf=0.2)
    model.train()
    storage = model.rollout_buffer.storage
    values, returns = storage.values.T.reshape(-1), storage.returns.T.reshape(-1)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert model.logger.name_to_value["train/explained_variance"] == pytest.approx(float(expected))
    keys = {key.removeprefix("train/") for key in model.logger.name_to_value if key.startswith("train/")}
    assert keys == KEYS
    assert model.logger.name_to_value["train/n_updates"] == 2


def test_target_kl_stops_before_the_step_that_would_exceed_it():
    model = collected(target_kl=1e-12, learning_rate=0.1)
    seen = count_steps(model)
    model.train()
    assert len(seen) == 1, "the first minibatch has no divergence yet, the second stops the update"
    assert model._n_updates == 1


@pytest.mark.parametrize(("moved", "stops"), [(1.45, False), (1.55, True)])
def test_an_update_may_move_one_and_a_half_times_the_target(moved: float, stops: bool):
    model = collected(target_kl=0.01)
    step = PPOStep(model.engine, model.work())
    step.noted.append({"approx_kl": torch.tensor(moved * 0.01)})
    assert step.diverged() == stops


def count_steps(model) -> list[None]:
    seen: list[None] = []
    model.policy.optimizer.register_step_post_hook(lambda *_: seen.append(None))
    return seen


def test_nothing_is_read_inside_the_minibatch_loop(monkeypatch: pytest.MonkeyPatch):
    model = collected()
    model.use_engine(EngineSettings(fused_adam=True))  # SB3's own loop reads its step counter
    nothing = Statistics({}, np.zeros(0), steps=0, epochs=0)
    monkeypatch.setattr(PPOStep, "of_rollout", lambda *_: nothing)  # once per rollout
    monkeypatch.setattr("fasttrain.algos.step.reading_waits", lambda _: True)  # as on CUDA
    model.policy.set_training_mode(True)
    steps = count_steps(model)
    read = []
    for name in ("item", "cpu", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            read.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    assert model.update() is not None
    assert read == []
    assert len(steps) == 8


def test_a_single_row_left_over_is_trained_on_and_frozen_parameters_stay():
    model = collected(batch_size=79)  # 80 rows: the last minibatch has one, whose advantage has no deviation
    frozen = model.policy.value_net.weight.requires_grad_(False)
    before = copy.deepcopy(frozen)
    model.train()
    assert all(torch.isfinite(parameter).all() for parameter in model.policy.parameters())
    assert torch.equal(frozen, before)


def learned(kind: type[PPO], engine: EngineSettings | str = "torch", **kwargs: Any) -> torch.Tensor:
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    model = kind("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", engine=engine, **kwargs)
    return weights(model.learn(128))


def test_a_term_of_the_users_is_computed_though_the_loss_was_to_be_compiled():
    plain = learned(WithTerm)
    with pytest.warns(match="WithTerm.loss is overridden"):
        fast = learned(WithTerm, EngineSettings(compile_mode="default"))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)  # torch's fused Adam rounds otherwise


def test_the_entropy_has_a_gradient_for_a_loss_of_the_users():
    class Curious(PPO):
        def loss(self, batch: Any, evaluated: Any) -> Any:
            return super().loss(batch, evaluated) | {"curious": -evaluated.entropy.mean()}

    assert not torch.equal(learned(Curious), learned(PPO))
    assert torch.equal(learned(PPO, ent_coef=0.0), learned(PPO))
