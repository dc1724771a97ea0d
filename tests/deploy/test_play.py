from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from conftest import RunCommand, configured
from fasttrain.algos.dqn import DQN
from fasttrain.algos.recurrent import MaskableRecurrentPPO
from fasttrain.native import GameSpec
from fasttrain.spec.plain import to_dict
from fasttrain_games.skullking.env import SkullKingEnv
from messages import assert_says, wrong_inputs
from plain_env import PlainEnv

FAST = "play.speed=100000"
EVERY = "".join(f"{action}\n" for _ in range(66) for action in range(86))
LAKE = ("env.id=FrozenLake-v1", "+env.kwargs.is_slippery=false", "env.max_episode_steps=20", "algo=ppo")
SMALL: dict[str, Any] = {"n_steps": 2, "batch_size": 2, "seed": 1, "device": "cpu"}
MODELS: dict[str, Callable[[], Any]] = {
    "skull": lambda: MaskablePPO("MlpPolicy", SkullKingEnv(3), **SMALL),
    "skull_dqn": lambda: DQN("MlpPolicy", SkullKingEnv(3), buffer_size=10, seed=1, device="cpu"),
    "lake": lambda: PPO("MlpPolicy", gym.make("FrozenLake-v1"), **SMALL),
    "lake_lstm": lambda: RecurrentPPO("MlpLstmPolicy", gym.make("FrozenLake-v1"), **SMALL),
    "skull_lstm": lambda: MaskableRecurrentPPO("MlpLstmPolicy", SkullKingEnv(3), **SMALL),
    "pole": lambda: PPO("MlpPolicy", gym.make("CartPole-v1"), **SMALL),
    "duel": lambda: MaskablePPO("MlpPolicy", Duel(), **SMALL),
}
SKULL = ("env.kwargs.num_players=3",)
ARGUMENTS = {
    "skull": SKULL, "skull_dqn": (*SKULL, "algo=dqn", "engine=fast"), "lake": LAKE,
    "lake_lstm": (*LAKE[:-1], "algo=recurrent_ppo"), "skull_lstm": (*SKULL, "algo=maskable_recurrent_ppo"),
    "pole": ("env.id=CartPole-v1", "algo=ppo"), "duel": (f"env.game={__name__}:GAME",),
}  # fmt: skip


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
def shown(runs: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a run's games are shown as, where `keys` are typed."""

    def play(run: str, *arguments: str, keys: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(keys))
        done = fasttrain("play", f"run={runs(run)}", *arguments)
        assert (done.exit_code, done.err) == (0, "")
        return done.out

    return play


STOPPED = "stopped\nno game finished\n"


def test_a_game_is_shown_decision_by_decision(shown: Callable[..., str]) -> None:
    out = shown("skull", FAST, "play.seed=3")
    head, *_, summary = out.strip().splitlines()
    assert head == "skullking: maskable_ppo after 0 steps, opponents: medium, play.seed=3"
    assert [int(number) for number in re.findall(r"--- game 1, decision (\d+)", out)] == list(range(1, 66))
    assert len(re.findall(r"^agent (bids \d+|plays [a-z 0-9]+)$", out, re.M)) == 65
    ratings = re.findall(r"^  probability: (.*)$", out, re.M)
    assert all(1 < len(rated.split(", ")) <= 3 for rated in ratings)
    assert len(ratings) + out.count("its only legal choice") == 65
    assert out.count("bids: agent ") == out.count(" over (tricks/bid, points)") == 10
    assert re.search(r"^game over: (won|lost|shared) with ", out, re.M)
    assert re.search(r"^game 1: (won|lost|won \(shared\)), 65 decisions, return ", out, re.M)
    assert "opponents_beaten" in out
    assert re.fullmatch(r"1 game, mean return \S+, the agent won [01] of 1, mean score difference \S+", summary)


def test_any_env_with_text_is_watched_its_seed_decides_and_acting_may_be_drawn(shown: Callable[..., str]) -> None:
    drawn = "play.deterministic=false"
    typed = ((5, [drawn]), (5, [drawn]), (6, [drawn]), (5, []))
    games = [shown("lake", FAST, *more, f"play.seed={seed}").partition(f"={seed}\n")[2] for seed, more in typed]
    assert games[0] == games[1]
    assert games[2] != games[0] != games[3]
    assert "SFFF" in games[3]
    assert re.search(r"^agent: [0-3]\n  probability: [0-3] \d+ %, ", games[3], re.M)
    assert re.search(r"^game 1: .*, \d+ decisions, return 0$", games[3], re.M)
    assert games[3].strip().splitlines()[-1] == "1 game, mean return 0"


def test_q_values_and_other_opponents(shown: Callable[..., str]) -> None:
    out = shown("skull_dqn", FAST, "play.episodes=2", "opponent=random")
    assert re.search(r"^  Q-value: (bids|plays) .* [+-]\d\.\d{3}, ", out, re.M)
    assert "opponents: random" in out
    assert "--- game 2 of 2, decision 65" in out
    assert out.strip().splitlines()[-1].startswith("2 games, mean return ")


def test_an_agent_that_remembers_is_watched_without_ratings(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, predict = [], RecurrentPPO.predict

    def noted(model: Any, *given: Any, **more: Any) -> Any:
        begun.extend(more["episode_start"].tolist())
        return predict(model, *given, **more)

    monkeypatch.setattr(RecurrentPPO, "predict", noted)
    out = shown("lake_lstm", FAST, "play.episodes=3")
    assert begun.count(True) == 3, "each episode begins without memory"
    assert len(begun) > 3
    assert "agent: " in out
    assert "probability" not in out
    assert [*tmp_path.rglob("*")] == [tmp_path / "run0"], "nothing is left behind"


def test_with_observations_normalised_as_in_training(runs: Callable[..., Path], fasttrain: RunCommand) -> None:
    run = runs("skull", "env.normalize=[obs]")
    fasttrain("play", f"run={run}", FAST).refused("no vecnormalize.npz lies beside")
    VecNormalize(DummyVecEnv([lambda: SkullKingEnv(3)])).save(str(run / "vecnormalize.pkl"))
    fasttrain("play", f"run={run}", FAST).refused("--trust")
    fasttrain("play", f"run={run}", FAST, "--trust").ok()


def test_playing_against_it(shown: Callable[..., str]) -> None:
    """Every number is tried at every decision: illegal ones are refused until a legal one comes."""
    out = shown("skull", "play.human=true", "play.seed=1", keys=EVERY)
    assert out.count("--- game 1, decision ") == 65
    assert len(re.findall(r"^    1  bids 1$", out, re.M)) == 10
    assert "is none of the legal choices: 0-" in out
    assert "bids: you 0, agent 1 " in out
    assert "bot" not in out
    assert "probability" not in out  # the agent's hand stays its own
    assert re.search(r"you won [01] of 1", out)


@pytest.mark.parametrize("arguments", [["opponent=self", FAST], ["play.human=true"]])
def test_an_agent_that_remembers_plays_all_seats(shown: Callable[..., str], arguments: list[str]) -> None:
    out = shown("skull_lstm", "play.seed=1", *arguments, keys=EVERY)
    assert out.count("--- game 1, decision ") == 65
    assert "bot" not in out
    assert re.search(r"won [01] of 1", out)


def test_enter_at_each_decision_and_ctrl_c(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown("skull", "play.speed=0", keys="\nq\n\n\n")
    assert (out.count("Enter to go on"), out.endswith(STOPPED)) == (2, True)
    monkeypatch.setattr("fasttrain_deploy.play.time.sleep", Mock(side_effect=KeyboardInterrupt))
    assert shown("skull").endswith(STOPPED)


@pytest.mark.parametrize("keys", ["q\n", "", "x\n1.5\n-1\n\nQ\n"])
def test_leaving_is_no_error(shown: Callable[..., str], keys: str) -> None:
    out = shown("skull", "play.human=true", keys=keys)
    assert out.count("is none of the legal choices: 0-1") == max(0, keys.count("\n") - 1)
    assert out.endswith(STOPPED)


@pytest.mark.parametrize("typed", wrong_inputs("play"))
def test_bad_input_is_one_line(runs: Callable[..., Path], fasttrain: RunCommand, typed: str) -> None:
    """`run=NAME`: one of ARGUMENTS."""
    words = [f"run={runs(word[4:])}" if word[4:] in ARGUMENTS else word for word in typed.split()]
    done = fasttrain("play", *words)
    done.refused()
    assert_says("play", typed, re.sub(r"/\S+/runs\d+/", "", done.err))


def test_a_run_without_model_and_stacked_frames(
    runs: Callable[..., Path], fasttrain: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text((runs("skull") / "plan.json").read_text())
    fasttrain("play", f"run={tmp_path}").refused("no model.zip there")
    stacked = runs("skull", "env.frame_stack=2")
    fasttrain("play", f"run={stacked}", "play.human=true", "--trust").refused("play with env.frame_stack=2")


GAME = GameSpec(env=f"{__name__}:Duel", opponent_key="opponents", eval_opponent="none")


class Duel(PlainEnv):
    """Each side in turn names two numbers, four times; the larger sum wins."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    observation_space, action_space, length = gym.spaces.Box(0, 9, (1,)), gym.spaces.MultiDiscrete([3, 2]), 8

    def __init__(self, opponents: str = "none", render_mode: Any = None) -> None:
        self.opponents, self.render_mode = opponents, render_mode

    def seen(self) -> Any:
        self.named = self.named if self.time else []
        return np.full(1, self.time, np.float32)

    @property
    def opponents_turn(self) -> bool:
        return self.opponents == "self" and self.time % 2 == 1

    def action_masks(self) -> Any:
        return np.array([True, False, True, True, self.time < 4])

    def paid(self, action: Any) -> float:
        self.named.append(int(sum(action)))
        return float(self.time == 8 and sum(self.named[::2]) > sum(self.named[1::2]))

    def told(self) -> dict[str, Any]:
        return {"is_win": sum(self.named[::2]) > sum(self.named[1::2])} if self.time == 8 else {}

    def describe_choice(self, part: int, value: int) -> str:
        return f"half of {2 * value}" if part else ""

    def render(self) -> Any:
        return f"named: {self.named}"


def test_a_two_sided_env_of_ones_own(shown: Callable[..., str]) -> None:
    """Sub-actions are asked for one by one, forced ones not at all; the agent's answer is shown at once."""
    out = shown("duel", "play.human=true", keys="1\n2\n7\n1\n2\n0\n2\n2\n")
    for part in ("'1' is none of the legal choices: 0, 2", "'7' is none of the legal choices: 0-1", "legal: 0, 2\n",
                 "    1  half of 2\n"):  # fmt: skip
        assert part in out
    assert out.count("your choice 1 of 2") == 5  # one refused
    assert out.count("your choice 2 of 2") == 3  # one refused; from the third decision on there is no choice
    assert len(re.findall(r"^opponent: \[[02], [01]\]$", out, re.M)) == 4
    assert re.search(r"named: \[3, \d, 2, \d, 2, \d, 2, \d\]\ngame 1: (won|lost), 4 decisions, return [01]$", out, re.M)
