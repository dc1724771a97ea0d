"""examples/: each seam by which people bring their own parts, used from the command line as its file says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stable_baselines3

from conftest import RunCommand
from fasttrain.vec.native import NativeVecEnv
from messages import assert_says, wrong_inputs

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CART = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")
RUN = ("+profile=balance", *CART, "total_timesteps=512", "algo.rollout_size=256", "batch_size=128", "eval.episodes=2",
       "checkup=off", "live=off", "fused_update=off", "log_every=1", "report=false")  # fmt: skip


@pytest.fixture
def run(fasttrain: RunCommand, tmp_path: Path) -> RunCommand:
    """The command line in a working directory that holds the examples."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    return fasttrain


def test_a_callback_with_arguments_logs_and_one_of_sb3s_ends_the_training(run: RunCommand):
    ends = "{callback: 'stable_baselines3.common.callbacks:StopTrainingOnMaxEpisodes', max_episodes: 4}"
    longer = "{callback: 'curriculum:Longer', every: 100}"
    done = run(*RUN, "total_timesteps=2048", f"callbacks=[{longer}, {ends}]", "loggers=[csv]").ok()
    summary = done.json("summary.json")
    assert summary["stopped_by"] == "callback"
    assert summary["env_steps"] < 2048
    assert "curriculum/mean_length" in done.table("progress.csv")[-1]


def test_bidding_and_playing_are_two_policies(run: RunCommand):
    done = run(*RUN[:1], "algo=ppo", "vec_env=dummy", *RUN[4:], "env.entry_point=bidding:Bidding",
               "policies={manager: {decides: bid, batch_size: 64}, worker: {decides: play}}").ok()  # fmt: skip
    told = done.json("summary.json")["policies"]
    assert 4.5 < told["worker"]["decisions"] / told["manager"]["decisions"] < 5.5


def test_goals_are_the_memory_of_a_worker_without_one(run: RunCommand):
    done = run("+profile=speed", "algo=ppo", *RUN[5:], "env.entry_point=recall:Recall", "total_timesteps=16000",
               "seed=1", "algo.rollout_size=1024", "batch_size=128", "algo.learning_rate=0.01", "algo.n_epochs=10",
               "eval.episodes=30", "policies={manager: {goal_every: 5, goals: 3}, worker: {}}").ok()  # fmt: skip
    assert done.json("summary.json")["quality"]["mean_reward"] > 3.5, "without goals 2.33 at best"


def test_a_curriculum_makes_the_environments_harder(run: RunCommand):
    wanted = ("+profile=balance", "env.entry_point=levels:Corridor", "algo=ppo", "callbacks=[levels:Harder]",
              "eval.env_kwargs.length=16", "total_timesteps=40000", "checkup=off", "fused_update=off", "batch_size=256",
              "algo.rollout_size=2048", "algo.learning_rate=1e-3", "loggers=[csv]", "log_every=1")  # fmt: skip
    done = run(*wanted, "report=false", "eval.episodes=2").ok()
    assert float(done.table("progress.csv")[-1]["curriculum/length"]) > 2
    assert done.json("summary.json")["quality"]["mean_length"] in (16.0, 48.0), "evaluated on the longest corridor"


@pytest.mark.parametrize("profile", ["balance", "speed"])  # the latter records nothing of its own
def test_a_logger_gets_sb3s_names_over_env_steps(run: RunCommand, tmp_path: Path, profile: str):
    csvs = ["csv"] if profile == "speed" else []
    mine = "{logger: 'json_lines:JsonLines', file: mine.jsonl}"
    done = run(f"+profile={profile}", *RUN[1:], f"loggers=[{', '.join([*csvs, mine])}]").ok()
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert len(rows) > 1
    assert rows[-1]["step"] == rows[-1]["time/total_timesteps"] > 0
    assert "train/loss" in rows[-1]
    assert len(done.table("progress.csv")) > 1 if csvs else not (done.folder / "progress.csv").exists()


def test_a_wrapper_and_a_features_extractor_with_arguments_are_trained_and_played(run: RunCommand):
    extractor = "algo.policy_kwargs.features_extractor"
    done = run(*RUN, "env.wrappers=[{wrapper: 'scaled:Scaled', factor: 0.5}]", f"{extractor}_class=residual:Residual",
               f"{extractor}_kwargs.width=16").ok()  # fmt: skip
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] == pytest.approx(0.5 * quality["mean_length"])
    run("eval", f"run={done.folder}", "eval.episodes=2").ok()


A2C = (*(text for text in RUN if not text.startswith(("algo=", "batch_size="))), "algo=a2c")
GAME = ("+profile=balance", "fused_update=off", "total_timesteps=64")


@pytest.mark.parametrize("typed", wrong_inputs("parts of the user's own"))
def test_what_is_not_there_is_told_in_one_line(run: RunCommand, typed: str):
    done = run("+profile=balance", "num_envs=2", "fused_update=off", "total_timesteps=64", *shlex.split(typed))
    done.refused()
    assert_says("parts of the user's own", typed, re.sub(r" \(/\S+fading.py:.*", "", done.err))


def test_a_wrapper_without_a_name_is_told(run: RunCommand):
    run(*CART, "env.wrappers=[{factor: 2}]").refused("expected {wrapper: my.module:Name, …}, got {'factor': 2}")


