"""Updates on several rollouts: advantages and weights of the older ones, ends of episodes, and the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.algos.reuse import Reuse
from fasttrain.buffers.rollout import advantages_of
from plain_env import PlainEnv

T, N = 6, 3


class Wander(PlainEnv):
    """Observes random numbers and pays them; every other episode is truncated."""

    observation_space = spaces.Box(-20, 20, (2,), np.float32)

    def seen(self) -> Any:
        return self.np_random.normal(size=2).astype(np.float32)

    def paid(self, action: Any) -> float:
        return float(self.np_random.normal() + action)


def made(count: int, **settings: Any) -> Any:
    envs = DummyVecEnv([Wander] * N)
    envs.seed(0)
    given = {"n_steps": T, "batch_size": T * N, "n_epochs": 2, "seed": 1, "device": "cpu", **settings}
    model = fasttrain.PPO("MlpPolicy", envs, **given)
    model.reuse = Reuse(count)
    return model


def test_a_rollout_of_the_same_policy_counts_as_the_newest_does():
    model = made(2, learning_rate=0.0, normalize_advantage=False)
    model.learn(T * N)
    first = {
        name: getattr(model.rollout_buffer.storage, name).copy() for name in ("advantages", "returns", "log_probs")
    }
    model.learn(T * N, reset_num_timesteps=False)
    storage = model.reuse.storage
    np.testing.assert_allclose(model.reuse.weights, 1.0, rtol=1e-6)
    for name, kept in first.items():
        np.testing.assert_allclose(getattr(storage, name)[:, :N], kept, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(getattr(storage, name)[:, N:], getattr(model.rollout_buffer.storage, name))


def plainly(rewards: Any, values: Any, last: float, ratios: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    """Advantages and targets of one trajectory without ends, by the sums of the paper (Espeholt et al. 2018)."""
    after = [*values[1:], last]
    deltas = [r + gamma * v - now for r, v, now in zip(rewards, after, values, strict=True)]
    cut = np.minimum(ratios, 1.0)
    advantages = [
        sum((gamma * lam) ** (t - s) * np.prod(cut[s + 1 : t + 1]) * deltas[t] for t in range(s, len(rewards)))
        for s in range(len(rewards))
    ]
    return np.array(advantages), values + cut * advantages


def test_older_rollouts_are_rated_by_the_policy_as_it_is_now():
    model = made(2, learning_rate=0.03, normalize_advantage=False, n_epochs=5)
    model.learn(T * N)
    old = model.reuse
    rewards, behaviour = old.storage.rewards[:, :N].copy(), old.behaviour[:, :N].copy()
    starts, observed = old.storage.episode_starts[:, :N].copy(), old.storage.observations[:, :N].copy()
    actions, last_obs = old.storage.actions[:, :N, 0].copy(), model._last_obs.copy()
    assert not starts[1:].any()  # one episode, whose end is after the rollout
    model.collect_rollouts(model.env, model._init_callback(None), model.rollout_buffer, T)
    old.merged(model)
    with torch.no_grad():
        values, log_probs, _ = model.policy.evaluate_actions(
            torch.as_tensor(observed).reshape(-1, 2), torch.as_tensor(actions).reshape(-1).long()
        )
        last = model.policy.predict_values(torch.as_tensor(last_obs)).numpy().reshape(-1)
    values, ratios = values.numpy().reshape(T, N), np.exp(log_probs.numpy().reshape(T, N) - behaviour)
    assert np.ptp(ratios) > 0.1
    for env in range(N):
        wanted, targets = plainly(rewards[:, env], values[:, env], last[env], ratios[:, env], 0.99, 0.95)
        np.testing.assert_allclose(old.storage.advantages[:, env], wanted * ratios[:, env], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(old.storage.returns[:, env], targets, rtol=1e-4, atol=1e-5)


def test_an_end_within_a_rollout_equals_two_rollouts():
    draws = np.random.default_rng(0)
    rewards, values, traces = draws.normal(size=(3, 8, 1)).astype(np.float32)
    traces = np.abs(traces)
    starts = np.zeros((8, 1), np.float32)
    starts[5] = 1.0
    none, last = np.zeros(1, np.bool_), np.ones(1, np.float32)
    whole = advantages_of(rewards, values, starts, last, none, 0.9, 0.8, traces=traces)
    ends = np.ones(1, np.bool_)
    first = advantages_of(rewards[:5], values[:5], starts[:5], last * 99, ends, 0.9, 0.8, traces=traces[:5])
    second = advantages_of(rewards[5:], values[5:], starts[5:] * 0, last, none, 0.9, 0.8, traces=traces[5:])
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))


def test_a_step_that_is_left_out_passes_on_the_trace_of_the_next():
    draws = np.random.default_rng(0)
    rewards, values = draws.normal(size=(2, 5, 1)).astype(np.float32)
    traces = np.array([[1.0], [0.5], [1.0], [0.25], [0.7]], np.float32)
    none, last, starts = np.zeros(1, np.bool_), np.ones(1, np.float32), np.zeros((5, 1), np.float32)
    left_out = np.array([[False], [False], [True], [False], [False]])
    kept = [0, 1, 3, 4]
    with_rest = advantages_of(rewards, values, starts, last, none, 0.9, 0.8, left_out, none, traces=traces)
    joined = rewards.copy()
    joined[1] += rewards[2]
    short = advantages_of(joined[kept], values[kept], starts[kept], last, none, 0.9, 0.8, traces=traces[kept])
    np.testing.assert_allclose(with_rest[kept], short, rtol=1e-6)


def test_advantages_are_normalised_by_their_weights_over_all_rollouts():
    model = made(3, learning_rate=0.02)
    model.learn(3 * T * N)
    reuse = model.reuse
    advantages, weights = reuse.storage.advantages.astype(np.float64), reuse.weights.astype(np.float64)
    each = advantages / weights
    assert np.average(each, weights=weights) == pytest.approx(0.0, abs=1e-5)
    assert np.average(each**2, weights=weights) == pytest.approx(1.0, abs=1e-4)
    assert (weights[:, 2 * N :] == 1.0).all()
    assert np.ptp(weights[:, :N]) > 0.1


def test_the_newest_rollout_takes_the_place_of_the_oldest():
    model = made(2)
    seen = []
    for _ in range(3):
        model.learn(T * N, reset_num_timesteps=False)
        seen.append(model.rollout_buffer.storage.observations.copy())
    np.testing.assert_array_equal(model.reuse.storage.observations, np.concatenate([seen[2], seen[1]], axis=1))
    assert len(model.reuse.storage.rows) == 2 * T * N
    fresh = made(4)
    fresh.learn(T * N)
    assert sorted(fresh.reuse.storage.rows % (4 * N)) == sorted(T * [0, 1, 2])


def test_a_saved_model_is_a_stock_one(tmp_path: Any):
    model = made(2)
    model.learn(2 * T * N)
    model.save(tmp_path / "model.zip")
    assert fasttrain.PPO.load(tmp_path / "model.zip").reuse is None
