"""The DQN update: the kernels and torch give the same weights, and prioritized batches are weighted and rated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import fasttrain
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.q_networks import DuelingDQNPolicy
from fasttrain.errors import EnvError
from toys import RandomEnv, ToyGame, seeded_vec

SETTINGS: dict[str, Any] = {
    "learning_starts": 10_000,  # `train` is called by hand
    "batch_size": 32,
    "buffer_size": 600,
    "learning_rate": 1e-3,
    "seed": 0,
    "device": "cpu",
    "policy_kwargs": {"net_arch": [16, 16]},
}


def filled(fused: bool, **changes: Any) -> Any:
    """A model that has played 400 random steps and whose target net is another one than the online net."""
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = fasttrain.DQN("MlpPolicy", env, **{**SETTINGS, **changes})
    model.learn(400)
    with torch.no_grad():
        for parameter in model.q_net_target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if fused:
        model.use_engine("kernels")
    return model


@pytest.mark.parametrize("double_q", [False, True])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [None, {"alpha": 0.6, "beta": 0.5}])
def test_kernels_and_torch_give_the_same_update(double_q: bool, loss: str, n_steps: int, prioritized: Any):
    ends = []
    for fused in (False, True):
        torch.manual_seed(5)
        model = filled(fused, double_q=double_q, loss=loss, n_steps=n_steps, prioritized=prioritized)
        np.random.seed(1)
        for _ in range(3):  # one batch each: a block of several draws its random numbers in another order
            model.train(1, 32)
        assert isinstance(model.engine, KernelQEngine) == fused
        ends.append(model)
    for (name, eager), kernels in zip(
        ends[0].policy.state_dict().items(), ends[1].policy.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(kernels, eager, rtol=0, atol=2e-6, msg=name)
    logged = [model.logger.name_to_value["train/loss"] for model in ends]
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)
    if prioritized is not None:
        np.testing.assert_allclose(ends[1].replay_buffer.priorities, ends[0].replay_buffer.priorities, rtol=1e-3)


@pytest.mark.parametrize("gamma", [0.3, 0.9])
def test_kernels_discount_by_the_gamma_of_the_model(gamma: float):
    """Not by that of a one-step buffer, as in stock; it may be changed while training goes on."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(5)
        model = filled(fused, gamma=0.9)
        model.gamma = gamma
        np.random.seed(1)
        model.train(1, 32)
        ends.append(model.policy.state_dict())
    for name, eager in ends[0].items():
        torch.testing.assert_close(ends[1][name], eager, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_counts_and_log(fused: bool):
    model = filled(fused)
    model.train(4, 16)
    assert model.engine.gradient_updates == 4
    assert model.logger.name_to_value["train/n_updates"] == 4
    assert model.policy.optimizer.state[next(model.q_net.parameters())]["step"] == 4


def test_dueling_nets_have_kernels():
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = fasttrain.DQN(DuelingDQNPolicy, env, **SETTINGS)
    model.use_engine("kernels")
    model.learn(100)
    before = model.q_net.value_net.weight.detach().clone()
    model.train(2, 16)
    assert model.engine.dueling
    assert not torch.equal(model.q_net.value_net.weight, before)


def test_learned_rates_follow_the_schedule():
    model = filled(True, learning_rate=lambda left: 1e-3 * left)
    model._current_progress_remaining = 0.25
    model.train(1, 16)
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)


def test_a_loss_that_is_not_finite_is_an_error():
    model = filled(True)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    model.replay_buffer.rewards[:] = np.inf
    with pytest.raises(EnvError, match="at step .*: the loss is not finite .* lower the learning rate"):
        model.train(1, 16)


@pytest.mark.parametrize("dueling", [False, True])
def test_sub_actions_have_kernels_too(dueling: bool):
    def make() -> Any:
        return RandomEnv(spaces.Box(-1, 1, (4,), np.float32), spaces.MultiDiscrete([3, 4, 2]))

    ends = []
    for fused in (False, True):
        torch.manual_seed(3)
        policy: Any = DuelingDQNPolicy if dueling else "MlpPolicy"
        model = fasttrain.DQN(policy, seeded_vec(make), **SETTINGS)
        model.learn(400)
        if fused:
            model.use_engine("kernels")
        np.random.seed(1)
        for _ in range(3):
            model.train(1, 32)
        assert isinstance(model.engine, KernelQEngine) == fused
        ends.append(model.policy.state_dict())
    for name, eager in ends[0].items():
        torch.testing.assert_close(ends[1][name], eager, rtol=0, atol=2e-6, msg=name)


def test_a_step_that_overflowed_is_skipped_and_counted():
    model = filled(False)
    model.use_engine(EngineSettings(amp_dtype=torch.float16))
    model.engine_now().precision.scaler._init_scale = 1e30
    before = [parameter.detach().clone() for parameter in model.q_net.parameters()]
    model.train(3, 16)
    assert model.engine.skipped_steps == 3
    assert model.engine.gradient_updates == 0
    assert model.logger.name_to_value["train/skipped_steps"] == 3
    for parameter, old in zip(model.q_net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
