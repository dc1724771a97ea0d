"""scripts/memory_envs.py: what is seen, what is paid, and that no more is told."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("memory_envs")


def walked(env: Any, actions: list[int], seed: int) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Observations, rewards and the last info of an episode that is over after just these actions."""
    seen, rewards, info = [env.reset(seed=seed)[0]], [], {}
    for at, action in enumerate(actions):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (terminated or truncated) == (at == len(actions) - 1)
        seen.append(observation)
        rewards.append(reward)
    return seen, rewards, info


def seed_with(env: Any, goal: int) -> int:
    def goal_of(seed: int) -> int:
        env.reset(seed=seed)
        return int(env.goal)

    return next(seed for seed in range(20) if goal_of(seed) == goal)


def test_only_the_entrance_of_a_t_maze_tells_where_the_goal_is(envs: ModuleType) -> None:
    env = envs.t_maze(3)
    paths = {}
    for goal in (envs.LEFT, envs.RIGHT):
        seen, rewards, info = walked(env, [envs.AHEAD] * 3 + [goal], seed_with(env, goal))
        assert rewards == [0.0, 0.0, 0.0, 1.0]
        assert info == {"is_win": True}
        paths[goal] = np.stack(seen)
    left, right = paths[envs.LEFT], paths[envs.RIGHT]
    assert (left[0] != right[0]).any()
    np.testing.assert_array_equal(left[1:], right[1:])
    np.testing.assert_array_equal(left[1:4], [envs.CORRIDOR, envs.CORRIDOR, envs.JUNCTION])


def test_walls_wrong_turns_and_the_limit_of_steps(envs: ModuleType) -> None:
    env = envs.t_maze(1)
    seed = seed_with(env, envs.LEFT)
    _, rewards, info = walked(env, [envs.LEFT, envs.AHEAD, envs.AHEAD, envs.RIGHT], seed)
    assert rewards == [-0.1, 0.0, -0.1, -0.1]
    assert info == {"is_win": False}
    _, rewards, info = walked(env, [envs.RIGHT] * 8, seed)
    assert rewards == [-0.1] * 8
    assert info == {"is_win": False}
    assert env.step(envs.RIGHT)[2] is False  # cut off, not ended
    env.reset(seed=seed)
    env.step(envs.AHEAD)
    for _ in range(6):
        env.step(envs.AHEAD)
    assert env.step(envs.LEFT)[1:4] == (1.0, True, False)  # the last step counts


def test_both_goals_come_as_often(envs: ModuleType) -> None:
    env = envs.t_maze(1)
    env.reset(seed=0)
    goals = []
    for _ in range(400):
        env.reset()
        goals.append(env.goal == envs.LEFT)
    assert 160 < sum(goals) < 240


@pytest.mark.parametrize("name", ["t_maze", "cartpole", "pendulum"])
@pytest.mark.filterwarnings("ignore")
def test_gymnasium_finds_no_fault(envs: ModuleType, name: str) -> None:
    check_env(getattr(envs, name)(), skip_render_check=True)


def test_velocities_are_hidden(envs: ModuleType) -> None:
    env = envs.cartpole()
    observation, _ = env.reset(seed=1)
    state = env.unwrapped.state
    np.testing.assert_array_equal(observation, np.float32([state[0], state[2]]))
    env = envs.pendulum()
    observation, _ = env.reset(seed=1)
    angle, _ = env.unwrapped.state
    np.testing.assert_allclose(observation, [np.cos(angle), np.sin(angle)], rtol=1e-6)


@pytest.mark.parametrize("own_critic", [True, False])
def test_a_lasting_policy_keeps_what_it_has_seen(envs: ModuleType, own_critic: bool) -> None:
    space = envs.t_maze().observation_space
    policy = envs.LastingPolicy(space, envs.t_maze().action_space, lambda _: 1e-3, lstm_hidden_size=32, steps=50,
                                enable_critic_lstm=own_critic, shared_lstm=not own_critic)  # fmt: skip
    for lstm in filter(None, (policy.lstm_actor, policy.lstm_critic)):
        forget = lstm.bias_hh_l0.detach()[32:64]
        assert 0.0 <= forget.min() < forget.max() <= np.log(50)
        assert (lstm.bias_hh_l0.detach()[:32] == -forget).all()
        assert forget.mean() > 2.0  # e² steps


def test_a_corridor_has_a_cell(envs: ModuleType) -> None:
    with pytest.raises(ValueError, match="length=0"):
        envs.t_maze(0)
