"""NotedVecEnv steps as DummyVecEnv does, and what it notes leads a fresh env to where one of its envs is."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.envs import retrace
from fasttrain.envs.retrace import Retrace
from fasttrain.saving.env_state import env_state
from fasttrain.vec import stock
from fasttrain.vec.stock import NotedVecEnv


class Drift(gymnasium.Env[Any, Any]):
    """Of random length; its float64 observations are float32 in the space, and its rewards are its hidden state."""

    observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    action_space = spaces.MultiDiscrete([3, 4])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.left, self.told = self.np_random.normal(size=2), int(self.np_random.integers(2, 9)), 0.0
        return {"x": self.x.copy()}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = self.x + action * self.np_random.normal(size=2)
        self.left -= 1
        self.told += float(action[0])
        return {"x": self.x.copy()}, self.told, self.left <= 0, False, {}


def build() -> Retrace:
    return Retrace(Monitor(Drift()))


def played(envs: DummyVecEnv, steps: int) -> list[Any]:
    envs.seed(3)
    rng, seen = np.random.default_rng(0), [envs.reset()["x"]]
    actions = np.zeros((envs.num_envs, 2), np.int64)
    for _ in range(steps):
        actions[:] = rng.integers(0, [3, 4], actions.shape)  # in place, as an algorithm may
        observations, rewards, dones, _ = envs.step(actions)
        seen += [observations["x"], rewards, dones]
    return seen


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_it_steps_as_stock_and_its_notes_lead_a_fresh_env_there(monkeypatch: pytest.MonkeyPatch, rows: int):
    monkeypatch.setattr(stock, "ROWS", rows)
    for steps in range(0, 40, 3):
        envs = NotedVecEnv([build] * 3)
        pairs = zip(played(envs, steps), played(DummyVecEnv([build] * 3), steps), strict=True)
        assert all(np.array_equal(mine, stock) for mine, stock in pairs)
        assert len(envs.rows) <= max(2 * 8 + rows, steps if rows == 1000 else 0)
        for env, notes in zip(envs.envs, envs.env_method("retrace_notes"), strict=True):
            assert len(notes["actions"]) == env.steps_begun == len(env.env.rewards)  # type: ignore[attr-defined]
            other = build()
            assert other.retrace(notes, other_seed=77)["same"]
            mine, his = env.step(np.array([1, 2])), other.step(np.array([1, 2]))
            assert (mine[0]["x"] == his[0]["x"]).all()
            assert mine[1:4] == his[1:4]


def test_envs_that_were_retraced_are_noted_from_there():
    first, second = NotedVecEnv([build] * 2), NotedVecEnv([build] * 2)
    played(first, 5)
    played(second, 11)
    for env, notes in zip(second.envs, first.env_method("retrace_notes"), strict=True):
        assert env.retrace(notes, other_seed=77)["same"]
    for index, env in enumerate(second.envs):
        second._save_obs(index, first.seen(index))
        assert env.steps_begun == first.envs[index].steps_begun
    for _ in range(3):
        answers = (envs.step(np.ones((2, 2), np.int64)) for envs in (first, second))
        assert all(np.array_equal(mine, his) for mine, his in zip(*(answer[1:3] for answer in answers), strict=True))
    mine, his = env_state(first, traced=True)[1], env_state(second, traced=True)[1]
    assert mine.keys() == his.keys()
    assert all((mine[name] == his[name]).all() for name in mine)


def test_an_episode_too_long_to_repeat_has_no_notes_and_keeps_no_rows(monkeypatch: pytest.MonkeyPatch):
    for module in (stock, retrace):
        monkeypatch.setattr(module, "MOST_ACTIONS", 20)
    monkeypatch.setattr(stock, "ROWS", 10)
    monkeypatch.setattr(Drift, "step", lambda self, action: ({"x": self.x}, 0.0, False, False, {}))
    envs = NotedVecEnv([build] * 2)
    played(envs, 20)
    assert envs.env_method("retrace_notes")[1] is not None
    played(envs, 90)
    assert len(envs.rows) <= 2 * 20 + 10
    assert envs.envs[0].steps_begun == 90
    assert envs.env_method("retrace_notes") == [None, None]
