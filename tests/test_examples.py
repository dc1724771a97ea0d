"""examples/: each seam by which people bring their own parts, used from the command line as its file says."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stable_baselines3

from conftest import RunCommand
from fasttrain.vec.native import NativeVecEnv
from installed import install

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUN = ("+profile=balance", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=2048", "algo.rollout_size=512",
       "batch_size=128", "eval.episodes=2", "vec_env=dummy", "checkup=off", "live=off", "fused_update=off")  # fmt: skip


@pytest.fixture
def run(fasttrain: RunCommand, tmp_path: Path) -> RunCommand:
    """The command line in a working directory that holds the examples."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    return fasttrain


def test_a_callback_with_arguments_logs_and_one_of_sb3s_ends_the_training(run: RunCommand):
    ends = "{callback: 'stable_baselines3.common.callbacks:StopTrainingOnMaxEpisodes', max_episodes: 4}"
    done = run(*RUN, f"callbacks=[{{callback: 'curriculum:Longer', every: 300}}, {ends}]", "loggers=[csv]",
               "log_every=1")  # fmt: skip
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    assert summary["stopped_by"] == "callback"
    assert summary["env_steps"] < 2048
    rows = list(csv.DictReader((done.folder / "progress.csv").read_text().splitlines()))
    assert "curriculum/mean_length" in rows[-1]


def test_a_logger_gets_sb3s_names_over_env_steps(run: RunCommand, tmp_path: Path):
    done = run(*RUN, "loggers=[{logger: 'json_lines:JsonLines', file: mine.jsonl}]", "log_every=1")
    assert done.exit_code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == rows[-1]["time/total_timesteps"] > 0
    assert "train/loss" in rows[-1]
    assert not (done.folder / "progress.csv").exists()


def test_loggers_that_are_named_are_written_where_a_profile_records_nothing(run: RunCommand, tmp_path: Path):
    done = run(
        *(text.replace("balance", "speed") for text in RUN), "loggers=[csv, json_lines:JsonLines]", "log_every=1"
    )
    assert done.exit_code == 0, done.err
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) > 1
    assert len((done.folder / "progress.csv").read_text().splitlines()) > 2


def test_a_wrapper_with_arguments_scales_the_rewards(run: RunCommand):
    done = run(*RUN, "env.wrappers=[{wrapper: 'scaled:Scaled', factor: 0.5}]")
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] == pytest.approx(0.5 * quality["mean_length"])


