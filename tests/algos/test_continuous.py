"""schedule=continuous: no transition is lost, repeated or mixed up, and lag, limits and errors are as described."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from test_grouped import NUM_ENVS, NUM_STEPS, Watch, assert_real

from fasttrain import MaskablePPO, SharedMemoryVecEnv
from fasttrain.algos.continuous import LONGEST, going_on, settle, use_continuous
from fasttrain.errors import EnvError
from fasttrain.vec.groups import WorkerGroups
from workers import CounterFactory

QUOTA = NUM_ENVS * NUM_STEPS


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedMemoryVecEnv]:
    env = SharedMemoryVecEnv([CounterFactory(number, 0.001 * (number < 2)) for number in range(NUM_ENVS)], 3)
    yield env
    env.close()


class Kept(MaskablePPO):
    """Keeps every rollout instead of learning, while the envs go on."""

    kept: Any

    def train(self) -> None:
        storage: Any = self.rollout_buffer.storage
        names = ("observations", "actions", "rewards", "episode_starts", "masks", "values", "log_probs", "advantages")
        arrays = {name: np.array(getattr(storage, name)) for name in names}
        dropped = self.collector.continuous.dropped
        self.kept.append(arrays | {"there": ~storage.left_out, "dropped": None if dropped is None else dropped.copy()})
        with going_on(self):
            time.sleep(0.02)


def model_of(env: Any, kind: type[MaskablePPO] = Kept, max_lag: int = 4, **more: Any) -> Any:
    given: dict[str, Any] = {"n_steps": NUM_STEPS, "batch_size": 30, "n_epochs": 2, "seed": 3}
    model: Any = kind("MlpPolicy", env, **(given | more))
    use_continuous(model, max_lag)
    model.kept = []
    return model


def of_env(kept: list[Any], name: str, env: int) -> Any:
    """All transitions of one env in the order in which it made them."""
    return np.concatenate([each[name][:, env][each["there"][:, env]] for each in kept])


@pytest.mark.parametrize("kernels", [False, True])
def test_every_transition_is_real_and_in_one_rollout(shared: SharedMemoryVecEnv, kernels: bool):
    model, watch = model_of(shared), Watch()
    if kernels:
        model.use_engine("kernels")
    model.learn(4 * QUOTA, watch)
    sizes = [each["there"].sum() for each in model.kept]
    assert sizes[:3] == [QUOTA] * 3
    assert QUOTA <= sizes[3] <= QUOTA + NUM_ENVS  # the last one has the steps that were under way
    for env in range(NUM_ENVS):
        columns = [of_env(model.kept, name, env) for name in ("observations", "actions", "episode_starts", "masks")]
        columns[1] = columns[1][:, 0]
        assert_real(model, env, *columns, of_env(model.kept, "rewards", env))
        assert sum(seen["dones"][env] for seen in watch.seen) == (columns[0][:, 2] == 6 + env).sum()
    assert watch.seen[-1]["num_timesteps"] == model.num_timesteps
    assert not shared.crew.stepping


def test_advantages_of_a_rollout_that_ends_at_different_steps(shared: SharedMemoryVecEnv):
    model = model_of(shared)
    model.learn(3 * QUOTA)
    first, second = model.kept[:2]
    gamma, decay = model.gamma, model.gamma * model.gae_lambda
    for env in range(NUM_ENVS):
        rewards, values, starts = (
            np.append(first[name][:, env][first["there"][:, env]], second[name][0, env])
            for name in ("rewards", "values", "episode_starts")
        )
        expected, carried = np.zeros(len(rewards) - 1), 0.0
        for step in reversed(range(len(expected))):
            carried = (
                rewards[step] - values[step] + (gamma * values[step + 1] + decay * carried) * (1 - starts[step + 1])
            )
            expected[step] = carried
        np.testing.assert_allclose(first["advantages"][:, env][first["there"][:, env]], expected, rtol=1e-4, atol=1e-4)


def test_lag_is_counted_and_what_is_too_old_is_not_learned_from(
    shared: SharedMemoryVecEnv, monkeypatch: pytest.MonkeyPatch
):
    real, model = WorkerGroups.first_ready, model_of(shared, max_lag=2)

    def without_the_last(self: WorkerGroups, groups: list[int]) -> list[int]:
        held = [group for group in groups if group != 2] if len(model.kept) < 4 else groups
        return real(self, held or groups)

    monkeypatch.setattr(WorkerGroups, "first_ready", without_the_last)
    model.learn(5 * QUOTA)
    assert [each["dropped"] is None for each in model.kept[:2]] == [True, False]
    assert [each["there"][:, 4:].sum() for each in model.kept[:4]] == [0] * 4, (
        "these envs are still in their first step"
    )
    last = model.kept[4]
    assert last["dropped"].sum() == 2
    assert last["dropped"][0, 4:].all(), "their first step is as old as the training"
    total, largest, count, too_old = model.collector.continuous.lags()
    assert (largest, too_old, count) == (4, 2, model.num_timesteps)
    assert 0 < total / count < 1.5
    # Envs that wait for the others give at most `LONGEST` times their share.
    assert max(each["there"].sum(axis=0).max() for each in model.kept) <= LONGEST * NUM_STEPS


def test_old_transitions_weigh_by_importance_and_dropped_ones_are_in_no_minibatch(shared: SharedMemoryVecEnv):
    model = model_of(shared, max_lag=1)
    model.learn(2 * QUOTA)
    merged, ours = model.reuse.merged(model), model.collector.continuous
    kept = ~model.rollout_buffer.storage.left_out
    assert len(merged.rows) == kept.sum()
    plain = model.kept[-1]["advantages"][kept]  # the policy is the same, so each weight is 1
    np.testing.assert_allclose(merged.advantages[kept], (plain - plain.mean()) / plain.std(), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        model.policy.action_net.bias += torch.tensor([0.5, 0.0, 0.0, 0.0, -0.5])
    ours.dropped = np.zeros_like(kept)
    ours.dropped[0] = kept[0]
    merged = model.reuse.merged(model)
    assert len(merged.rows) == kept.sum() - kept[0].sum()
    storage: Any = model.rollout_buffer.storage
    _, log_probs, _ = model.policy.evaluate_actions(
        torch.as_tensor(storage.observations[kept]), torch.as_tensor(storage.actions[kept][:, 0]),
        action_masks=storage.masks[kept],
    )  # fmt: skip
    np.testing.assert_allclose(merged.log_probs[kept], log_probs.detach(), rtol=1e-5)
    np.testing.assert_allclose(
        model.reuse.weights[kept], np.exp(log_probs.detach().numpy() - storage.log_probs[kept]), rtol=1e-4
    )


def test_it_learns(shared: SharedMemoryVecEnv):
    model = model_of(shared, MaskablePPO, learning_rate=3e-3, gamma=0.5)
    model.learn(12 * QUOTA)
    assert model._n_updates == 2 * 12
    with torch.no_grad():  # the reward is the action, so the largest legal action becomes likely
        probabilities = model.policy.get_distribution(torch.tensor([[0.0, 3.0, 2.0, 1.0]])).distribution.probs
    assert probabilities[0, 4] > 0.6


def test_groups_of_different_size_give_rollouts_of_the_same_size():
    env = SharedMemoryVecEnv([CounterFactory(number) for number in range(5)], 2)
    try:
        model = model_of(env)
        model.learn(400)
        for each in model.kept[:-1]:
            dropped = 0 if each["dropped"] is None else each["dropped"].sum()
            assert each["there"].sum() - dropped == 100
    finally:
        env.close()


@pytest.mark.parametrize("broken_off", [False, True])
def test_between_rollouts_something_else_may_use_the_envs(shared: SharedMemoryVecEnv, broken_off: bool):
    model = model_of(shared)

    class Settles(BaseCallback):
        def _on_rollout_start(self) -> None:
            settle(self.model)
            assert not shared.crew.stepping
            if self.num_timesteps:
                assert (self.model._last_obs == shared.slots.observations).all()
            if self.num_timesteps == QUOTA and broken_off:
                self.model._last_episode_starts[0], self.before = True, model.collector.continuous.rollout.taken[0]

        def _on_step(self) -> bool:
            return True

    callback: Any = Settles()
    model.learn(3 * QUOTA, callback)
    for env in range(NUM_ENVS):
        steps = of_env(model.kept, "observations", env)[:, 2]
        gap = np.flatnonzero(steps != (np.arange(len(steps)) + steps[0]) % (7 + env))
        assert len(gap) == 0 or (broken_off and env == 0)


def test_a_stop_by_a_callback_leaves_a_usable_env(shared: SharedMemoryVecEnv):
    model, says = model_of(shared), iter([True] * 30 + [False])
    model.learn(10 * QUOTA, lambda *_: next(says))
    assert not shared.crew.stepping
    shared.step(np.argmax(shared.env_method("action_masks"), axis=1))
    model.learn(QUOTA)
    assert model.kept[-1]["there"].sum() >= QUOTA


def test_an_error_of_an_env_in_the_thread_is_raised():
    env = SharedMemoryVecEnv([CounterFactory(number) for number in range(4)], 2)
    model = model_of(env)
    train, first_ready = model.train, WorkerGroups.first_ready

    def breaks(self: Any, groups: list[int]) -> Any:
        raise EnvError("env 1: broken")

    def then_break() -> None:
        WorkerGroups.first_ready = breaks  # type: ignore[method-assign]
        try:
            train()
        finally:
            WorkerGroups.first_ready = first_ready  # type: ignore[method-assign]

    model.train = then_break
    with pytest.raises(EnvError, match="env 1: broken"):
        model.learn(4 * QUOTA)
    env.close()
