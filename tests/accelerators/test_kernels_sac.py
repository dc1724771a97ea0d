"""SAC's update without autograd, where numbers are extreme; test_kernels.py compares whole updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerated import numbers_of, toy_sac
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import ConfigError, EnvError


def test_clamped_deviations_have_no_gradient():
    plain, fused = (toy_sac(engine=engine, policy_kwargs={"net_arch": [16, 12]}) for engine in ("torch", "kernels"))
    for model in (plain, fused):
        model.learn(20)
        with torch.no_grad():
            model.actor.log_std.bias.copy_(torch.tensor([5.0, 0.0, -30.0]))
        np.random.seed(1)
        torch.manual_seed(1)
        model.train(1, 16)
    assert torch.equal(fused.actor.log_std.bias.detach()[[0, 2]], torch.tensor([5.0, -30.0]))
    expected = numbers_of(plain)
    averages = [name for name in expected if name.startswith("optimizer 0 ") and name.endswith("exp_avg")]
    for name in averages:
        torch.testing.assert_close(numbers_of(fused)[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert len(averages) == 8


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_what_is_not_finite_reaches_no_weight(engine: str):
    model = toy_sac(engine=engine)
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
    model = toy_sac(engine="kernels")
    model._setup_learn(10)
    with pytest.raises(EnvError, match="the observation of env 1 is not finite"):
        model.engine.act(np.array([[0.0] * 5, [np.nan] * 5], np.float32), None)
    with torch.no_grad():
        model.actor.mu.bias.fill_(torch.nan)
    with pytest.raises(EnvError, match="the actor's output is not finite although its inputs are: parameter actor.mu"):
        model.engine.act(np.zeros((2, 5), np.float32), None)


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_a_rollback_brings_all_that_learns_back(engine: str):
    model = toy_sac(engine=engine)
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


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_settings_that_it_does_not_serve_are_refused(kind: str):
    with pytest.raises(ConfigError, match="SAC computes in float32, without torch.compile"):
        toy_sac(engine=EngineSettings(kind=kind, compile_mode="default"))