def test_a_features_extractor_with_arguments_is_trained_and_played(run: RunCommand):
    done = run(
        *RUN,
        "algo.policy_kwargs.features_extractor_class=residual:Residual",
        "algo.policy_kwargs.features_extractor_kwargs.width=16",
    )
    assert done.exit_code == 0, done.err
    assert run("eval", f"run={done.folder}", "eval.episodes=2").exit_code == 0


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("callbacks=[curriculum:Shorter]", "callbacks: curriculum:Shorter: module 'curriculum' has no 'Shorter'"),
        (
            "callbacks=[scaled:Scaled]",
            "callbacks: scaled:Scaled must be derived from stable_baselines3.common.callbacks.",
        ),
        (
            "callbacks=['json:JSONEncoder']",
            "callbacks: json:JSONEncoder must be derived from stable_baselines3.common.callbacks.",
        ),
        ("callbacks=[{every: 3}]", "callbacks: expected {callback: my.module:Name, …}, got {'every': 3}"),
        (
            "loggers=[cvs]",
            "loggers: 'cvs' is none of csv, stdout, mlflow, tensorboard, trackio, wandb, prometheus, nor module:Class; "
            "did you mean 'csv'?",
        ),
        ("algo.policy=MlpPolic", "algo.policy=MlpPolic: not one of auto, MlpPolicy"),
        ("algo=dqn algo.dueling=true algo.policy=residual:Residual", "contradicts algo.dueling=true"),
        ("algo=sac algo.ent_coef=abc", "algo.ent_coef=abc: expected a number, auto, or auto_0.1 to begin with"),
        ("algo=td3 algo.policy_delay=0", "algo.policy_delay=0: must be at least 1"),
        ("algo.policy_kwargs.net_arch=[8]", "algo.policy_kwargs.net_arch is a key of its own: take algo.net_arch=…"),
        ("env.wrappers=[{factor: 2}]", "env.wrappers: expected {wrapper: my.module:Name, …}, got {'factor': 2}"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(run: RunCommand, typed: str, told: str):
    base = RUN if "algo=" not in typed else ("env.id=CartPole-v1",)
    done = run(*base, *(typed.split() if "algo=" in typed else [typed]))
    assert done.exit_code == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_an_opponent_with_arguments_decides_for_the_other_side(run: RunCommand, tmp_path: Path):
    counting = (
        "import pathlib, opponents\nclass Counting(opponents.FirstLegal):\n"
        "    def episode_over(self, env, info):\n"
        "        with pathlib.Path('episodes.txt').open('a') as f:\n            f.write(f'{env} {self.errs}\\n')\n"
    )
    (tmp_path / "counting.py").write_text(counting)
    tiny = ("+profile=balance", "total_timesteps=2048", "num_envs=8", "algo.rollout_size=1024",
            "batch_size=256", "eval.episodes=4", "live=off", "fused_update=off", "algo.net_arch=[16]")  # fmt: skip
    done = run(*tiny, "opponent={opponent: 'counting:Counting', errs: 0.25}")
    assert done.exit_code == 0, done.err
    seen = (tmp_path / "episodes.txt").read_text().split("\n")[:-1]
    assert len(seen) >= 8
    assert {line.split()[1] for line in seen} == {"0.25"}
    assert done.json("summary.json")["quality"]["episodes"] == 4


@pytest.mark.parametrize(
    ("opponent", "told"),
    [
        ("opponents:Nobody", "opponent: opponents:Nobody"),
        ("{opponent: 'opponents:FirstLegal', depth: 3}", "could not be made with {'depth': 3}"),
        ("pathlib:Path", "opponent: pathlib:Path must be derived from fasttrain.vec.self_play.Opponent"),
    ],
)
def test_an_opponent_that_cannot_be_is_told(run: RunCommand, opponent: str, told: str):
    done = run("+profile=balance", "fused_update=off", "eval.episodes=2", "total_timesteps=64", f"opponent={opponent}")
    assert done.exit_code == 2
    assert told in done.err.splitlines()[0]


FADING = (*(text for text in RUN if not text.startswith(("algo=", "batch_size="))), "algo=a2c")


def test_an_algorithm_of_ones_own_trains_is_timed_plays_and_resumes(run: RunCommand):
    mine = ("algo.entry_point=fading:FadingA2C", "algo.kwargs.fade=2", "algo.ent_coef=0.1")
    done = run(*FADING, *mine, "loggers=[csv]", "log_every=1", "checkpoint_every=1024")
    assert done.exit_code == 0, done.err
    rows = list(csv.DictReader((done.folder / "progress.csv").read_text().splitlines()))
    left = 1 - float(rows[-1]["time/total_timesteps"]) / 2048
    assert float(rows[-1]["train/ent_coef"]) == pytest.approx(0.1 * left**2), "squared, as fade=2 says"
    assert done.json("summary.json")["perf"]["optim_ms"] > 0, "derived classes are timed as SB3's are"
    for command in (
        ["eval", "eval.episodes=2"],
        ["eval", "eval.episodes=2", "--trust"],
        ["resume", "total_timesteps=4096"],
    ):
        again = run(*command[:1], f"run={done.folder}", *command[1:])
        assert again.exit_code == 0, again.err


@pytest.mark.parametrize("settings", [["+profile=speed"], ["engine=fast"]], ids=["speed", "plain"])
def test_a_loss_term_of_ones_own_is_computed_logged_and_never_left_out(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
):
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu").save(tmp_path / "other.zip")
    monkeypatch.setenv("REFERENCE", str(tmp_path / "other.zip"))
    small = (*RUN[1:3], "total_timesteps=512", "algo.rollout_size=256", "batch_size=64", *RUN[7:-1])
    asked = [*settings, *small, "loggers=[csv]", "log_every=1", "eval.episodes=0", "report=false"]
    done = run(*asked, "algo.entry_point=near_reference:NearReference")
    assert done.exit_code == 0, done.err
    rows = list(csv.DictReader((done.folder / "progress.csv").read_text().splitlines()))
    assert float(rows[-1]["train/reference_kl"]) > 0
    if settings == ["+profile=speed"]:
        assert "NearReference.loss is overridden" in done.out


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("algo.entry_point=fading:Fadng", "algo.entry_point=fading:Fadng: module 'fading' has no 'Fadng'"),
        ("algo.entry_point=scaled:Scaled", "takes a class derived from stable_baselines3.A2C, it is <class"),
        (
            "algo.entry_point=fading:FadingA2C algo.kwargs.fad=1",
            "with algo.kwargs={'fad': 1}: TypeError: A2C.__init__()",
        ),
        ("algo.kwargs.fade=1", "algo.kwargs={'fade': 1} without algo.entry_point"),
    ],
)
def test_an_algorithm_that_is_none_is_told_in_one_line(run: RunCommand, typed: str, told: str):
    done = run(*FADING, *typed.split())
    assert done.exit_code == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_a_native_game_is_the_single_env_row_by_row_and_is_learned(run: RunCommand, tmp_path: Path):
    sys.path.insert(0, str(tmp_path))
    try:
        from tictactoe import TicTacToe, TicTacToeEnv
    finally:
        sys.path.remove(str(tmp_path))
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
    game = ("env.game=tictactoe:GAME", "num_envs=32")
    few = ("total_timesteps=16384", "algo.rollout_size=1024", "batch_size=128", "eval.episodes=200", "live=off")
    done = run("+profile=speed", *game, *few, "fused_update=off", "report=false")
    assert done.exit_code == 0, done.err
    rows = csv.DictReader((done.folder / "episodes.csv").read_text().splitlines())
    won = [row["is_win"].lower() in ("1", "true") for row in rows]
    assert np.mean(won[-500:]) > np.mean(won[:500]) + 0.2


