"""Where a life is an episode, what is told are the games that a Monitor below saw; and games with engines."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pig_games
from conftest import RunCommand, configured
from fasttrain.runs.evaluate import evaluate
from fasttrain.spec.reading import tells_games
from fasttrain_engines.vec_env import DaemonVecEnv

WRAPPED = "env.wrappers=[stable_baselines3.common.monitor:Monitor,lives:LifeByLife]"
RUN = ("env.entry_point=lives:Lives", "algo=ppo", "num_envs=2", "total_timesteps=256", "algo.n_steps=32",
       "batch_size=32", "algo.n_epochs=1", "eval.episodes=6", "checkup=off")  # fmt: skip


@pytest.mark.parametrize("where", ["vec_env=dummy", "vec_env=shared", "vec_env=dummy engine=stock"])
def test_games_are_counted_and_lives_are_learned(where: str, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    done = fasttrain("engine=fast", *RUN, WRAPPED, *where.split())
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert (quality["episodes"], quality["mean_reward"], quality["mean_length"]) == (6, 24.0, 12.0)
    with (done.folder / "episodes.csv").open() as file:
        games = [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    assert games == [(24.0, 12)] * len(games)
    assert len(games) == 20  # 128 steps of each of two envs
    assert done.json("summary.json")["episodes"] == 20


def test_without_a_monitor_a_life_is_what_there_is(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    done = fasttrain("engine=fast", *RUN, "env.wrappers=[lives:LifeByLife]", "vec_env=dummy")
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["quality"]["mean_reward"] == 4.0


def test_the_atari_group_has_one():
    config = configured("env=atari", "env.id=ALE/Breakout-v5", "algo=ppo", "+profile=speed")
    assert tells_games(config)
    assert config.env.frame_stack == 4
    assert (config.algo.rollout_size, config.algo.learning_rate) == (1024, 2.5e-4)
    assert not tells_games(configured("env.id=CartPole-v1", "algo=ppo"))


@pytest.mark.filterwarnings("ignore")
def test_pong_is_played(fasttrain: RunCommand):
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="opencv is not installed")
    done = fasttrain("+profile=speed", "env=atari", "algo=ppo", "num_envs=2", "vec_env=dummy", "total_timesteps=64",
                     "algo.n_steps=32", "batch_size=32", "algo.n_epochs=1", "eval.episodes=2", "checkup=off",
                     "env.max_episode_steps=400")  # fmt: skip
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] <= 0
    assert quality["mean_length"] > 100  # frames


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_refused_decision_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy whose state counts its decisions in the episode, in games whose engine refuses every third action."""
    monkeypatch.chdir(pig_games.ENGINES)
    env = DaemonVecEnv("pig:Pig", {}, 3, pig_games.settings("--fault", "refuse=0.6"), 2, 1, tmp_path)
    seen, first = 0, []

    class Counting:
        def predict(
            self, observations: Any, state: Any, episode_start: Any, deterministic: bool, action_masks: Any
        ) -> Any:
            nonlocal seen
            if state is not None and not first:
                first.append(env.again.any())
            state = (np.zeros((1, 3, 2)),) if state is None else state
            made = np.where(episode_start, 0, state[0][0, :, 0])
            assert made.tolist() == env._lengths.tolist()
            seen = max(seen, int(made.max()))
            return pig_games.prudent(observations, action_masks), (np.tile(made[None, :, None] + 1, (1, 1, 2)),)

    try:
        found = evaluate(Counting(), env, 9, deterministic=True, seed=5)  # type: ignore[arg-type]
        assert found["episodes"] == 9
        assert env.times().refused > 5
        assert seen > 5
        assert first[0], "in the very first step one was"
    finally:
        env.close()
