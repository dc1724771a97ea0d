"""Runs with several policies: their files, what reads them, where they begin, and what is refused."""

from __future__ import annotations

import sys
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
def run(fasttrain: RunCommand) -> Finished:
    done = fasttrain(*SMALL, TWO, "eval_every=256", "eval_async=false", "loggers=[csv]")
    assert done.exit_code == 0, done.err
    return done


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
    exported = fasttrain("export", f"run={run.folder}", "format=torchscript")
    assert (exported.exit_code, "SB3 loads manager.zip and worker.zip" in exported.err) == (2, True)
    trusted = fasttrain("eval", f"run={run.folder}", "--trust")
    assert (trusted.exit_code, "leave out --trust" in trusted.err) == (2, True)
    played = fasttrain("play", f"run={run.folder}", "play.seed=1")
    assert (played.exit_code, "agent bids" in played.out, "probability: bids" in played.out) == (0, True, True)


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
    begun = fasttrain(*SMALL, text, "algo.learning_rate=1e-12", "loggers=[csv]")
    assert begun.exit_code == 0, begun.err
    assert "policies.worker: init_from: 8 of the 8 tensors of the policy come from" in begun.out
    whole = weights_of(begun.folder / "model.zip")
    for name, source in (("worker", flat.folder / "model.zip"), ("manager", run.folder / "manager.zip")):
        for key, value in weights_of(source).items():
            torch.testing.assert_close(whole[f"members.{name}.{key}"], value, atol=1e-6, rtol=0)
    assert "worker/train/teacher_kl" in (begun.folder / "progress.csv").read_text()
    continued = fasttrain(*SMALL, TWO, f"init_from={run.folder}", "init_from_also=[optimizer]", "init_from_strict=true")
    assert continued.exit_code == 0, continued.err


@pytest.mark.parametrize("more", [(), ("vec_env=shared", "workers=2", "schedule=first_ready"), ("env.frame_stack=2",)])
def test_the_info_tells_whose_decision_it_is(more: tuple[str, ...], fasttrain: RunCommand) -> None:
    done = fasttrain(*SMALL, *MINE, TWO, "fused_update=off", "num_envs=4", *more)
    assert done.exit_code == 0, done.err
    told = done.json("summary.json")["policies"]
    assert (told["manager"]["decisions"], told["worker"]["decisions"]) == pytest.approx(
        (512 * 0.4, 512 * 0.6), rel=0.05
    )
    assert fasttrain("eval", f"run={done.folder}", "eval.episodes=2").exit_code == 0


def test_a_manager_sets_goals_in_a_run(fasttrain: RunCommand) -> None:
    goals = "policies={manager: {goal_every: 3, goals: 5, observation: [1]}, worker: {reward_key: steps}}"
    done = fasttrain(*SMALL, *MINE, goals, "fused_update=off", "num_envs=4", "env.frame_stack=2")
    assert done.exit_code == 0, done.err
    told = done.json("summary.json")["policies"]
    assert told["worker"]["decisions"] == pytest.approx(512 * 10 / 14, rel=0.03)
    manager, worker = (stable_baselines3.PPO.load(done.folder / f"{name}.zip") for name in ("manager", "worker"))
    assert (manager.observation_space.shape, manager.action_space) == ((2,), spaces.Discrete(5))
    assert (worker.observation_space.shape, worker.action_space) == ((16,), spaces.Discrete(4))
    assert done.json("summary.json")["quality"]["mean_length"] == 14.0
    assert fasttrain("eval", f"run={done.folder}", "eval.episodes=2").exit_code == 0


BOTH = "policies={a: {decides: one}, b: {decides: two}}"
REFUSED = {
    "info['policy'] is 'play', not one of ['bid', 'pay']": (*MINE, "policies={a: {decides: bid}, b: {decides: pay}}"),
    "policies.b has decided nothing in": (*MINE, "policies={a: {decides: [bid, play]}, b: {decides: draw}}"),
    "belongs to several of a, b": (*MINE, BOTH, "env.phases={one: 0, two: 1}"),
    "policies.a.goal_every=3 does not go with the native batch": ("policies={a: {goal_every: 3, goals: 2}, b: {}}",),
    "policies.a.decides=one does not go with the native batch": ("env=skirmish", BOTH),
    "policies.b: algo.policy=no:Net": ("policies={a: {decides: bid}, b: {decides: play, algo.policy: no:Net}}",),
    "use_compile=default with policies": (TWO, "use_compile=default", "fused_update=off"),
    "torch takes no network of the name": ("policies={keys: {decides: bid}, b: {decides: play}}",),
    "this one is Discrete": ("algo=ppo", "env.id=FrozenLake-v1", BOTH, "env.phases={one: 0, two: 1}"),
}


def test_a_policy_that_is_found_idle_after_an_update_is_wrong_input(fasttrain: RunCommand) -> None:
    done = fasttrain(*SMALL, *MINE, "policies={a: {decides: [bid, play]}, b: {decides: draw}}", "algo.rollout_size=64")
    assert (done.exit_code, "policies.b has decided nothing in" in done.err) == (2, True), done.err
    assert done.json("summary.json")["status"] == "crashed"
    assert (done.folder / "model.zip").is_file(), "it has learned"


@pytest.mark.parametrize(("message", "settings"), REFUSED.items())
def test_what_does_not_fit_the_game_is_refused(message: str, settings: tuple[str, ...], fasttrain: RunCommand) -> None:
    assert "test_models_policies" in sys.modules
    done = fasttrain(*SMALL, *settings)
    assert (done.exit_code, message in done.err) == (2, True), done.err
