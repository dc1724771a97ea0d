from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunCommand, configured
from fasttrain import PPO, MaskablePPO
from fasttrain.errors import EnvSpecError
from fasttrain.integrations.pettingzoo import Rows
from fasttrain.vec.vector import GymVecEnv


def made(num_envs: int = 6, **options: Any) -> GymVecEnv:
    return GymVecEnv(lambda num_envs: Rows(num_envs, "herd", **options), num_envs, "the herd")


def test_every_agent_is_a_row_and_rests_until_its_game_is_over():
    env = made()
    env.reset()
    rests, ends = [], []
    for _ in range(4):
        env.step_slots(np.ones(6, np.int64))
        rests.append([] if env.slots.resets is None else np.flatnonzero(env.slots.resets).tolist())
        ends.append([(one.env_index, one.length, one.episode_return) for one in env.slots.finished])
    assert ends == [[], [(0, 2, 2.0), (3, 2, 2.0)], [(1, 3, 3.0), (4, 3, 3.0)], [(2, 4, 4.0), (5, 4, 4.0)]]
    assert rests == [[], [], [0, 3], [0, 1, 3, 4]]
    assert env.slots.observations.tolist() == [[0, 0], [0, 1], [0, 2]] * 2  # both games have begun again
    env.step_slots(np.ones(6, np.int64))
    assert env.slots.resets is None
    assert env.venv.copies[0].games == 3  # a look at the masks, the reset, the next one


def test_the_last_observation_is_the_agents_own_and_rewards_of_rest_are_none():
    env = made(3)
    env.reset()
    env.step_slots(np.array([1, 0, 1]))
    (episode,) = env.slots.finished
    assert (episode.env_index, episode.episode_return, episode.final_observation.tolist()) == (1, -1.0, [1.0, 1.0])
    env.step_slots(np.ones(3, np.int64))
    assert env.slots.resets is not None
    assert (env.slots.resets.tolist(), env.slots.rewards.tolist()) == ([False, True, False], [1.0, 0.0, 1.0])
    assert [{*acted} for acted in env.venv.copies[0].acted[-2:]] == [{"cow_0", "cow_1", "cow_2"}, {"cow_0", "cow_2"}]


def test_nothing_is_learned_of_rest():
    env = made(6)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0)
    model.learn(6 * 32)
    decisions = sum(len(acted) for copy in env.venv.copies for acted in copy.acted)
    assert model.num_timesteps == decisions
    assert decisions < 6 * len(env.venv.copies[0].acted)


def test_masks_from_infos():
    env = made(3, masked=True)
    assert env.masked
    MaskablePPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0).learn(48)
    assert all(all(acted.values()) for acted in env.venv.copies[0].acted)


def test_rows_that_do_not_fit_are_told_and_one_row_is_a_look():
    with pytest.raises(EnvSpecError, match="3 agents, each a row: num_envs=8 is no multiple of that; take num_envs=6"):
        Rows(8, "herd")
    env = made(1)
    env.reset()
    for _ in range(10):
        env.step_slots(np.ones(1, np.int64))
    assert env.observation_space.shape == (2,)
    with pytest.raises(EnvSpecError, match=r"the module has neither env\(\) nor parallel_env\(\)"):
        Rows(3, "json")


def test_sharing_is_learned_from_the_command_line(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    typed = ("env.backend=pettingzoo", "env.id=herd", "env.kwargs.sharing=true", "algo=ppo", "num_envs=6")
    config = configured(*typed)
    assert (config.env.backend, config.env.entry_point) == ("vector", "fasttrain.integrations.pettingzoo:Rows")
    done = fasttrain("+profile=speed", *typed, "total_timesteps=3000", "eval.episodes=12", "algo.rollout_size=384")
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["quality"]["mean_reward"] == 3.0  # 2, 3 and 4 steps of eating
    refused = fasttrain("engine=stock", *typed, "total_timesteps=300")
    assert refused.exit_code == 2
    assert "would learn from these steps" in refused.err


@pytest.mark.filterwarnings("ignore")
def test_pistonball(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    pytest.importorskip("pymunk", reason="pymunk is not installed")
    env = GymVecEnv(
        lambda num_envs: Rows(num_envs, "pettingzoo.butterfly.pistonball_v6", max_cycles=4), 20, "pistonball"
    )
    env.reset()
    for _ in range(6):
        env.step_slots(np.zeros((20, 1), np.float32))
    assert env.slots.observations.shape == (20, 457, 120, 3)
