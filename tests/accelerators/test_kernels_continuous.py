"""Continuous actions in compiled kernels: an update is autograd's, actions come from the policy's Gaussian."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces

import fasttrain
from accelerated import filled, weights
from fasttrain.accelerators.eligible import unsupported_reason
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
OTHER = {"log_std_init": -1.0, "net_arch": {"pi": [8], "vf": [20, 4]}}
OBSERVED = spaces.Box(-1, 1, (5,), np.float32)


def made(kind: Any = fasttrain.PPO, actions: spaces.Space[Any] = spaces.Box(-1, 1, (3,)), **options: Any) -> Any:  # noqa: B008
    policy = "MlpLstmPolicy" if issubclass(kind, fasttrain.RecurrentPPO) else "MlpPolicy"
    env = seeded_vec(lambda: RandomEnv(OBSERVED, actions, cut=True))
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "ent_coef": 0.02, "seed": 0, "device": "cpu"}
    return kind(policy, env, **(settings | options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (fasttrain.PPO, {}),
        (fasttrain.PPO, {"clip_range_vf": 0.1, "policy_kwargs": OTHER}),
        (fasttrain.PPO, {"target_kl": 0.1, "learning_rate": 1e-2, "n_epochs": 9, "normalize_advantage": False}),
        (fasttrain.RecurrentPPO, {"policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [8]}}),
    ],
    ids=["plain", "other sizes", "target_kl", "recurrent"],
)  # fmt: skip
def test_an_update_is_autograds(kind: Any, options: dict[str, Any]):
    ends = []
    for engine in ("torch", "kernels"):
        model = filled(made(kind, **options))
        model.use_engine(engine)
        with torch.no_grad():
            model.policy.log_std += torch.tensor([0.3, -0.2, 0.0])  # so that ratios are not 1
        np.random.seed(3)
        model.train()
        assert model.engine.kind == engine, model.engine.unsupported_reason
        ends.append(model)
    eager, fused = ends
    torch.testing.assert_close(weights(fused), weights(eager), rtol=0, atol=2e-5)
    assert fused.engine.gradient_updates == eager.engine.gradient_updates > 0
    log, reference = fused.logger.name_to_value, eager.logger.name_to_value
    assert log.keys() == reference.keys()
    for key in reference:
        assert log[key] == pytest.approx(reference[key], rel=2e-3, abs=2e-5), key


def test_actions_are_drawn_from_the_policys_gaussian():
    model = made(engine="kernels")
    model.engine.begin()
    observation = np.linspace(-1, 1, 5, dtype=np.float32)
    acted = model.engine.act(np.tile(observation, (4000, 1)), None)
    policy, stored = model.policy, acted.stored
    distribution = policy.get_distribution(torch.from_numpy(observation[None])).distribution
    torch.testing.assert_close(stored.actions.mean(0), distribution.mean[0], rtol=0, atol=0.06)
    torch.testing.assert_close(stored.actions.std(0), distribution.stddev[0], rtol=0.05, atol=0)
    values, log_probs, _ = policy.evaluate_actions(stored.observations[:7], stored.actions[:7])
    torch.testing.assert_close(stored.log_probs[:7], log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stored.values[:7], values, rtol=1e-4, atol=1e-5)
    assert acted.actions.dtype == np.float32
    assert acted.actions.shape == (4000, 3)
    np.testing.assert_allclose(model.engine.values(observation[None]), values[:1, 0].detach(), rtol=1e-4)


def test_it_learns_and_stock_goes_on_from_its_zip(tmp_path):
    model = made(engine="kernels").learn(160)
    assert model.engine.kind == "kernels"
    model.save(tmp_path / "model")
    stock = stable_baselines3.PPO.load(tmp_path / "model", env=model.get_env(), device="cpu").learn(80)
    assert stock.num_timesteps >= 80
    again = made(engine="kernels").learn(160)
    assert torch.equal(weights(model), weights(again)), "the same seed, the same numbers"


class Softer(fasttrain.PPO):
    """A user's term that reads the means."""

    def loss(self, batch: Any, evaluated: Any) -> dict[str, torch.Tensor]:
        return super().loss(batch, evaluated) | {"small": evaluated.logits.square().mean()}


def test_what_is_not_reproduced_stays_on_torch():
    own = made(Softer, engine="kernels")
    assert "Softer.loss is overridden" in own.engine.unsupported_reason
    assert own.learn(80).logger.name_to_value["train/small"] > 0
    for model in (made(use_sde=True), made(actions=spaces.Box(-1, 1, (2, 2)))):
        assert "the policy is not SB3's own, or its actions are neither" in unsupported_reason(model)
    frozen = made(engine="kernels")
    frozen.policy.log_std.requires_grad = False
    assert unsupported_reason(frozen) == "the parameter log_std is frozen"


def test_without_a_guard_no_action_is_drawn_from_means_that_are_not_finite():
    model = made()
    model.engine.guard = None
    with torch.no_grad():
        model.policy.action_net.bias[0] = torch.nan
    with pytest.raises(ValueError, match="Expected parameter"):  # torch's words
        model.engine.act(np.zeros((2, 5), np.float32), None)
