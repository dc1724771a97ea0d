from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from conftest import RunCommand
from fasttrain.envs.wrappers import Stagger
from toys import Corridor

LENGTH = 16  # of an episode of Corridor without success: twice its length
SMALL = ("env.entry_point=toys:Corridor", "algo=ppo", "num_envs=8", "batch_size=64", "algo.rollout_size=128",
         "eval.episodes=4", "checkup=off", "report=false", "torch_threads=1", "fused_update=on")  # fmt: skip


def length_of(env: gymnasium.Env, seed: int | None = None) -> int:
    """Steps of an episode that goes nowhere."""
    env.reset(seed=seed)
    for step in range(1, 100):
        _, _, terminated, truncated, _ = env.step(0)
        if terminated or truncated:
            return step
    raise AssertionError


def test_only_an_episode_that_begins_with_a_seed_is_short():
    env = Stagger(Corridor(), LENGTH)
    lengths = [length_of(env, seed) for seed in range(200)]
    assert {*lengths} == {*range(1, LENGTH + 1)}
    assert lengths == [length_of(env, seed) for seed in range(200)], "drawn from the seed"
    assert length_of(env) == LENGTH
    assert np.mean(lengths) == pytest.approx(LENGTH / 2 + 0.5, abs=1.0)


@pytest.mark.parametrize("vec_env", ["dummy", "shared"])
def test_a_training_begins_with_short_episodes_and_an_evaluation_does_not(fasttrain: RunCommand, vec_env: str):
    typed = (*SMALL, f"vec_env={vec_env}", "total_timesteps=256", *["workers=2"] * (vec_env == "shared"))
    done = fasttrain("+profile=speed", *typed, f"env.stagger={LENGTH}").ok()
    first = {row["env"]: int(row["length"]) for row in reversed(done.table("episodes.csv"))}
    assert len(first) == 8
    assert len({*first.values()}) > 3
    assert done.json("summary.json")["quality"]["mean_length"] >= 8, "Corridor's shortest way has 8 steps"


def test_a_resumed_training_is_the_same_training(fasttrain: RunCommand):
    typed = ("+profile=speed", *SMALL, "vec_env=dummy", "env.stagger=40", "env.kwargs.length=20")
    whole = fasttrain(*typed, "total_timesteps=512").ok()
    half = fasttrain(*typed, "total_timesteps=512", "stop.at_steps=128").ok()
    rest = fasttrain("resume", f"run={half.folder}", "stop.at_steps=null").ok()
    assert "begin a new episode" not in rest.out
    assert whole.episodes() == half.episodes()


@pytest.mark.parametrize(
    "more", [("env=skullking", "algo=maskable_ppo"), ("vec_env=vector", "env.id=CartPole-v1", "algo=ppo")]
)
def test_games_that_step_together_refuse_it(fasttrain: RunCommand, more: tuple[str, ...]):
    fasttrain("+profile=speed", *more, "env.stagger=10").refused("env.stagger=10 does not go with")
