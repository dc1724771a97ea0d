"""Collecting in groups stores what lockstep would have: every row is checked against the env's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain import MaskablePPO, SharedMemoryVecEnv
from fasttrain.algos.grouped import groups_of
from fasttrain.buffers import rollout
from fasttrain.vec.groups import WorkerGroups
from workers import CounterFactory

NUM_ENVS, NUM_STEPS = 6, 20


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedMemoryVecEnv]:
    env = SharedMemoryVecEnv([CounterFactory(number) for number in range(NUM_ENVS)], num_workers=3)
    yield env
    env.close()


class Watch(BaseCallback):
    """Notes what a callback sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.seen.append({"num_timesteps": self.num_timesteps, "dones": self.locals["dones"].copy()})
        infos, dones = self.locals["infos"], self.locals["dones"]
        assert [("episode" in info) for info in infos] == dones.tolist()
        return True


def assert_real(model: Any, env: int, observations: Any, actions: Any, starts: Any, masks: Any, rewards: Any) -> None:
    """Transitions of one env, in the order in which it made them; rewards of cut ends have the value behind them."""
    (number, episode, steps, last), length = np.moveaxis(observations, -1, 0), 7 + env
    within = steps[1:] > 0
    assert (number == env).all()
    assert (steps == np.arange(len(steps)) % length).all()
    assert (np.diff(episode) == ~within).all()
    assert (last[1:][within] == actions[:-1][within]).all()
    assert (starts == (steps == 0)).all()
    assert (masks == (np.arange(5) != (steps % 5)[:, None])).all()
    assert (actions != steps % 5).all(), "an illegal action"
    cut, expected = (steps == length - 1) & (env % 2 == 1), (actions + env / 10).astype(np.float32)
    finals = torch.from_numpy(np.stack([number, episode, steps + 1, actions], 1)[cut].astype(np.float32))
    with torch.no_grad():
        expected[cut] += model.gamma * model.policy.predict_values(finals).numpy()[:, 0]
    np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-6)


def model_of(env: SharedMemoryVecEnv, schedule: str, kernels: bool = False) -> MaskablePPO:
    model = MaskablePPO("MlpPolicy", env, n_steps=NUM_STEPS, batch_size=NUM_ENVS * NUM_STEPS, n_epochs=1, seed=3)
    model.collector.schedule = schedule
    if kernels:
        model.use_engine("kernels")
    return model


@pytest.mark.parametrize("kernels", [False, True])
def test_every_stored_row_is_a_real_transition(shared: SharedMemoryVecEnv, kernels: bool):
    model, watch, total = model_of(shared, "first_ready", kernels), Watch(), NUM_ENVS * NUM_STEPS
    policy = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(total, watch)
    model.policy.load_state_dict(policy)  # what was acted with is what the policy of the time says
    storage: Any = model.rollout_buffer.storage
    actions = storage.actions[..., 0]
    for env in range(NUM_ENVS):
        columns = (storage.observations, actions, storage.episode_starts, storage.masks, storage.rewards)
        assert_real(model, env, *(column[:, env] for column in columns))
    with torch.no_grad():
        values, log_probs, _ = model.policy.evaluate_actions(
            torch.as_tensor(storage.observations).reshape(total, -1), torch.as_tensor(actions).reshape(-1),
            action_masks=storage.masks.reshape(total, -1),
        )  # fmt: skip
    np.testing.assert_allclose(storage.values.reshape(-1), values.reshape(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(storage.log_probs.reshape(-1), log_probs, rtol=1e-5, atol=1e-6)
    # The callback saw every step once, in order, with all envs.
    assert [seen["num_timesteps"] for seen in watch.seen] == [NUM_ENVS * (t + 1) for t in range(NUM_STEPS)]
    assert (np.array([seen["dones"] for seen in watch.seen])[:-1] == storage.episode_starts[1:]).all()


def test_what_lies_on_the_device_is_read_by_the_row_and_where_an_episode_was_cut(
    shared: SharedMemoryVecEnv, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WorkerGroups, "first_ready", lambda self, groups: groups[:1])  # in the order they were sent
    model, read, host = model_of(shared, "first_ready"), [], rollout._host
    monkeypatch.setattr(model, "train", lambda: None)
    monkeypatch.setattr(rollout, "_host", lambda tensor: read.append(tuple(tensor.shape)) or host(tensor))
    model.learn(NUM_ENVS * NUM_STEPS)
    lengths = 7 + np.arange(NUM_ENVS)  # odd envs are cut; two envs are a group
    cut = {(env // 2, step) for env in (1, 3, 5) for step in range(1, NUM_STEPS + 1) if step % lengths[env] == 0}
    assert sorted(read) == sorted(
        [(NUM_ENVS,)] * (2 * NUM_STEPS + len(cut))  # values and log-probabilities for the callback, values of the cut
        + [(NUM_ENVS, 1)] * NUM_STEPS  # actions for the callback; the values after the last step are the engine's
        + [(NUM_STEPS, NUM_ENVS)]  # values, for the advantages
    )


def test_rollouts_follow_on_each_other_and_on_lockstep(shared: SharedMemoryVecEnv):
    model = model_of(shared, "first_ready")
    model.learn(NUM_ENVS * NUM_STEPS)
    before = model.rollout_buffer.observations[-1, :, 2].copy()
    model.collector.schedule = "lockstep"
    model.learn(NUM_ENVS * NUM_STEPS, reset_num_timesteps=False)
    model.collector.schedule = "first_ready"
    lengths = 7 + np.arange(NUM_ENVS)
    after = model.rollout_buffer.observations[0, :, 2]
    assert (after == (before + 1) % lengths).all()
    last = model.rollout_buffer.observations[-1, :, 2].copy()
    model.learn(NUM_ENVS * NUM_STEPS, reset_num_timesteps=False)
    assert (model.rollout_buffer.observations[0, :, 2] == (last + 1) % lengths).all()


def test_a_callback_stops_in_the_middle_and_the_env_is_usable(shared: SharedMemoryVecEnv):
    model = model_of(shared, "first_ready")
    says = iter([True] * 4 + [False])
    model.learn(10 * NUM_ENVS * NUM_STEPS, lambda *_: next(says))
    assert next(says, None) is None
    assert not shared.crew.stepping
    shared.step(np.argmax(shared.env_method("action_masks"), axis=1))


def test_without_workers_to_group_all_step_together(shared: SharedMemoryVecEnv):
    model = model_of(shared, "first_ready")
    assert len(groups_of(model, shared).rows) == 3, "every worker a group"
    assert groups_of(model_of(shared, "lockstep"), shared) is None
    assert groups_of(model, object()) is None
