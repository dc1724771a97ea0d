"""`fasttrain play`: what is shown, what is asked, and how it ends."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from conftest import RunCommand, configured
from fasttrain.algos.dqn import DQN
from fasttrain.algos.recurrent import MaskableRecurrentPPO
from fasttrain.cli import main
from fasttrain.spec.plain import to_dict
from fasttrain_games.skullking.env import SkullKingEnv

FAST = "play.speed=100000"
LAKE = ("env.id=FrozenLake-v1", "+env.kwargs.is_slippery=false", "env.max_episode_steps=20", "algo=ppo")
MODELS: dict[str, Callable[[], Any]] = {
    "skull": lambda: MaskablePPO("MlpPolicy", SkullKingEnv(3), n_steps=2, batch_size=2, seed=1, device="cpu"),
    "skull_dqn": lambda: DQN("MlpPolicy", SkullKingEnv(3), buffer_size=10, seed=1, device="cpu"),
    "lake": lambda: PPO("MlpPolicy", gym.make("FrozenLake-v1"), n_steps=2, batch_size=2, seed=1, device="cpu"),
    "lake_lstm": lambda: RecurrentPPO(
        "MlpLstmPolicy", gym.make("FrozenLake-v1"), n_steps=2, batch_size=2, seed=1, device="cpu"
    ),
    "skull_lstm": lambda: MaskableRecurrentPPO(
        "MlpLstmPolicy", SkullKingEnv(3), n_steps=2, batch_size=2, seed=1, device="cpu"
    ),
    "pole": lambda: PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=2, batch_size=2, seed=1, device="cpu"),
}
SKULL = ("env.kwargs.num_players=3",)
ARGUMENTS = {
    "skull": SKULL,
    "skull_dqn": (*SKULL, "algo=dqn", "engine=fast"),
    "lake": LAKE,
    "lake_lstm": (*LAKE[:-1], "algo=recurrent_ppo"),
    "skull_lstm": (*SKULL, "algo=maskable_recurrent_ppo"),
    "pole": ("env.id=CartPole-v1", "algo=ppo"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run by name, as training leaves it; its model is as it was made."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *more: str) -> Path:
        path = folder / "_".join([name, *(re.sub(r"\W", "", text) for text in more)])
        if not path.exists():
            path.mkdir()
            config = to_dict(configured(*ARGUMENTS[name], *more))
            (path / "plan.json").write_text(json.dumps({"config": config}))
            MODELS[name]().save(path / "model.zip")
        return path

    return run


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What stands in standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_game_is_shown_decision_by_decision(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    done = fasttrain("play", f"run={runs('skull')}", FAST, "play.seed=3")
    assert (done.exit_code, done.err) == (0, "")
    head, *_, summary = done.out.strip().splitlines()
    assert head == "skullking: maskable_ppo after 0 steps, opponents: medium, play.seed=3"
    assert [int(number) for number in re.findall(r"--- game 1, decision (\d+)", done.out)] == list(range(1, 66))
    assert len(re.findall(r"^agent (bids \d+|plays [a-z 0-9]+)$", done.out, re.M)) == 65
    ratings = re.findall(r"^  probability: (.*)$", done.out, re.M)
    assert all(1 < len(rated.split(", ")) <= 3 for rated in ratings)
    assert len(ratings) + done.out.count("its only legal choice") == 65
    assert done.out.count("bids: agent ") == 10
    assert done.out.count(" over (tricks/bid, points)") == 10
    assert re.search(r"^game over: (won|lost|shared) with ", done.out, re.M)
    assert re.search(r"^game 1: (won|lost|won \(shared\)), 65 decisions, return ", done.out, re.M)
    assert "opponents_beaten" in done.out
    assert re.fullmatch(r"1 game, mean return \S+, the agent won [01] of 1, mean score difference \S+", summary)


def test_seed_decides_the_game_and_acting_may_be_drawn(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    drawn = "play.deterministic=false"
    shown = [fasttrain("play", f"run={runs('skull')}", FAST, drawn, f"play.seed={seed}").out for seed in (5, 5, 6)]
    # On a slow machine the first line says that the model is being loaded.
    games = ["\n".join(line for line in text.splitlines() if not line.startswith("loading ")) for text in shown]
    assert games[0] == games[1]
    assert games[0].splitlines()[1:] != games[2].splitlines()[1:]
    greedy = fasttrain("play", f"run={runs('skull')}", FAST, "play.seed=5").out.splitlines()
    assert [line for line in greedy if not line.startswith("loading ")] != games[0].splitlines()


def test_q_values_and_other_opponents(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    done = fasttrain("play", f"run={runs('skull_dqn')}", FAST, "play.episodes=2", "opponent=random")
    assert done.exit_code == 0, done.err
    assert re.search(r"^  Q-value: (bids|plays) .* [+-]\d\.\d{3}, ", done.out, re.M)
    assert "opponents: random" in done.out
    assert "--- game 2 of 2, decision 65" in done.out
    assert done.out.strip().splitlines()[-1].startswith("2 games, mean return ")


def test_an_agent_trained_by_self_play_sits_at_all_seats(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    done = fasttrain("play", f"run={runs('skull', 'opponent=self')}", FAST)
    assert done.exit_code == 0, done.err
    assert done.out.count("--- game 1, decision ") == 65
    assert "agent 2" in done.out
    assert "bot" not in done.out


def test_any_env_with_text_can_be_watched(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    done = fasttrain("play", f"run={runs('lake')}", FAST, "play.seed=0")
    assert (done.exit_code, done.err) == (0, "")
    assert "SFFF" in done.out
    assert re.search(r"^agent: [0-3]\n  probability: [0-3] \d+ %, ", done.out, re.M)
    assert re.search(r"^game 1: .*, \d+ decisions, return 0$", done.out, re.M)
    assert done.out.strip().splitlines()[-1] == "1 game, mean return 0"


def test_an_agent_that_remembers_is_watched_without_ratings(
    runs: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, predict = [], RecurrentPPO.predict

    def noted(model: Any, *given: Any, **more: Any) -> Any:
        begun.extend(more["episode_start"].tolist())
        return predict(model, *given, **more)

    monkeypatch.setattr(RecurrentPPO, "predict", noted)
    done = fasttrain("play", f"run={runs('lake_lstm')}", FAST, "play.episodes=3")
    assert done.exit_code == 0, done.err
    assert begun.count(True) == 3, "each episode begins without memory"
    assert len(begun) > 3
    assert "agent: " in done.out
    assert "probability" not in done.out


def test_with_observations_normalised_as_in_training(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    run = runs("skull", "env.normalize=[obs]")
    assert "no vecnormalize.npz lies beside" in fasttrain("play", f"run={run}", FAST).err
    VecNormalize(DummyVecEnv([lambda: SkullKingEnv(3)])).save(str(run / "vecnormalize.pkl"))
    assert "--trust" in fasttrain("play", f"run={run}", FAST).err
    done = fasttrain("play", f"run={run}", FAST, "--trust")
    assert done.exit_code == 0, done.err


def test_enter_at_each_decision(runs: Callable[..., Path], fasttrain: RunCommand, typed: Callable[[str], None]) -> None:
    typed("\n\n")
    done = fasttrain("play", f"run={runs('skull')}", "play.speed=0")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.count("Enter to go on") == 3
    assert done.out.endswith("stopped\nno game finished\n")
    typed("\nq\n\n\n")
    assert fasttrain("play", f"run={runs('skull')}", "play.speed=0").out.count("Enter to go on") == 2


def test_playing_against_the_agent(
    runs: Callable[..., Path], fasttrain: RunCommand, typed: Callable[[str], None]
) -> None:
    """Every number is tried at every decision: illegal ones are refused until a legal one comes."""
    typed("".join(f"{action}\n" for _ in range(66) for action in range(86)))
    done = fasttrain("play", f"run={runs('skull')}", "play.human=true", "play.seed=1")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.count("--- game 1, decision ") == 65
    assert len(re.findall(r"^    1  bids 1$", done.out, re.M)) == 10
    assert "is none of the legal choices: 0-" in done.out
    assert "bids: you 0, agent 1 " in done.out
    assert "bot" not in done.out
    assert "probability" not in done.out  # the agent's hand stays its own
    assert re.search(r"you won [01] of 1", done.out)


@pytest.mark.parametrize("text", ["q\n", "", "x\n1.5\n-1\n\nQ\n"])
def test_leaving_is_no_error(
    runs: Callable[..., Path], fasttrain: RunCommand, typed: Callable[[str], None], text: str
) -> None:
    typed(text)
    done = fasttrain("play", f"run={runs('skull')}", "play.human=true")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.count("is none of the legal choices: 0-1") == max(0, text.count("\n") - 1)
    assert done.out.endswith("stopped\nno game finished\n")


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        ("", [], "play needs run=FOLDER"),
        ("", ["run=nowhere"], "run=nowhere: no plan.json there; name the folder of a finished run"),
        ("", ["run=nowhere", "play.speed=-1"], "play.speed=-1.0: must be at least 0"),
        ("", ["run=nowhere", "play.episodes=0"], "play.episodes=0: must be at least 1"),
        ("", ["run=nowhere", "play.sped=1"], "unknown key 'play.sped'; did you mean 'play.speed'"),
        (
            "",
            ["run=nowhere", "num_envs=3"],
            "play.… and --trust only: num_envs would do nothing",
        ),
        ("skull", ["model=best"], "no best_model.zip there; the run was made without eval_every"),
        ("skull", ["opponent=hart"], "unknown opponent 'hart', did you mean 'hard'"),
        ("skull", ["opponent=hard", "play.human=true"], "opponent=hard contradicts play.human=true"),
        ("lake", ["play.human=true"], "env FrozenLake-v1 has no opponents that the agent could play"),
        ("pole", [], "env.id=CartPole-v1 draws itself only as human, rgb_array, play shows text: give it a render()"),
    ],
)
def test_bad_input_is_one_line(
    runs: Callable[..., Path], fasttrain: RunCommand, run: str, arguments: list[str], message: str
) -> None:
    done = fasttrain("play", *([f"run={runs(run)}"] if run else []), *arguments)
    assert done.exit_code == 2
    assert done.err.count("\n") == 1
    assert message in done.err


def test_a_run_without_a_model_is_named(runs: Callable[..., Path], fasttrain: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text((runs("skull") / "plan.json").read_text())
    done = fasttrain("play", f"run={tmp_path}")
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert "no model.zip there" in done.err


def test_keys_of_play_mean_nothing_elsewhere(fasttrain: RunCommand) -> None:
    done = fasttrain("play.speed=3")
    assert done.exit_code == 2
    assert done.err == "fasttrain: error: play.speed means nothing for train; to watch a run: fasttrain play run=…\n"


@pytest.mark.parametrize("arguments", [["opponent=self", FAST], ["play.human=true"]])
def test_an_agent_that_remembers_plays_all_seats(
    runs: Callable[..., Path], fasttrain: RunCommand, typed: Callable[[str], None], arguments: list[str]
) -> None:
    typed("".join(f"{action}\n" for _ in range(66) for action in range(86)))
    done = fasttrain("play", f"run={runs('skull_lstm')}", "play.seed=1", *arguments)
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.count("--- game 1, decision ") == 65
    assert re.search(r"won [01] of 1", done.out)


def test_stacked_frames_play_no_two_sides(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    done = fasttrain("play", f"run={runs('skull', 'env.frame_stack=2')}", "play.human=true", "--trust")
    assert done.exit_code == 2
    assert "play with env.frame_stack=2" in done.err


DUEL = """
import gymnasium as gym
import numpy as np
from fasttrain.native import GameSpec

