"""Frozen copies act like the policy they were made of, and change only when they load other weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fasttrain
from fasttrain.algos.self_play import Player, weights_of
from fasttrain.engines.kernels import KernelEngine
from fasttrain.engines.kernels_q import KernelQEngine
from toys import ToyGame, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)


def model_of(kind: str, fused: bool) -> Any:
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    if kind == "dqn":
        model: Any = fasttrain.DQN("MlpPolicy", env, buffer_size=200, seed=0, device="cpu")
    else:
        model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=8, batch_size=20, seed=0, device="cpu")
    if fused:
        model.use_engine("kernels")
    return model


def seen(model: Any, count: int = 400) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    observations = rng.random((count, *model.observation_space.shape)).astype(np.float32)
    masks = rng.random((count, int(model.action_space.n))) < 0.5
    masks[:, 0] = True
    return observations, masks


@pytest.mark.parametrize("fused", [False, True])
def test_draws_of_the_policys_distribution(fused: bool):
    model = model_of("ppo", fused)
    player: Any = Player(model)
    assert isinstance(player.engine, KernelEngine) == fused
    observations, masks = seen(model, 1)
    torch.manual_seed(0)
    drawn = player.act(observations.repeat(20_000, axis=0), masks.repeat(20_000, axis=0))
    distribution = model.policy.get_distribution(torch.from_numpy(observations), masks)
    expected = distribution.distribution.probs[0].detach().numpy()
    np.testing.assert_allclose(np.bincount(drawn, minlength=len(expected)) / 20_000, expected, atol=0.02)


@pytest.mark.parametrize("fused", [False, True])
def test_the_best_action_and_a_few_others(fused: bool):
    model = model_of("dqn", fused)
    player: Any = Player(model)
    assert isinstance(player.engine, KernelQEngine) == fused
    observations, masks = seen(model, 4000)
    drawn = player.act(observations, masks)
    assert masks[np.arange(4000), drawn].all()
    with torch.no_grad():
        values = model.q_net(torch.from_numpy(observations)).numpy()
    best = np.where(masks, values, -np.inf).argmax(axis=1)
    errs = (drawn != best).mean()
    assert 0.5 * Player.errs < errs <= Player.errs


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
@pytest.mark.parametrize("fused", [False, True])
def test_only_loading_changes_it(kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Player, "errs", 0.0)
    model = model_of(kind, fused)
    player = Player(model)
    observations, masks = seen(model)

    def acts() -> Any:
        torch.manual_seed(0)
        return player.act(observations, masks)

    before = acts()
    old = weights_of(model)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    np.testing.assert_array_equal(acts(), before)
    player.load(weights_of(model))
    assert (acts() != before).any()
    player.load(old)
    np.testing.assert_array_equal(acts(), before)