def test_a_game_in_a_package_of_its_own_is_trained_by_its_name(tmp_path: Path):
    """Its package is copied beside the entry point of its pyproject.toml, as an installer leaves them."""
    source = EXAMPLES / "third_party_game"
    (group, name, place) = re.search(
        r'entry-points."(.+?)"]\n(\w+) = "(.+?)"', (source / "pyproject.toml").read_text(encoding="utf-8")
    ).groups()  # type: ignore[union-attr]
    install(tmp_path / "site", "third-party-game", {group: {name: place}})
    shutil.copytree(source / "higher_lower", tmp_path / "site" / "higher_lower")
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, "-m", "fasttrain", "+profile=speed", f"env={name}", "algo=ppo", "total_timesteps=512",
            "algo.rollout_size=256", "batch_size=64", "num_envs=4", "eval.episodes=4", "report=false",
            "fused_update=off", "hydra.run.dir=run"]  # fmt: skip
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plan, summary = (json.loads((tmp_path / "run" / f"{file}.json").read_text()) for file in ("plan", "summary"))
    env = plan["config"]["env"]
    assert (env["game"], env["id"], env["kwargs"]) == (name, "higher_lower/HigherLower-v0", {"cards": 6})
    assert plan["config"]["algo"]["learning_rate"] == 1e-3, "the game's own"
    assert summary["quality"]["win_rate"] is not None, "as the game tells it"


def test_the_notebook_s_cells_run_one_after_another(tmp_path: Path):
    """As a script, so that its class is of `__main__` as in a notebook."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    script = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert script.endswith("int(action) == env.symbol")
    check = (
        "raise SystemExit(0 if int(action) == env.symbol and quality['mean_reward'] > 7 else 'it has learnt nothing')"
    )
    (tmp_path / "cells.py").write_text(f"{script}\n{check}\n")
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebook_runs_in_jupyter(tmp_path: Path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    book = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = str([output for cell in book.cells for output in cell.get("outputs", [])])
    assert "[PERF]" in told
    assert "'text/plain': 'True'" in told