def test_an_opponent_with_arguments_decides_for_the_other_side(run: RunCommand, tmp_path: Path):
    (tmp_path / "counting.py").write_text(
        "import pathlib, opponents\nclass Counting(opponents.FirstLegal):\n"
        "    def episode_over(self, env, info):\n"
        "        with pathlib.Path('episodes.txt').open('a') as f:\n            f.write(f'{env} {self.errs}\\n')\n"
    )
    done = run(*GAME, "total_timesteps=1024", "num_envs=8", "algo.rollout_size=512", "batch_size=256", "report=false",
               "eval.episodes=2", "live=off", "algo.net_arch=[16]", "checkup=off",
               "opponent={opponent: 'counting:Counting', errs: 0.25}").ok()  # fmt: skip
    seen = (tmp_path / "episodes.txt").read_text().split("\n")[:-1]
    assert len(seen) >= 4
    assert {line.split()[1] for line in seen} == {"0.25"}
    assert done.json("summary.json")["quality"]["episodes"] == 2


def test_an_algorithm_of_ones_own_trains_is_timed_plays_and_resumes(run: RunCommand):
    mine = ("algo.entry_point=fading:FadingA2C", "algo.kwargs.fade=2", "algo.ent_coef=0.1")
    done = run(*A2C, *mine, "loggers=[csv]", "checkpoint_every=256").ok()
    last = done.table("progress.csv")[-1]
    left = 1 - float(last["time/total_timesteps"]) / 512
    assert float(last["train/ent_coef"]) == pytest.approx(0.1 * left**2), "squared, as fade=2 says"
    assert done.json("summary.json")["perf"]["optim_ms"] > 0, "derived classes are timed as SB3's are"
    run("eval", f"run={done.folder}", "eval.episodes=2").ok()
    run("eval", f"run={done.folder}", "eval.episodes=2", "--trust").ok()
    run("resume", f"run={done.folder}", "total_timesteps=1024").ok()


@pytest.mark.parametrize("settings", ["+profile=speed", "engine=fast"])
def test_a_loss_term_of_ones_own_is_computed_logged_and_never_left_out(run, tmp_path, monkeypatch, settings):
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu").save(tmp_path / "other.zip")
    monkeypatch.setenv("REFERENCE", str(tmp_path / "other.zip"))
    asked = (text for text in RUN[1:] if text != "fused_update=off")
    done = run(settings, *asked, "loggers=[csv]", "algo.entry_point=near_reference:NearReference").ok()
    assert float(done.table("progress.csv")[-1]["train/reference_kl"]) > 0
    assert ("NearReference.loss is overridden" in done.out) == (settings == "+profile=speed")


def test_a_native_game_is_the_single_env_row_by_row_and_is_learned(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    from tictactoe import TicTacToe, TicTacToeEnv

    env, single, rng = NativeVecEnv(TicTacToe(16), seed=5), TicTacToeEnv(), np.random.default_rng(0)
    seen, (alone, _) = env.reset()[3], single.reset(seed=8)
    for _ in range(300):
        assert (seen == alone).all()
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in env.slots.action_masks])
        alone, reward, over, _, _ = single.step(actions[3])
        observations, rewards, dones, _ = env.step(actions)
        seen = observations[3]
        assert (rewards[3], dones[3]) == (reward, over)
        if over:
            alone = single.slots.observations[0].copy()
    few = ("total_timesteps=12288", "algo.rollout_size=1024", "batch_size=128", "eval.episodes=0", "live=off")
    off = ("fused_update=off", "report=false")
    done = run("+profile=speed", "env.game=tictactoe:GAME", "num_envs=32", *few, *off).ok()
    won = [row["is_win"].lower() in ("1", "true") for row in done.table("episodes.csv")]
    assert np.mean(won[-500:]) > np.mean(won[:500]) + 0.15


def test_a_game_in_a_package_of_its_own_is_trained_by_its_name(fasttrain, tmp_path, monkeypatch):
    """pip builds and installs it by its pyproject.toml, beside fasttrain."""
    source, name = shutil.copytree(EXAMPLES / "third_party_game", tmp_path / "source"), "higher_lower"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", tmp_path / "site", source], check=True, timeout=120
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    small = ("total_timesteps=512", "algo.rollout_size=256", "batch_size=64", "num_envs=4", "eval.episodes=4")
    done = fasttrain("+profile=speed", f"env={name}", "algo=ppo", *small, "report=false", "fused_update=off").ok()
    config = done.json("plan.json")["config"]
    assert [config["env"][key] for key in ("game", "id", "kwargs")] == [
        name,
        "higher_lower/HigherLower-v0",
        {"cards": 6},
    ]
    assert config["algo"]["learning_rate"] == 1e-3, "the game's own"
    assert done.json("summary.json")["quality"]["win_rate"] is not None, "as the game tells it"


def test_the_notebook_s_cells_run_one_after_another(tmp_path: Path):
    """As a script, so that its class is of `__main__` as in a notebook."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert script.endswith("int(action) == env.symbol")
    learnt = "int(action) == env.symbol and quality['mean_reward'] > 6"
    text = script.replace("total_timesteps=20_000", "total_timesteps=10_000")
    (tmp_path / "cells.py").write_text(f"{text}\nraise SystemExit(0 if {learnt} else 'it has learnt nothing')\n")
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebook_runs_in_jupyter(tmp_path: Path):
    nbformat, nbclient, _ = (
        pytest.importorskip(name, reason=f"{name} is not installed") for name in ("nbformat", "nbclient", "ipykernel")
    )
    book = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = str([output for cell in book.cells for output in cell.get("outputs", [])])
    assert "[PERF]" in told
    assert "'text/plain': 'True'" in told
