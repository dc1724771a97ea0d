from __future__ import annotations

import pytest
import torch

from conftest import RunCommand
from fasttrain.runs.parts import pool_file
from fasttrain.spec.infos import score_of
from messages import assert_says, wrong_inputs

PLAIN = (
    "env.game=duels:GAME", "engine=fast", "num_envs=4",
    "eval.episodes=4", "total_timesteps=600", "checkup=warn",
)  # fmt: skip
DUEL = (*PLAIN, "opponent=self", "self_play.pool=2")
PPO = ("algo=maskable_ppo", "algo.rollout_size=64", "batch_size=16", "algo.n_epochs=1")
DQN = ("algo=dqn", "warmup_steps=50", "batch_size=16", "algo.buffer_size=500")


@pytest.mark.parametrize(
    ("algo", "vec_env", "fused"), [(PPO, "dummy", "on"), (PPO, "shared", "off"), (DQN, "shared", "on")]
)
def test_a_run_against_itself(fasttrain: RunCommand, algo: tuple[str, ...], vec_env: str, fused: str):
    every = f"self_play.every={4 if algo == PPO else 30}"
    done = fasttrain(*DUEL, *algo, every, f"vec_env={vec_env}", f"fused_update={fused}").ok()
    summary = done.json("summary.json")
    played = summary["self_play"]
    assert played["snapshots"] > 4
    assert len(played["pool"]) == 2
    assert played["elo"] != 1000.0
    assert sum(each["games"] for each in played["pool"]) > 0
    # Ten evaluations against the fixed opponent, who names 0: nothing to lose.
    assert len(summary["evaluations"]) == 10
    assert all(row["mean_reward"] >= 0 for row in summary["evaluations"])
    steps = [int(row["env_steps"]) for row in done.table("evaluations.csv")]
    assert steps == [row["env_steps"] for row in summary["evaluations"]]
    assert "opponent=self: progress is measured against zero" in done.out
    state = torch.load(done.folder / "model.opponents.pt", weights_only=True)
    assert state["taken"] == played["snapshots"]
    assert summary["perf"]["enemy_turn_ms"] > 0


@pytest.mark.parametrize("typed", wrong_inputs("self-play"))
def test_what_cannot_be(fasttrain: RunCommand, typed: str):
    done = fasttrain(*DUEL, *PPO, "vec_env=dummy", *typed.split())
    done.refused()
    assert_says("self-play", typed, done.err)


def test_a_fixed_opponent_by_its_short_name_and_reward_terms(fasttrain: RunCommand):
    arguments = (*PLAIN, *PPO, "opponent=zero", "vec_env=dummy", "total_timesteps=128")
    plain, told = fasttrain(*arguments).ok(), fasttrain(*arguments, "reward_debug=true")
    assert plain.json("plan.json")["config"]["env"]["kwargs"] == {"opponent": "zero"}
    assert not {"self_play", "reward_terms"} & plain.json("summary.json").keys()
    assert not pool_file(plain.folder / "model.zip").exists()
    terms = told.json("summary.json")["reward_terms"]
    assert terms["own"] > 0 == terms["other"]
    assert "reward per episode, last" in told.out
    assert all(float(row["reward_own"]) == float(row["return"]) for row in told.table("episodes.csv"))
    assert "reward_own" not in (plain.folder / "episodes.csv").read_text(encoding="utf-8")


def test_points():
    told = [{"is_win": True}, {"is_win": False}, {"is_win": False, "is_draw": True}, {"opponents_beaten": 0.25}, {}]
    assert [score_of(info) for info in told] == [1.0, 0.0, 0.5, 0.25, None]
