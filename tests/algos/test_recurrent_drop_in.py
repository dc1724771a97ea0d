"""RecurrentPPO as a drop-in: its buffer, groups of envs, what it refuses, and zips that stock loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback

import fasttrain
from fasttrain.errors import ConfigError
from fasttrain.vec.groups import WorkerGroups
from toys import seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)


def model_of(kind: Any = fasttrain.RecurrentPPO, env: Any = None, **settings: Any) -> Any:
    arguments = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 3, "device": "cpu"} | settings
    env = seeded_vec(lambda: gym.make("CartPole-v1")) if env is None else env
    return kind("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 8}, **arguments)


class Looks(BaseCallback):
    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.locals["rollout_buffer"]
        assert isinstance(buffer, RecurrentRolloutBuffer)
        self.states = [np.array(getattr(buffer, f"{part}_states_{net}"))
                       for part in ("hidden", "cell") for net in ("pi", "vf")]  # fmt: skip


def test_callbacks_see_the_states_as_stock_keeps_them():
    ours, stock = Looks(), Looks()
    model_of().learn(64, callback=ours)
    model_of(sb3_contrib.RecurrentPPO).learn(64, callback=stock)
    assert all(map(np.array_equal, ours.states, stock.states))
    assert np.abs(ours.states[0]).max() > 0


def test_a_zip_goes_to_stock_and_comes_back(tmp_path: Path):
    ours = model_of().learn(64)
    ours.save(tmp_path / "ours")
    stock = sb3_contrib.RecurrentPPO.load(tmp_path / "ours", env=ours.env, device="cpu")
    again = fasttrain.RecurrentPPO.load(
        tmp_path / "ours", env=seeded_vec(lambda: gym.make("CartPole-v1")), device="cpu"
    )
    seen = np.ones((4, 4), np.float32)
    expected, states = ours.predict(seen, deterministic=True)
    for loaded in (stock, again):
        actions, after = loaded.predict(seen, deterministic=True)
        assert np.array_equal(actions, expected)
        assert all(map(np.array_equal, after, states))
    assert again.learn(64, reset_num_timesteps=False).num_timesteps == 128


def test_a_last_minibatch_of_one_is_refused():
    for size in (21, 1):
        with pytest.raises(
            ConfigError, match=f"batch_size={size} with a rollout of 4 × 16 steps: the last minibatch has"
        ):
            model_of(batch_size=size)
    model_of(batch_size=21, normalize_advantage=False).learn(64)
    model_of(batch_size=22).learn(64)


class Failing(gym.Wrapper):
    """Fails in its seventh step, and so does every env that replaces it."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 7:
            raise ValueError("the seventh step")
        return super().step(action)


def short() -> gym.Env:
    return gym.make("CartPole-v1", max_episode_steps=5)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("schedule", ["lockstep", "first_ready"])
def test_memory_follows_rows_where_groups_step_apart_and_envs_are_replaced(schedule: str, fails: bool):
    """What was stored is what walking through each env's row by itself gives."""
    makes = [(lambda: Failing(short())) if fails else short] * 4
    env = fasttrain.SharedMemoryVecEnv(makes, num_workers=2, on_env_error="restart", max_restarts=100)
    try:
        model = model_of(env=env)
        model.collector.schedule = schedule
        model.learn(2 * 64)
        rollout = model.rollout_buffer
        policy = model.policy
        model.collect_rollouts(env, model._init_callback(None), rollout, 16)
        seen, starts = torch.from_numpy(rollout.observations), torch.from_numpy(rollout.episode_starts)
        assert starts.sum() > 8
        assert env.restarts == (24 if fails else 0)
        for index in range(4):
            begun = (rollout.hidden_states_pi, rollout.cell_states_pi)
            states = tuple(torch.tensor(part[0, :, index : index + 1]) for part in begun)
            for step in range(16):
                stored = rollout.hidden_states_pi[step, :, index]
                assert np.allclose(stored, states[0][:, 0], atol=1e-6), (index, step)
                with torch.no_grad():
                    _, states = policy._process_sequence(
                        seen[step, index : index + 1], states, starts[step, index : index + 1], policy.lstm_actor
                    )
            assert torch.allclose(model._last_lstm_states.pi[0][:, index], states[0][:, 0], atol=1e-6)
    finally:
        env.close()


@pytest.mark.usefixtures("forked_workers")
def test_a_stop_leaves_what_those_who_were_ahead_remember(monkeypatch: pytest.MonkeyPatch):
    """A callback ends it after four steps, when the first group is under way to its fifth, which ends its episodes."""
    env = fasttrain.SharedMemoryVecEnv([short] * 4, num_workers=2)
    try:
        model = model_of(env=env)
        model.collector.schedule = "first_ready"
        monkeypatch.setattr(WorkerGroups, "first_ready", lambda self, groups: groups[:1])  # in the order they were sent
        model.learn(100, lambda names, _: names["n_steps"] < 3)
        seen, policy = torch.from_numpy(model.rollout_buffer.observations), model.policy
        assert model._last_episode_starts.tolist() == [True, True, False, False]
        for index, steps in enumerate((5, 5, 4, 4)):
            states = tuple(torch.zeros(1, 1, part.shape[2]) for part in model._last_lstm_states.pi)
            with torch.no_grad():
                _, states = policy._process_sequence(seen[:steps, index], states, torch.zeros(steps), policy.lstm_actor)
            assert torch.allclose(model._last_lstm_states.pi[0][:, index], states[0][:, 0], atol=1e-6)
    finally:
        env.close()
