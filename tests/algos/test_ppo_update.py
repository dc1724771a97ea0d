"""The update: what is logged, when it stops, and that nothing is read from the device in between."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from accelerated import minibatch_terms
from fasttrain.algos.engine import EngineSettings, Statistics
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.algos.step import PPOStep
from fasttrain.errors import ConfigError
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
KEYS = {
    "learning_rate", "entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss",
    "explained_variance", "n_updates", "clip_range", "clip_range_vf",
}  # fmt: skip


def collected(model_class: type = MaskablePPO, **kwargs):
    """A model whose storage is filled and which has not been trained."""
    settings = {"n_steps": 16, "batch_size": 20, "n_epochs": 2, "device": "cpu", "seed": 0} | kwargs
    model = model_class("MlpPolicy", toy_gym_vec(), **settings)
    train = model_class.train
    model.train = lambda: None
    model.learn(80)
    model.train = lambda: train(model)
    return model


@pytest.mark.parametrize("model_class", [PPO, MaskablePPO])
def test_ratio_is_one_before_the_first_step(model_class):
    model = collected(model_class)
    batch = next(model.rollout_buffer.storage.minibatches(20))
    terms = minibatch_terms(model.work(), view_of(model.policy, model.action_space), batch)
    assert abs(terms["approx_kl"].item()) < 1e-6
    assert terms["clip_fraction"].item() == 0
    # With a ratio of one the policy loss is minus the mean of the normalised advantages, which is zero.
    assert abs(terms["policy_gradient_loss"].item()) < 1e-6


def test_keys_of_the_log_are_those_of_sb3():
    model = collected(clip_range_vf=0.2)
    model.train()
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


def test_no_divergence_no_stop():
    model = collected(target_kl=1e9)
    seen = count_steps(model)
    model.train()
    assert len(seen) == 8
    assert model._n_updates == 2


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


def test_a_single_row_left_over_is_trained_on():
    model = collected(batch_size=79)  # 80 rows: the last minibatch has one, whose advantage has no deviation
    model.train()
    assert all(torch.isfinite(parameter).all() for parameter in model.policy.parameters())


def test_frozen_parameters_stay():
    model = collected()
    frozen = model.policy.value_net.weight.requires_grad_(False)
    before = copy.deepcopy(frozen)
    model.train()
    assert torch.equal(frozen, before)


def test_phases_of_the_clock():
    model = collected()
    model.collector.clock.reset()
    model.train()
    spent = model.collector.clock.snapshot()
    for phase in ("buffer", "train_fwd", "train_bwd", "optim", "log"):
        assert spent[phase] > 0, phase
    assert spent["env_step"] == 0


def test_explained_variance_is_computed_in_the_order_of_sb3():
    model = collected()
    model.train()
    storage = model.rollout_buffer.storage
    values, returns = storage.values.T.reshape(-1), storage.returns.T.reshape(-1)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert model.logger.name_to_value["train/explained_variance"] == pytest.approx(float(expected))


def test_callbacks_see_the_last_values_at_rollout_end():
    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            self.seen = self.locals["values"]

    look = Look()
    MaskablePPO("MlpPolicy", toy_gym_vec(), n_steps=4, batch_size=20, n_epochs=1, device="cpu").learn(20, look)
    assert look.seen.shape == (5, 1)


class WithTerm(PPO):
    """Adds a term to the loss; `term` makes it of PPO's own."""

    name, term = "far", staticmethod(lambda evaluated: evaluated.logits.square().mean())

    def loss(self, batch, evaluated):
        return super().loss(batch, evaluated) | {self.name: self.term(evaluated)}


def learned(kind: type[PPO], engine: EngineSettings | str = "torch", **kwargs):
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    model = kind("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", engine=engine, **kwargs)
    model.learn(128)
    return model, torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


@pytest.mark.parametrize(
    "engine", [EngineSettings(kind="kernels"), EngineSettings(compile_mode="default")], ids=["kernels", "compiled"]
)
def test_a_term_of_the_users_is_computed_whatever_is_to_be_fast(engine: EngineSettings):
    model, plain = learned(WithTerm)
    assert model.logger.name_to_value["train/far"] > 0
    assert not torch.equal(plain, learned(PPO)[1])
    warnings = nullcontext() if engine.compile_mode is None else pytest.warns(match="WithTerm.loss is overridden")
    with warnings:
        fast, weights = learned(WithTerm, engine)
    assert fast.engine.kind == "torch"
    torch.testing.assert_close(weights, plain, rtol=0, atol=1e-5)  # torch's fused Adam rounds otherwise


def test_the_entropy_has_a_gradient_for_a_loss_of_the_users():
    class Curious(WithTerm):
        term = staticmethod(lambda evaluated: -evaluated.entropy.mean())

    assert not torch.equal(learned(Curious)[1], learned(PPO)[1])
    assert torch.equal(learned(PPO, ent_coef=0.0)[1], learned(PPO)[1])


def test_a_term_of_some_minibatches_is_averaged_over_these():
    class Rare(PPO):
        def loss(self, batch, evaluated):
            self.calls = getattr(self, "calls", 0) + 1
            terms = super().loss(batch, evaluated)
            return terms | {"rare": 0.0 * terms["value_loss"] + self.calls} if self.calls % 4 == 0 else terms

    model, _ = learned(Rare)
    assert (model.calls, model.logger.name_to_value["train/rare"]) == (8, 8.0)  # of the second update, which has one


@pytest.mark.parametrize(
    ("name", "term", "told"),
    [
        (
            "far",
            lambda evaluated: evaluated.logits.square(),
            r"'far': it is a tensor of shape \(32, 2\), not",
        ),
        ("far", lambda evaluated: 0.5, "'far': it is float, not a scalar tensor"),
        ("approx_kl", lambda evaluated: evaluated.values.mean(), "'approx_kl': that name is taken"),
    ],
)
def test_a_term_that_is_none_is_told(name: str, term: Any, told: str):
    kind = type("Mine", (WithTerm,), {"name": name, "term": staticmethod(term)})
    with pytest.raises(ConfigError, match=f"Mine.loss returned the term {told}"):
        learned(kind)
