from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs.evaluate import evaluate, load_run, mean_interval, summarise
from fasttrain.saving.env_state import own_random_state
from fasttrain.spec.config import Config


class Countdown(gym.Env[np.ndarray, int]):
    """Env k ends after k + 1 steps with reward 1 a step: short ones finish first."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.left = self.length
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        done = self.left == 0
        return np.zeros(1, np.float32), 1.0, done, False, {"is_success": self.length == 1} if done else {}


def countdowns(lengths: list[int]) -> DummyVecEnv:
    def make(length: int) -> Callable[[], Countdown]:
        return lambda: Countdown(length)

    return DummyVecEnv([make(length) for length in lengths])


@pytest.fixture
def policy() -> PPO:
    return PPO("MlpPolicy", countdowns([1]), n_steps=2, batch_size=2, device="cpu")


def test_every_env_plays_its_share_so_short_episodes_are_not_favoured(policy: PPO):
    result = evaluate(policy, countdowns([1, 9]), episodes=10, deterministic=True, seed=0)
    assert result["episodes"] == 10
    assert result["mean_reward"] == 5.0  # (5 × 1 + 5 × 9) / 10; the first ten to end would give 1.8
    assert result["win_rate"] == 0.5
    assert result["mean_length"] == 5.0
    assert result["end_reason"] == {"terminated": 1.0}


def test_the_training_random_state_is_untouched(policy: PPO):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    evaluate(policy, countdowns([2]), episodes=4, deterministic=False, seed=5)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == after


def test_the_random_state_comes_back_after_an_error():
    torch.manual_seed(3)
    expected = torch.get_rng_state()

    def draw_and_fail() -> None:
        with own_random_state(9):
            torch.rand(3)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), expected)


def test_sampled_evaluation_depends_on_its_own_seed_only(policy: PPO):
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(random.randrange(1000))
        model = PPO("MlpPolicy", env, n_steps=2, batch_size=2, seed=4, device="cpu")
        results.append(evaluate(model, env, 5, False, seed)["mean_reward"])
    assert results[0] == results[1] != results[2]


def test_summary_of_games():
    finished = [
        (2.0, 10, {"is_win": True, "score_diff": 30, "end_reason": "won"}),
        (0.0, 12, {"is_win": False, "score_diff": -10, "end_reason": "lost"}),
        (1.0, 14, {"is_win": False, "score_diff": -20, "end_reason": "lost"}),
    ]
    result = summarise(finished)
    assert result["mean_reward"] == 1.0
    assert result["win_rate"] == pytest.approx(1 / 3)
    assert result["score_diff"] == 0.0
    assert result["end_reason"] == {"lost": pytest.approx(2 / 3), "won": pytest.approx(1 / 3)}
    half = stats.t.ppf(0.975, 2) * 1.0 / np.sqrt(3)
    assert result["ci95"]["mean_reward"] == pytest.approx([1 - half, 1 + half])


def test_summary_of_a_wargame():
    finished = [
        (2.0, 10, {"is_win": True, "is_draw": False, "vp_diff": 30, "turn": 5}),
        (0.0, 12, {"is_win": False, "is_draw": True, "vp_diff": 0, "turn": 3}),
    ]
    result = summarise(finished)
    assert (result["win_rate"], result["draw_rate"], result["score_diff"]) == (0.5, 0.5, 15.0)
    assert result["mean_turns"] == 4.0
    assert summarise([(1.0, 1, {})])["draw_rate"] is None


def test_truncated_and_terminated_without_a_reason():
    finished = [(1.0, 1, {"TimeLimit.truncated": True}), (1.0, 1, {})]
    assert summarise(finished)["end_reason"] == {"truncated": 0.5, "terminated": 0.5}


def test_a_start_does_not_load_what_takes_a_second():
    code = "import sys, fasttrain.runs.train; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_one_value_and_equal_ones_have_no_interval():
    assert mean_interval(np.array([4.0])) is mean_interval(np.array([4.0, 4.0])) is None


def test_episodes_that_are_one_and_the_same_are_counted_once(policy: PPO):
    found = evaluate(policy, countdowns([3, 3]), episodes=10, deterministic=True, seed=0)
    assert (found["episodes"], found["distinct_episodes"], found["win_rate"]) == (10, 1, 0.0)
    assert {*found["ci95"].values()} == {None}
    two = evaluate(policy, countdowns([1, 9]), episodes=10, deterministic=True, seed=0)
    assert two["distinct_episodes"] == 2
    assert two["ci95"]["mean_reward"] is not None
    cartpole = DummyVecEnv([lambda: gym.make("CartPole-v1", max_episode_steps=3)])  # one return, other starts
    balanced = evaluate(PPO("MlpPolicy", cartpole, n_steps=2, batch_size=2, device="cpu"), cartpole, 4, True, seed=0)
    assert "distinct_episodes" not in balanced
    assert balanced["ci95"]["mean_reward"] is None


def test_eval_command_repeats_the_runs_own_evaluation(fasttrain: RunCommand):
    trained = fasttrain(
        "+profile=speed", "num_envs=32", "algo.rollout_size=2048", "batch_size=256", "total_timesteps=2048",
        "algo.n_epochs=1", "eval.episodes=20",
    )  # fmt: skip
    done = fasttrain("eval", f"run={trained.folder}")
    assert done.exit_code == 0, done.err
    summary = trained.json("summary.json")["quality"]
    greedy = done.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: summary[key] for key in greedy}
    more = fasttrain("eval", f"run={trained.folder}", "eval.episodes=30")
    assert more.json("eval.json")["quality"]["greedy"]["episodes"] == 30
    useless = fasttrain("eval", f"run={trained.folder}", "num_envs=3")
    assert useless.exit_code == 2
    assert "num_envs would do nothing" in useless.err


def test_a_run_of_another_version_is_read_or_refused_by_name(tmp_path: Path):
    stored = dataclasses.asdict(configured("env.id=CartPole-v1", "algo=ppo"))
    model = PPO("MlpPolicy", "CartPole-v1", device="cpu", n_steps=8, batch_size=8)
    model.save(tmp_path / "model.zip")

    def load(config: dict[str, Any]) -> Config:
        (tmp_path / "plan.json").write_text(json.dumps({"config": config}), encoding="utf-8")
        return load_run(tmp_path)[0]

    older = load({key: value for key, value in stored.items() if key not in ("pin_memory", "use_amp")})
    assert (older.pin_memory, older.use_amp) == ("off", "off")
    with pytest.raises(ConfigError, match=r"run=.*: its plan.json does not fit this version .*unknown key 'younger'"):
        load({**stored, "younger": 1})
