from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stable_baselines3 import PPO

from conftest import Finished, RunCommand
from messages import assert_says, wrong_inputs

CORRIDOR = ("+profile=speed", "algo=ppo", "env.entry_point=toys:Corridor", "vec_env=dummy", "num_envs=4", "checkup=off",
            "batch_size=32", "algo.net_arch=[16]", "eval.episodes=4")  # fmt: skip
SKULL = ("+profile=speed", "num_envs=8", "checkup=off", "algo.net_arch=[16]", "eval.episodes=4", "clone.epochs=2",
         "clone.episodes=20", "batch_size=64")  # fmt: skip


class Wise:
    """Reaches the end of the corridor after a pause at its beginning."""

    def act(self, observations: Any, action_masks: Any, envs: NDArray[np.int64]) -> NDArray[Any]:
        return np.where(observations[:, 2] * 60 < 2.5, 0, 1)


class Idle:
    """Never reaches the end, so that every episode is truncated."""

    def act(self, observations: Any, action_masks: Any, envs: NDArray[np.int64]) -> NDArray[Any]:
        return np.zeros(len(envs), np.int64)


class Alone:
    """Answers with one action for all environments."""

    def act(self, observations: Any, action_masks: Any, envs: NDArray[np.int64]) -> int:
        return 1


class Wild:
    """Answers with an action that the environment does not have."""

    def act(self, observations: Any, action_masks: Any, envs: NDArray[np.int64]) -> NDArray[Any]:
        return np.full(len(envs), 5)


@pytest.fixture
def cloned(trained: RunCommand) -> Finished:
    return trained("clone", *CORRIDOR, "clone.of=test_clone:Wise", "clone.episodes=60", "algo.learning_rate=0.01")


def test_a_policy_learns_what_was_shown(cloned: Finished) -> None:
    summary = cloned.json("summary.json")
    assert summary["clone"]["episodes"] == 60
    assert summary["clone"]["held_out_decisions"] in range(40, 100)
    assert summary["clone"]["accuracy"] > 0.95
    assert summary["clone"]["value_error"] < 0.2
    assert summary["quality"]["mean_reward"] == 1.0
    accuracies = [float(text) for text in re.findall(r"epoch \d+: held-out accuracy ([\d.]+) %", cloned.out)]
    assert len(accuracies) >= 2
    assert (cloned.folder / "demonstrations.npz").is_file()


def test_the_value_network_does_not_learn_from_returns_that_a_limit_cut(fasttrain: RunCommand) -> None:
    done = fasttrain("clone", *CORRIDOR, "clone.of=test_clone:Idle", "clone.episodes=8", "clone.epochs=2").ok()
    assert "128 of 128 decisions stand before a truncation" in done.out
    with np.load(done.folder / "demonstrations.npz") as arrays:
        assert np.flatnonzero(arrays["truncations"]).tolist() == [*range(15, 128, 16)]
    assert done.json("summary.json")["clone"]["value_error"] == 0.0


def test_a_run_goes_on_from_it_and_other_commands_read_it(cloned: Finished, fasttrain: RunCommand) -> None:
    more = fasttrain(
        *CORRIDOR, "algo.learning_rate=1e-9", "total_timesteps=64", "algo.rollout_size=64", f"init_from={cloned.folder}"
    )
    assert more.json("summary.json")["quality"]["mean_reward"] == 1.0
    assert (
        "win_rate"
        in fasttrain("eval", f"run={cloned.folder}", "eval.episodes=4").json("eval.json")["quality"]["greedy"]
    )


def test_decisions_of_a_file_and_of_a_run_are_learned(cloned: Finished, fasttrain: RunCommand) -> None:
    for of in (cloned.folder / "demonstrations.npz", cloned.folder):
        again = fasttrain("clone", *CORRIDOR, f"clone.of={of}", "clone.episodes=60", "algo.learning_rate=0.01")
        assert again.json("summary.json")["clone"]["accuracy"] > 0.95, of


def test_a_run_is_imitated_as_it_saw_its_game(trained: RunCommand, fasttrain: RunCommand) -> None:
    small = (*CORRIDOR, "algo.rollout_size=64", "total_timesteps=256", "env.normalize=[obs]")
    run = trained(*small)
    of = (f"clone.of={run.folder}", "clone.episodes=4", "clone.epochs=1")
    shown = fasttrain("clone", *CORRIDOR, *of).ok().folder / "demonstrations.npz"
    with np.load(shown) as arrays, np.load(run.folder / "vecnormalize.npz") as moments:
        model = PPO.load(run.folder / "model.zip", device="cpu")
        wide = np.sqrt(moments["observations.var"] + 1e-8)
        seen = np.clip((arrays["observations"] - moments["observations.mean"]) / wide, -10, 10).astype(np.float32)
        assert (model.predict(seen, deterministic=True)[0] == arrays["actions"]).all()
    fasttrain("clone", *SKULL, f"clone.of={run.folder}").refused("its observation_space is Box")


def test_a_games_bot_is_imitated_under_its_masks(fasttrain: RunCommand) -> None:
    run = fasttrain("clone", *SKULL, "clone.of=easy").ok()
    with np.load(run.folder / "demonstrations.npz") as arrays:
        masks, actions = arrays["action_masks"], arrays["actions"]
        assert masks[np.arange(len(actions)), actions].all()
        assert arrays["episode_starts"].sum() == 20
    assert run.json("summary.json")["clone"]["decisions"] == len(actions) == 20 * 65


@pytest.mark.parametrize("typed", wrong_inputs("clones"))
def test_what_cannot_be_cloned_ends_in_one_line(typed: str, fasttrain: RunCommand) -> None:
    done = fasttrain("clone", *CORRIDOR, *typed.split())
    done.refused()
    assert_says("clones", typed, done.err)


@pytest.mark.parametrize("typed", wrong_inputs("clones of a bot"))
def test_bots_that_cannot_be_cloned_end_in_one_line(typed: str, fasttrain: RunCommand) -> None:
    done = fasttrain("clone", *SKULL, *typed.split())
    done.refused()
    assert_says("clones of a bot", typed, done.err)
    fasttrain("clone", "algo=dqn", "env.id=CartPole-v1", "clone.of=x.npz").refused("clone with algo=dqn")
