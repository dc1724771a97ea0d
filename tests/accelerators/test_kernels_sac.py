"""SAC's update without autograd: what it learns, draws and logs is what the plain path does, up to rounding."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import fasttrain
from fasttrain.accelerators.eligible import unsupported_reason
from fasttrain.accelerators.kernels_sac import KernelSACEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import ConfigError, EnvError
from toys import RandomEnv

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
KEYED = spaces.Dict({"a": BOX, "b": spaces.Box(-1.0, 1.0, (2, 2), np.float64)})
LARGE = spaces.Box(-1.0, 1.0, (4,), np.float64)


def made(
    engine: str = "torch", seen: Any = BOX, kind: Any = fasttrain.SAC, normalize: bool = False, **more: Any
) -> Any:
    acting = spaces.Box(np.array([-2.0, 0.0, -1.0], np.float32), np.array([2.0, 0.5, 1.0], np.float32))
    env: Any = DummyVecEnv([lambda: gymnasium.wrappers.TimeLimit(RandomEnv(seen, acting), 9)] * 2)
    settings: dict[str, Any] = {"learning_starts": 20, "batch_size": 32, "policy_kwargs": {"net_arch": [16, 12]}}
    policy = "MultiInputPolicy" if isinstance(seen, spaces.Dict) else "MlpPolicy"
    env = VecNormalize(env) if normalize else env
    return kind(policy, env, seed=0, device="cpu", engine=engine, **{**settings, **more})


def numbers_of(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.policy.state_dict())
    for name in ("actor", "critic"):
        optimizer = getattr(model, name).optimizer
        found |= {f"{name} {n} {key}": value for n, state in enumerate(optimizer.state.values())
                  for key, value in state.items()}  # fmt: skip
    ent_coef = model.log_ent_coef if model.ent_coef_optimizer is not None else model.ent_coef_tensor
    return {**found, "ent_coef": ent_coef.detach()}


RELU3 = {"net_arch": {"pi": [16, 8, 8], "qf": [24]}, "n_critics": 3}
TANH = {"net_arch": [16], "activation_fn": torch.nn.Tanh, "n_critics": 1}


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (BOX, {"gradient_steps": 3}),
        (LARGE, {"policy_kwargs": RELU3, "n_steps": 3, "target_update_interval": 2, "ent_coef": 0.1}),
        (KEYED, {"policy_kwargs": TANH, "ent_coef": "auto_0.5", "learning_rate": 1e-2}),
        (spaces.Discrete(3), {"policy_kwargs": {"net_arch": [40]}, "tau": 0.5, "batch_size": 301}),
        (BOX, {"normalize": True, "policy_kwargs": {"net_arch": [8, 300]}, "batch_size": 150}),
    ],
)
def test_it_learns_what_the_plain_path_learns(seen: Any, changes: dict[str, Any]):
    plain, fused = (made(engine, seen, **changes).learn(60, log_interval=None) for engine in ("torch", "kernels"))
    assert type(fused.engine) is KernelSACEngine
    assert fused.engine.gradient_updates == plain.engine.gradient_updates > 0
    expected = numbers_of(plain)
    for name, value in numbers_of(fused).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    logged = {name: value for name, value in plain.logger.name_to_value.items() if name.startswith("train/")}
    for name, value in logged.items():
        assert fused.logger.name_to_value[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    np.testing.assert_allclose(fused.replay_buffer.actions, plain.replay_buffer.actions, rtol=0, atol=1e-5)


def test_clamped_deviations_have_no_gradient():
    plain, fused = made(), made("kernels")
    for model in (plain, fused):
        model.learn(20)
        with torch.no_grad():
            model.actor.log_std.bias.copy_(torch.tensor([5.0, 0.0, -30.0]))
        np.random.seed(1)
        torch.manual_seed(1)
        model.train(1, 16)
    assert torch.equal(fused.actor.log_std.bias.detach()[[0, 2]], torch.tensor([5.0, -30.0]))
    expected = numbers_of(plain)
    averages = [name for name in expected if name.startswith("actor ") and name.endswith("exp_avg")]  # of gradients
    for name in averages:
        torch.testing.assert_close(numbers_of(fused)[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert len(averages) == 8


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_what_is_not_finite_reaches_no_weight(engine: str):
    model = made(engine)
    model.learn(30)
    before = {name: value.clone() for name, value in numbers_of(model).items()}
    model.replay_buffer.rewards[:] = np.inf
    told = "2 of 2 updates skipped: the reward of env 0 in row 0 of the replay .* inf; the actor is as it was"
    with pytest.warns(RuntimeWarning, match=told):
        model.train(2, 16)
    targets = {name for name in before if name.startswith("critic_target")}
    for name, value in numbers_of(model).items():
        assert name in targets or torch.equal(value, before[name]), name
    assert model.engine.skipped_steps == 2


def test_acting_tells_what_is_not_finite():
    model = made("kernels")
    model._setup_learn(10)
    with pytest.raises(EnvError, match="the observation of env 1 is not finite"):
        model.engine.act(np.array([[0.0] * 5, [np.nan] * 5], np.float32), None)
    with torch.no_grad():
        model.actor.mu.bias.fill_(torch.nan)
    with pytest.raises(EnvError, match="the actor's output is not finite although its inputs are: parameter actor.mu"):
        model.engine.act(np.zeros((2, 5), np.float32), None)


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_a_rollback_brings_all_that_learns_back(engine: str):
    model = made(engine)
    model.learn(30)
    guard = model.engine.guard
    guard.at_limit, guard.max_skipped, guard.say = "rollback", 0, lambda line: None
    model.train(1, 16)
    before = {name: value.clone() for name, value in numbers_of(model).items()}
    model.train(1, 16)
    model.replay_buffer.rewards[:] = np.inf
    model.train(1, 16)
    assert guard.rollbacks == 1
    for name, value in numbers_of(model).items():
        assert torch.equal(value, before[name]), name


# --- what it does not reproduce


class OwnCriticLoss(fasttrain.SAC):
    def critic_loss(self, batch: Any, evaluated: Any) -> Any:
        return super().critic_loss(batch, evaluated) | {"size": evaluated.q_values[0].square().mean()}


class OwnSampling(fasttrain.SAC):
    def _sample_action(self, *args: Any) -> Any:
        return super()._sample_action(*args)


CHANGES: dict[str, Any] = {
    "latent_pi.0 has a hook": lambda model: model.actor.latent_pi[0].register_forward_hook(lambda *_: None),
    "actor has a hook or a": lambda model: setattr(model.actor, "action_log_prob", lambda seen: seen),
    "the optimizer is RMSprop": lambda model: setattr(
        model.actor, "optimizer", torch.optim.RMSprop(model.actor.parameters())
    ),
    "SAC.critic_loss is set on the instance": lambda model: setattr(model, "critic_loss", lambda *_: {}),
    "SAC._move_targets is set on the instance": lambda model: setattr(model, "_move_targets", lambda: None),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_was_done_to_a_model_counts_from_the_next_update_on(reason: str):
    model = made("kernels")
    assert model.engine_now().kind == "kernels"
    CHANGES[reason](model)
    assert reason in str(unsupported_reason(model))
    assert model.engine_now().kind == "torch"
    assert model.engine.unsupported_reason == unsupported_reason(model)


@pytest.mark.parametrize(("kind", "name"), [(OwnCriticLoss, "critic_loss"), (OwnSampling, "_sample_action")])
def test_what_pytorch_computes(kind: Any, name: str):
    told = f"{kind.__name__}.{name} is overridden: compiled kernels compute SAC's own"
    assert str(made("kernels", kind=kind).engine.unsupported_reason).startswith(told)


def test_an_engine_is_changed_in_mid_run():
    model = made().learn(30)
    model.use_engine(EngineSettings(kind="kernels"))
    model.learn(20, reset_num_timesteps=False)
    assert model.engine.kind == "kernels"
    assert model.engine.gradient_updates == model._n_updates


def test_what_is_frozen_stays_as_it_is_while_the_rest_learns():
    model = made("kernels")
    frozen, learned = model.critic.qf1[0].bias.requires_grad_(False), model.critic.qf1[0].weight
    before = frozen.clone(), learned.detach().clone()
    model.learn(30)
    assert model.engine.kind == "torch"
    assert torch.equal(frozen, before[0])
    assert not torch.equal(learned, before[1])


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_settings_that_it_does_not_serve_are_refused(kind: str):
    with pytest.raises(ConfigError, match="SAC computes in float32, without torch.compile"):
        made(EngineSettings(kind=kind, compile_mode="default"))
