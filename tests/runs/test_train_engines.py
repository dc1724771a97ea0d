"""A whole run whose games are played with external engines: what it leaves, and what it says."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from sb3_contrib import MaskablePPO

from conftest import RunCommand
from fasttrain_engines.vec_env import DaemonVecEnv
from pig_games import descendants, engines, overrides, until

TESTS = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
SMALL = ("num_envs=4", "total_timesteps=2048", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=1",
         "algo.net_arch=[8]", "eval.episodes=8", "checkpoint_every=1024", "checkup=off")  # fmt: skip


@pytest.mark.parametrize("profile", ["speed", "baseline"])
def test_a_run_with_engines_leaves_every_file_and_no_process(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, profile: str
):
    before, made = {one.pid for one in descendants()}, list[int]()
    meet = DaemonVecEnv._meet
    monkeypatch.setattr(DaemonVecEnv, "_meet", lambda env, *rest: made.append(env._count) or meet(env, *rest))
    done = fasttrain(f"+profile={profile}", *overrides("--fault", "close=0.01"), *SMALL, "eval_every=700")
    assert done.exit_code == 0, done.err
    assert made == [1, 4], "to look at its spaces, and to train: evaluations play with the training's"
    assert until(lambda: not {one.pid for one in descendants()} - before)
    config, summary, perf = done.json("plan.json")["config"], done.json("summary.json"), done.json("perf.json")
    assert (config["vec_env"], config["schedule"]) == ("daemons", "first_ready" if profile == "speed" else "lockstep")
    assert (summary["status"], summary["quality"]["episodes"]) == ("done", 8)
    engines = summary["engines"]
    assert len(engines["daemons"]) == 2
    lost = engines["lost_games"]["closed"]["games"]
    assert lost > 0
    assert engines["decisions"] + lost >= summary["env_steps"] == 2048, "a decision that lost its game is a step"
    assert perf["engines"].keys() == engines.keys()
    each = dict(re.findall(r"of a game's time (\w+)_ms +([\d.]+)", done.out))
    assert each.keys() >= {"engine", "decode", "queue"}
    assert f"{lost} games were lost" in done.out
    with (done.folder / "episodes.csv").open() as file:
        won = [row["return"] for row in csv.DictReader(file)]
    assert set(won) == {"1.0", "-1.0"}, "a lost game is no result"
    files = [path for path in (done.folder / "daemons").iterdir() if path.name.startswith("failed_games")]
    failed = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert {one["cause"] for one in failed} == {"closed"}
    assert len(failed) >= lost, "and the evaluations'"
    assert len(summary["evaluations"]) == 2
    assert all(one["trace"] for one in failed if one["decisions"])


@pytest.mark.parametrize("pipes", [False, True])
def test_evaluations_start_no_engine_and_change_the_training_only_where_its_games_end(
    fasttrain: RunCommand, pipes: bool
):
    most, done = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, len(engines()))

    counting = threading.Thread(target=count)
    counting.start()
    more = ("daemons.games_per_daemon=1", "num_envs=2") if pipes else ("eval_async=true",)
    settings = ("+profile=speed", "schedule=lockstep", *overrides(*["--stdio"] * pipes), *SMALL, *more,
                "total_timesteps=512")  # fmt: skip
    try:
        runs = [fasttrain(*settings, f"eval_every={every}") for every in ((250,) if pipes else (250, 0))]
    finally:
        done.set()
        counting.join()
    assert runs[0].exit_code == 0, runs[0].err
    assert most == 2, "engines at once"
    flags = {row["flag"]: row for row in runs[0].json("plan.json")["flags"]}
    said = "daemons.games_per_daemon=1: evaluations end" if pipes else "evaluations play 4 games with the training's"
    assert said in flags["eval_every"]["reason"]
    assert flags["eval_async"]["effective"] is False
    assert len(runs[0].json("summary.json")["evaluations"]) == 1
    first, *others = (MaskablePPO.load(one.folder / "model.zip", device="cpu").policy.state_dict() for one in runs)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_an_engine_that_asks_for_both_sides_trains_by_self_play(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    engine = ", ".join(f"'{part}'" for part in (sys.executable, "-S", str(TESTS / "alternating_engine.py")))
    game = ("env.backend=daemons", f"daemons.command=[{engine}]", "daemons.games_per_daemon=1",
            "env.game=alternating_games:GAME")  # fmt: skip
    monkeypatch.setattr("fasttrain.runs.batches.MANY_REFUSED", 0.02)  # random play has 1 decision in 16 refused
    done = fasttrain("+profile=speed", *game, "opponent=self", *SMALL, "checkup=warn")
    assert done.exit_code == 0, done.err
    assert "warning mask_not_respected: the engine refused" in done.out, "it takes no action twice, and names all"
    config, summary = done.json("plan.json")["config"], done.json("summary.json")
    assert (config["schedule"], config["vec_env"]) == ("lockstep", "daemons")
    assert summary["self_play"]["snapshots"] > 0
    assert summary["quality"]["episodes"] == 8
    assert summary["quality"]["mean_reward"] >= 0, "the bot names 0 and takes nothing away"
    assert summary["engines"]["decisions"] > summary["env_steps"] >= 2048, "the other side's are the engine's too"
    alone = ("env.entry_point=alternating_games:Alternating", *(text for text in game if "env.game" not in text))
    done = fasttrain("+profile=speed", *alone, "opponent=self", *SMALL)
    assert (done.exit_code, "chooses them in a GameSpec" in done.err) == (2, True)


@pytest.mark.parametrize("algo", ["maskable_recurrent_ppo", "maskable_ppo"])
def test_a_refused_action_is_asked_again(fasttrain: RunCommand, algo: str):
    """Of one that remembers too: it forgets that it was asked."""
    game = overrides("--fault", "refuse=0.02")
    memory = ("algo.lstm_hidden_size=16",) if algo == "maskable_recurrent_ppo" else ()
    done = fasttrain("+profile=speed", *game, *SMALL, f"algo={algo}", *memory)
    assert done.exit_code == 0, done.err
    engines = done.json("summary.json")["engines"]
    files = [path for path in (done.folder / "daemons").iterdir() if path.name.startswith("failed_games")]
    failed = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert engines["refused"] > 0
    assert (engines["lost_games"], failed) == ({}, [])
