from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sb3_contrib import MaskablePPO

from conftest import RunCommand
from fasttrain_engines.vec_env import DaemonVecEnv
from pig_games import descendants, engines, overrides, until

TESTS = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
SMALL = ("num_envs=4", "total_timesteps=512", "algo.rollout_size=128", "batch_size=64", "algo.n_epochs=1",
         "algo.net_arch=[8]", "eval.episodes=4", "checkpoint_every=256", "checkup=off")  # fmt: skip


def failed_games(folder: Path) -> list[Any]:
    files = [path for path in (folder / "daemons").iterdir() if path.name.startswith("failed_games")]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("typed", "schedule"),
    [
        (["+profile=speed"], "first_ready"),
        (["+profile=baseline"], "lockstep"),
        (["+profile=speed", "schedule=continuous"], "continuous"),
    ],
)
def test_a_run_leaves_every_file_and_no_process(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, typed: list[str], schedule: str
):
    before, made = {one.pid for one in descendants()}, list[int]()
    begin = DaemonVecEnv.__init__
    monkeypatch.setattr(DaemonVecEnv, "__init__", lambda *of, **more: made.append(of[3]) or begin(*of, **more))
    done = fasttrain(*typed, *overrides("--fault", "close=0.02"), *SMALL, "eval_every=180").ok()
    assert made == [1, 4], "to look at its spaces, and to train: evaluations play with the training's"
    assert until(lambda: not {one.pid for one in descendants()} - before)
    config, summary, perf = done.json("plan.json")["config"], done.json("summary.json"), done.json("perf.json")
    assert (config["vec_env"], config["schedule"]) == ("daemons", schedule)
    assert (summary["status"], summary["quality"]["episodes"]) == ("done", 4)
    engines = summary["engines"]
    assert len(engines["daemons"]) == 2
    lost = engines["lost_games"]["closed"]["games"]
    assert lost > 0
    assert engines["decisions"] + lost >= summary["env_steps"] >= 512, "a decision that lost its game is a step"
    assert perf["engines"].keys() == engines.keys()
    each = dict(re.findall(r"of a game's time (\w+)_ms +([\d.]+)", done.out))
    assert each.keys() >= {"engine", "decode", "queue"}
    assert f"{lost} games were lost" in done.out
    results = {won for won, _ in done.episodes()}
    assert results
    assert results <= {1.0, -1.0}, "a lost game is no result"
    failed = failed_games(done.folder)
    assert {one["cause"] for one in failed} == {"closed"}
    assert len(failed) >= lost, "and the evaluations'"
    assert len(summary["evaluations"]) == 2
    assert all(one["trace"] for one in failed if one["decisions"])


@pytest.mark.parametrize("pipes", [False, True])
def test_evaluations_start_no_engine(fasttrain: RunCommand, pipes: bool):
    most, done = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, len(engines()))

    counting = threading.Thread(target=count)
    counting.start()
    more = ("daemons.games_per_daemon=1", "num_envs=2") if pipes else ("eval_async=true",)
    settings = ("+profile=speed", "schedule=lockstep", *overrides(*["--stdio"] * pipes), *SMALL, *more,
                "total_timesteps=256")  # fmt: skip
    try:
        runs = [fasttrain(*settings, f"eval_every={every}") for every in ((100,) if pipes else (100, 0))]
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
    done = fasttrain("+profile=speed", *game, "opponent=self", "self_play.every=1", *SMALL, "checkup=warn").ok()
    assert "warning mask_not_respected: the engine refused" in done.out, "it takes no action twice, and names all"
    config, summary = done.json("plan.json")["config"], done.json("summary.json")
    assert (config["schedule"], config["vec_env"]) == ("lockstep", "daemons")
    assert summary["self_play"]["snapshots"] > 0
    assert summary["quality"]["episodes"] == 4
    assert summary["quality"]["mean_reward"] >= 0, "the bot names 0 and takes nothing away"
    assert summary["engines"]["decisions"] > summary["env_steps"] >= 512, "the other side's are the engine's too"
    alone = ("env.entry_point=alternating_games:Alternating", *(text for text in game if "env.game" not in text))
    fasttrain("+profile=speed", *alone, "opponent=self", *SMALL).refused("chooses them in a GameSpec")


@pytest.mark.parametrize("algo", [["algo=maskable_recurrent_ppo", "algo.lstm_hidden_size=16"], ["algo=maskable_ppo"]])
def test_a_refused_action_is_asked_again(fasttrain: RunCommand, algo: list[str]):
    """Of one that remembers too: it forgets that it was asked."""
    done = fasttrain("+profile=speed", *overrides("--fault", "refuse=0.05"), *SMALL, *algo).ok()
    engines = done.json("summary.json")["engines"]
    assert engines["refused"] > 0
    assert (engines["lost_games"], failed_games(done.folder)) == ({}, [])
