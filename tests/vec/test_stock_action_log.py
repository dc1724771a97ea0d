"""ActionLogVecEnv steps as DummyVecEnv does, and what it notes leads a fresh env to where one of its envs is."""

from __future__ import annotations

import signal
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.envs import retrace
from fasttrain.envs.retrace import Retrace
from fasttrain.envs.user_code import process_settings
from fasttrain.errors import EnvError
from fasttrain.saving.env_state import env_state
from fasttrain.vec import stock
from fasttrain.vec.base import close_envs
from fasttrain.vec.stock import ActionLogVecEnv
from plain_env import PlainEnv


class Drift(PlainEnv):
    """Of random length; its float64 observations are float32 in the space, and its rewards are its hidden state."""

    observation_space = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    action_space = spaces.MultiDiscrete([3, 4])

    def seen(self) -> Any:
        if self.time == 0:
            self.x, self.length, self.given = self.np_random.normal(size=2), int(self.np_random.integers(2, 9)), 0.0
        return {"x": self.x.copy()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = self.x + action * self.np_random.normal(size=2)
        return super().step(action)

    def paid(self, action: Any) -> float:
        self.given += float(action[0])
        return self.given


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
    monkeypatch.setattr(stock, "MIN_ROWS", rows)
    for steps in range(0, 40, 3):
        envs = ActionLogVecEnv([build] * 3)
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


class Telling(gymnasium.Env[Any, Any]):
    """It writes each observation and each info into the same array and list, as envs may."""

    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen, self.said, self.steps = np.zeros(2, np.float64), [0], 0
        return self.seen, {"said": self.said}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        self.steps += 1
        self.seen += self.np_random.random(2) / 3
        self.said[0] = int(action)
        told: dict[str, Any] = {"said": self.said} if action else {"step": self.steps, "share": np.float32(action)}
        return self.seen, np.float64(self.seen[0]), np.bool_(self.steps == 7), self.steps == 5 and action == 2, told


def test_all_it_returns_is_what_stock_returns_and_no_later_step_changes_it():
    mine, theirs = ActionLogVecEnv([lambda: Retrace(Monitor(Telling()))] * 3), DummyVecEnv([Telling] * 3)
    for envs in (mine, theirs):
        envs.seed(5)
    answers: list[list[Any]] = [[mine.reset()], [theirs.reset()]]
    rng = np.random.default_rng(1)
    for _ in range(40):
        actions = rng.integers(0, 3, 3)
        for answer, envs in zip(answers, (mine, theirs), strict=True):
            answer += list(envs.step(actions))
    for here, there in zip(*answers, strict=True):
        if isinstance(there, list):
            for told, expected in zip(here, there, strict=True):
                told.pop("episode", None)  # Monitor's
                assert told.keys() == expected.keys()
                for key, value in expected.items():
                    assert type(told[key]) is type(value)
                    assert np.array_equal(told[key], value)
        else:
            assert here.dtype == there.dtype
            assert np.array_equal(here, there)
    assert any("terminal_observation" in info for part in answers[1] if isinstance(part, list) for info in part)


def test_envs_that_were_retraced_are_noted_from_there():
    first, second = ActionLogVecEnv([build] * 2), ActionLogVecEnv([build] * 2)
    played(first, 5)
    played(second, 11)
    for env, notes in zip(second.envs, first.env_method("retrace_notes"), strict=True):
        assert env.retrace(notes, other_seed=77)["same"]
    for index, env in enumerate(second.envs):
        second._save_obs(index, first.observation_of(index))
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
    monkeypatch.setattr(stock, "MIN_ROWS", 10)
    monkeypatch.setattr(Drift, "step", lambda self, action: ({"x": self.x}, 0.0, False, False, {}))
    envs = ActionLogVecEnv([build] * 2)
    played(envs, 20)
    assert envs.env_method("retrace_notes")[1] is not None
    played(envs, 90)
    assert len(envs.rows) <= 2 * 20 + 10
    assert envs.envs[0].steps_begun == 90
    assert envs.env_method("retrace_notes") == [None, None]


class Patience(PlainEnv):
    """Ends at its third step, terminated or cut, and returns its own array, or `last`; `spoil` is called in reset()."""

    observation_space = spaces.Box(0, 9, (2,), np.float32)

    def __init__(self, cut: bool = False, spoil: Any = None, **last: Any) -> None:
        self.state = np.zeros(2, np.float32)
        self.cut, self.spoil, self.last = cut, spoil, last

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.state[:] = 0
        if self.spoil:
            self.spoil()
        return self.state, {}

    def step(self, action: Any) -> Any:
        self.state += 1
        end = self.state[0] == 3
        seen = self.last["seen"] if end and self.last else self.state
        return seen, 1.0, bool(end and not self.cut), bool(end and self.cut), {}

    def close(self) -> None:
        raise AttributeError("no viewer")


def last_of(env: Patience, copies: bool) -> Any:
    envs = ActionLogVecEnv([lambda: Retrace(Monitor(env), copies)])
    envs.seed(0)
    envs.reset()
    for _ in range(3):
        _, _, dones, infos = envs.step(np.zeros(1, np.int64))
    assert dones[0]
    return infos[0]["terminal_observation"]


def test_an_env_that_hands_out_its_own_array_keeps_its_last_observation_where_it_is_copied():
    assert last_of(Patience(cut=True), copies=True).tolist() == [3, 3]
    assert last_of(Patience(cut=True), copies=False).tolist() == [0, 0]  # SB3's own


@pytest.mark.parametrize("seen", [None, np.zeros(3), [], np.full(2, np.nan)])
def test_the_last_observation_counts_only_where_the_episode_was_cut(seen: Any):
    assert last_of(Patience(seen=seen), copies=True).tolist() == [0, 0]
    with pytest.raises(EnvError, match="the episode was truncated"):
        last_of(Patience(cut=True, seen=seen), copies=False)


def test_a_close_that_raises_is_told_and_called_once():
    envs = ActionLogVecEnv([lambda: Retrace(Monitor(Patience()))] * 2)
    assert close_envs(envs).startswith("AttributeError: no viewer (")
    assert close_envs(envs).startswith("AttributeError: no viewer (")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("numpy.seterr", lambda: np.seterr(all="raise")),
        ("torch.set_default_dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("torch.set_grad_enabled", lambda: torch.set_grad_enabled(False)),
        ("sys.setrecursionlimit", lambda: sys.setrecursionlimit(500)),
        ("the handler of SIGINT", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)),
    ],
)
def test_what_an_env_changes_in_the_process_that_trains_is_put_back(name: str, spoil: Any, capsys: Any):
    before = process_settings()
    last_of(Patience(spoil=spoil), copies=False)
    assert process_settings() == before
    said = capsys.readouterr().err
    assert said.count("fasttrain: warning") == 1
    assert name in said


def test_what_spoils_nothing_is_left_as_it_is(capsys: Any):
    limit = sys.getrecursionlimit()
    try:
        last_of(Patience(spoil=lambda: (np.seterr(divide="ignore"), sys.setrecursionlimit(limit + 5000))), copies=False)
        assert sys.getrecursionlimit() == limit + 5000
        assert np.geterr()["divide"] == "ignore"
    finally:
        sys.setrecursionlimit(limit)
        np.seterr(divide="warn")
    assert capsys.readouterr().err == ""
