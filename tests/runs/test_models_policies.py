"""Runs with several policies: their files, what reads them, where they begin, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces

from conftest import Finished, RunCommand
from fasttrain.runs.folders import clear
from fasttrain.runs.models import read_model_file
from messages import assert_says, wrong_inputs
from toys import RandomEnv

SMALL = ("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.net_arch=[8]", "checkup=off",
         "total_timesteps=512", "eval.episodes=4", "log_every=1")  # fmt: skip
TWO = "policies={manager: {decides: bid, algo.n_epochs: 3, algo.net_arch: [16]}, worker: {decides: play}}"
MINE = ("algo=ppo", "env.entry_point=test_models_policies:Turns", "vec_env=dummy")


class Turns(RandomEnv):
    """Says in the info whose decision each step is."""

    def __init__(self, turns: str = "bid play play", missing: str = "") -> None:
        super().__init__(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), cut=True)
        self.turns, self.missing = turns.split(), missing

    def reset(self, **given: Any) -> Any:
        observation, info = super().reset(**given)
        return observation, {**info, "policy": self.turns[0]}

    def step(self, action: int) -> Any:
        *answer, info = super().step(action)
        return (*answer, {**info, "steps": self.steps, "policy": self.turns[self.steps % len(self.turns)]})


def weights_of(file: Path) -> dict[str, torch.Tensor]:
    return read_model_file(file)[1]


@pytest.fixture
def run(trained: RunCommand) -> Finished:
    return trained(*SMALL, TWO, "eval_every=256", "eval_async=false", "loggers=[csv]")


def test_a_run_leaves_a_file_of_each_policy_that_sb3_loads(run: Finished, fasttrain: RunCommand) -> None:
    assert "policy manager: decides=bid, algo.n_epochs=3, algo.net_arch=[16]" in run.out
    whole = weights_of(run.folder / "model.zip")
    for name, width, epochs in (("manager", 16, 3), ("worker", 8, 4)):
        stock = sb3_contrib.MaskablePPO.load(run.folder / f"{name}.zip")
        assert (stock.n_epochs, stock.policy.net_arch) == (epochs, [width])
        assert all(
            torch.equal(whole[f"members.{name}.{key}"], value) for key, value in stock.policy.state_dict().items()
        )
        assert (run.folder / f"best_model_{name}.zip").is_file()
    told = run.json("summary.json")["policies"]
    assert told["manager"]["decisions"] + told["worker"]["decisions"] == 512
    assert 60 < told["manager"]["decisions"] < 120
    assert told["manager"]["updates"] == 2 * 3 * -(-told["manager"]["decisions"] // 2 // 64)
    assert "manager_update_ms" in run.json("perf.json")["lines"][-1]
    assert "manager/train/loss" in (run.folder / "progress.csv").read_text()
    greedy = {key: value for key, value in run.json("summary.json")["quality"].items() if key != "sampled"}
    again = fasttrain("eval", f"run={run.folder}", "eval.episodes=4")
    assert again.json("eval.json")["quality"]["greedy"] == greedy
    clear(run.folder)  # as on_existing=overwrite does
    assert [path.name for path in run.folder.glob("*manager.zip")] == []


def test_what_cannot_take_a_run_of_several_policies_says_so(run: Finished, fasttrain: RunCommand) -> None:
    fasttrain("export", f"run={run.folder}", "format=torchscript").refused("SB3 loads manager.zip and worker.zip")
    fasttrain("eval", f"run={run.folder}", "--trust").refused("leave out --trust")
    played = fasttrain("play", f"run={run.folder}", "play.seed=1", "play.speed=1e9").ok()
    assert "agent bids" in played.out
    assert "probability: bids" in played.out


@pytest.mark.parametrize("key", ["init_from", "algo.teacher"])
def test_a_run_of_several_policies_is_no_single_model(key: str, run: Finished, fasttrain: RunCommand) -> None:
    way_out = f"it has several policies; name one of them: {run.folder / 'manager.zip'}"
    fasttrain(*SMALL, f"{key}={run.folder}").refused(way_out)
    done = fasttrain(*SMALL, f"policies={{a: {{decides: bid, {key}: '{run.folder}'}}, b: {{decides: play}}}}")
    done.refused(f"policies.a: {key}", way_out)


def test_a_policy_can_begin_with_a_model_and_follow_a_teacher(run: Finished, fasttrain: RunCommand) -> None:
    flat = fasttrain(*SMALL)
    own = f"worker: {{decides: play, init_from: '{flat.folder}', algo.teacher: '{flat.folder}'}}"
    text = (
        f"policies={{manager: {{decides: bid, init_from: '{run.folder / 'manager.zip'}', algo.net_arch: [16]}}, {own}}}"
    )
    begun = fasttrain(*SMALL, text, "algo.learning_rate=1e-12", "loggers=[csv]").ok()
    assert "policies.worker: init_from: 8 of the 8 tensors of the policy come from" in begun.out
    whole = weights_of(begun.folder / "model.zip")
    for name, source in (("worker", flat.folder / "model.zip"), ("manager", run.folder / "manager.zip")):
        for key, value in weights_of(source).items():
            torch.testing.assert_close(whole[f"members.{name}.{key}"], value, atol=1e-6, rtol=0)
    assert "worker/train/teacher_kl" in (begun.folder / "progress.csv").read_text()
    fasttrain(*SMALL, TWO, f"init_from={run.folder}", "init_from_also=[optimizer]", "init_from_strict=true").ok()


@pytest.mark.parametrize("more", [(), ("vec_env=shared", "workers=2", "schedule=first_ready"), ("env.frame_stack=2",)])
def test_the_info_tells_whose_decision_it_is(more: tuple[str, ...], fasttrain: RunCommand) -> None:
    done = fasttrain(*SMALL, *MINE, TWO, "fused_update=off", "num_envs=4", *more).ok()
    told = done.json("summary.json")["policies"]
    assert (told["manager"]["decisions"], told["worker"]["decisions"]) == pytest.approx(
        (512 * 0.4, 512 * 0.6), rel=0.05
    )
    fasttrain("eval", f"run={done.folder}", "eval.episodes=2").ok()


def test_a_manager_sets_goals_in_a_run(fasttrain: RunCommand) -> None:
    goals = "policies={manager: {goal_every: 3, goals: 5, observation: [1]}, worker: {reward_key: steps}}"
    done = fasttrain(*SMALL, *MINE, goals, "fused_update=off", "num_envs=4", "env.frame_stack=2").ok()
    told = done.json("summary.json")["policies"]
    assert told["worker"]["decisions"] == pytest.approx(512 * 10 / 14, rel=0.03)
    manager, worker = (stable_baselines3.PPO.load(done.folder / f"{name}.zip") for name in ("manager", "worker"))
    assert (manager.observation_space.shape, manager.action_space) == ((2,), spaces.Discrete(5))
    assert (worker.observation_space.shape, worker.action_space) == ((16,), spaces.Discrete(4))
    assert done.json("summary.json")["quality"]["mean_length"] == 14.0
    fasttrain("eval", f"run={done.folder}", "eval.episodes=2").ok()


def test_a_policy_that_is_found_idle_after_an_update_is_wrong_input(fasttrain: RunCommand) -> None:
    done = fasttrain(*SMALL, *MINE, "policies={a: {decides: [bid, play]}, b: {decides: draw}}", "algo.rollout_size=64")
    assert (done.exit_code, "policies.b has decided nothing in" in done.err) == (2, True), done.err
    assert done.json("summary.json")["status"] == "crashed"
    assert (done.folder / "model.zip").is_file(), "it has learned"


@pytest.mark.parametrize("typed", wrong_inputs("policies"))
def test_what_does_not_fit_the_game_is_refused(typed: str, fasttrain: RunCommand) -> None:
    done = fasttrain(*SMALL, *typed.split())
    done.refused()
    assert_says("policies", typed, done.err.replace(str(Path.cwd()), "FOLDER"))
