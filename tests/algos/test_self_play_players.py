"""Frozen copies act like the policy they were made of, and change only when they load other weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fasttrain
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.self_play import Player, SnapshotPool, weights_of
from fasttrain.errors import ConfigError
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


def test_an_opponent_remembers_its_own_side_of_every_game():
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model: Any = fasttrain.MaskableRecurrentPPO(
        "MlpLstmPolicy", env, n_steps=8, batch_size=20, seed=0, device="cpu", policy_kwargs={"lstm_hidden_size": 4}
    )
    pool = SnapshotPool(model, 5, size=2)
    observations, masks = seen(model, 5)
    first, second = np.array([0, 2, 3]), np.array([2, 4])
    pool.act(observations[first], masks[first], first)
    pool.episode_over(0, {})
    pool.act(observations[second], masks[second], second)

    def after(rows: list[int], states: Any = None) -> Any:
        for row in rows:
            _, states = model.predict(observations[row], states, np.array([False]), action_masks=masks[row])
        return states[0][:, 0]

    found = pool.memory_arrays()
    assert found["starts"].tolist() == [True, True, False, False, False]
    assert np.allclose(found["pi/0"][:, 2], after([2, 2]), atol=1e-6)
    assert np.allclose(found["pi/0"][:, 3], after([3]), atol=1e-6)
    assert np.allclose(found["pi/0"][:, 4], after([4]), atol=1e-6)
    assert not found["pi/0"][:, 1].any()
    kept = {name: array.copy() for name, array in found.items()}
    other = SnapshotPool(model, 5, size=2)
    other.load_memory(kept)
    assert all(np.array_equal(array, kept[name]) for name, array in other.memory_arrays().items())
    with pytest.raises(ConfigError, match=r"pi/1 of the checkpoint is float32 \(1, 3, 4\)"):
        other.load_memory({**kept, "pi/1": kept["pi/1"][:, :3]})