GAME = GameSpec(env="duel:Duel", opponent_key="opponents", eval_opponent="none")

class Duel(gym.Env):
    # Each side in turn names two numbers, four times; the larger sum wins.
    metadata = {"render_modes": ["ansi"]}
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.MultiDiscrete([3, 2])

    def __init__(self, opponents="none", render_mode=None):
        self.opponents, self.render_mode, self.named = opponents, render_mode, []

    def reset(self, seed=None, options=None):
        self.named = []
        return np.zeros(1, np.float32), {}

    @property
    def opponents_turn(self):
        return self.opponents == "self" and len(self.named) % 2 == 1

    def action_masks(self):
        return np.array([True, False, True, True, len(self.named) < 4])

    def step(self, action):
        self.named.append(int(sum(action)))
        over = len(self.named) == 8
        won = sum(self.named[::2]) > sum(self.named[1::2])
        info = {"is_win": won} if over else {}
        return np.full(1, len(self.named), np.float32), float(over and won), over, False, info

    def describe_choice(self, part, value):
        return f"half of {2 * value}" if part else ""

    def render(self):
        return f"named: {self.named}"
"""


def test_a_two_sided_env_of_ones_own(
    fasttrain: RunCommand, tmp_path: Path, typed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub-actions are asked for one by one, forced ones not at all; the agent's answer is shown at once."""
    (tmp_path / "duel.py").write_text(DUEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ("env.game=duel:GAME",)
    (tmp_path / "plan.json").write_text(json.dumps({"config": to_dict(configured(*own))}))
    made = importlib.import_module("duel").Duel()
    MaskablePPO("MlpPolicy", made, n_steps=2, batch_size=2, seed=1, device="cpu").save(tmp_path / "model.zip")
    typed("1\n2\n7\n1\n2\n0\n2\n2\n")
    done = fasttrain("play", f"run={tmp_path}", "play.human=true")
    assert (done.exit_code, done.err) == (0, "")
    assert "'1' is none of the legal choices: 0, 2" in done.out
    assert "'7' is none of the legal choices: 0-1" in done.out
    assert "legal: 0, 2\n" in done.out
    assert "    1  half of 2\n" in done.out
    assert done.out.count("your choice 1 of 2") == 5  # one refused
    assert done.out.count("your choice 2 of 2") == 3  # one refused; from the third decision on there is no choice
    assert len(re.findall(r"^opponent: \[[02], [01]\]$", done.out, re.M)) == 4
    assert re.search(
        r"named: \[3, \d, 2, \d, 2, \d, 2, \d\]\ngame 1: (won|lost), 4 decisions, return [01]$", done.out, re.M
    )


def test_ctrl_c_ends_the_show(
    runs: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttrain.deploy.play.time.sleep", interrupt)
    done = fasttrain("play", f"run={runs('skull')}")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.endswith("stopped\nno game finished\n")


def test_playing_leaves_nothing_behind(
    runs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["play", f"run={runs('lake')}", FAST]) == 0
    assert "1 game, mean return" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
