from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml

import nimble
from conftest import RunCommand, configured
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain_integrations.pettingzoo import Rows, Seat
from messages import assert_says, wrong_inputs


def legal(env: Seat) -> int:
    return int(np.flatnonzero(env.action_masks())[0])


@pytest.mark.parametrize("told", ["observation", "info"])
def test_the_learner_decides_for_its_seat_and_sees_its_own_view(told: str):
    env = Seat("nimble", told=told)
    assert env.observation_space.dtype == np.float32
    seen, _ = env.reset(seed=3)
    for _ in range(30):
        assert env.aec.agent_selection == env.seat
        assert seen.tolist() == [env.aec.left, env.seats.index(env.seat)]
        assert env.action_masks().tolist() == [env.aec.left > taken for taken in range(3)]
        assert not env.opponents_turn
        seen, _, over, cut, _ = env.step(legal(env))
        if over or cut:
            seen, _ = env.reset()


def test_rewards_are_the_learners_own_of_all_that_happened_since_its_last_decision():
    env = Seat("nimble", seat="green", stones=9)
    for seed in range(40):
        env.reset(seed=seed)
        total, over, info = 0.0, False, {}
        while not over:
            _, reward, over, _, info = env.step(legal(env))
            total += reward
        moves = [(seat, move) for seat, move in env.aec.log[::-1]]
        moves = moves[: next(index for index, (seat, _) in enumerate(moves) if seat == "reset")]
        taken = [move + 1 for seat, move in moves if seat == "green" and move is not None]
        last = next(seat for seat, move in moves if move is not None)
        assert total == pytest.approx(0.125 * sum(taken) + (last == "green" and info["is_win"]))
        assert info["seat"] == "green"
        assert info["end_reason"] in ("green won", "green lost", "green drew")
        assert info["is_win"] == (info["score_diff"] > 0)


def test_every_game_of_an_episode_has_the_options_of_its_reset():
    env, seen = Seat("nimble", seat="green", stones=1), []
    deal = env.aec.reset

    def reset(seed: int, options: Any) -> None:  # the first seat takes the only stone, in games of one stone
        seen.append(options)
        env.aec.stones = 1 if len(seen) < 3 else 9
        deal(seed=seed)

    with patch.object(env.aec, "reset", reset):
        env.reset(seed=0, options={"stones": 9})
    assert seen == [{"stones": 9}] * len(seen)
    assert len(seen) > 1, "in the first game the other seat took the only stone"


def test_a_learner_that_is_out_of_the_game_ends_its_episode_and_others_leave_in_order():
    env = Seat("nimble", seat="red", stones=20)
    env.reset(seed=0)
    rewards, over = [], False
    while not over:
        _, reward, over, cut, info = env.step(2 if env.action_masks()[2] else legal(env))
        rewards.append(reward)
        assert not cut
    assert rewards[-1] == -1.0
    assert info["end_reason"] == "red lost"
    green = Seat("nimble", seat="green", stones=20)
    dead = 0
    for seed in range(30):
        green.reset(seed=seed)
        over = False
        while not over:
            _, _, over, _, _ = green.step(0)
        dead += any(move is None for _, move in green.aec.log)
        green.aec.log.clear()
    assert dead > 0  # seats that took too much left the game, and it went on


def test_every_seat_in_turn_and_the_same_seed_the_same_games():
    def played(seed: int) -> list[Any]:
        env, found = Seat("nimble"), []
        env.reset(seed=seed)
        for _ in range(6):
            found.append((env.seat, env.aec.left))
            over = False
            while not over:
                _, reward, over, _, _ = env.step(legal(env))
                found.append(reward)
            env.reset()
        return found

    assert played(1) == played(1)
    seats = [entry[0] for entry in played(1) if isinstance(entry, tuple)]
    assert seats[:3] == seats[3:]
    assert {*seats} == {"red", "green", "blue"}
    assert {entry[0] for seed in range(20) for entry in played(seed)[:1]} == {"red", "green", "blue"}


def test_two_sided_every_seat_is_decided_for_from_outside():
    env = Seat("nimble", opponents="self", seat="blue")
    assert env.opponents_turn is False  # before the first game
    env.reset(seed=0)
    assert env.opponents_turn
    seen, reward, *_ = env.step(0)
    assert (seen.tolist(), reward, env.opponents_turn) == ([11.0, 1.0], 0.0, True)
    env.step(0)
    assert not env.opponents_turn
    assert env.step(1)[1] == 0.25
    env.aec.left = 1
    env.aec._tell()
    with pytest.raises(EnvError, match="the opponent in seat red chose the illegal 2"):
        env.step(2)


def test_a_game_in_which_the_learner_never_decides_is_an_error():
    with pytest.raises(EnvError, match="1,000 games in a row ended before blue decided anything"):
        Seat("nimble", seat="blue", stones=1).reset(seed=0)


def test_a_game_that_is_over_before_the_learner_decided_is_dealt_anew():
    env = Seat("nimble", opponents="self", seat="blue", stones=2)
    env.reset(seed=0)
    env.step(0)
    _, reward, over, cut, _ = env.step(0)  # green takes the last stone, blue has had no turn
    assert (reward, over, cut) == (0.0, False, False)
    assert env.opponents_turn
    assert env.aec.left == 2


@pytest.mark.parametrize("arguments", wrong_inputs("games of PettingZoo"))
def test_what_cannot_be_played_is_told(arguments: str):
    with pytest.raises(EnvSpecError) as told:
        Seat(**yaml.safe_load(arguments))
    said = str(told.value).replace(f"in {Path.cwd()} ", "in HERE ")
    assert_says("games of PettingZoo", arguments, re.sub(r" \(\S+nimble.py:.*", "", said))


@pytest.fixture
def _without_pettingzoo() -> Iterator[None]:
    with patch.dict(sys.modules):  # as it was, afterwards
        for name in [name for name in sys.modules if name.partition(".")[0] == "pettingzoo"]:
            del sys.modules[name]
        yield


class NotThere:
    """Finds no pettingzoo, whatever is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pettingzoo":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("sharing", ["false", "true"])
def test_the_command_speaks_of_the_id_as_it_was_typed(sharing: str, fasttrain: RunCommand):
    typed = ("env.backend=pettingzoo", f"env.kwargs.sharing={sharing}")
    fasttrain(*typed, "env.id=nothing.here").refused("error: env.id=nothing.here: no module named 'nothing'")
    wrong = fasttrain(*typed, "env.id=nimble", "env.kwargs.colour=1")
    wrong.refused("env.id=nimble")
    assert "entry_point" not in wrong.err


def test_a_class_in_place_of_a_module_is_answered_with_its_module():
    with pytest.raises(ConfigError, match=r"a module with a function env\(\): env\.id=mine\.game$"):
        configured("env.backend=pettingzoo", "env.entry_point=mine.game:Game", "algo=ppo")


@pytest.mark.usefixtures("_without_pettingzoo")
@pytest.mark.parametrize("made", [Seat, partial(Rows, 2)])
def test_packages_that_are_missing_are_named(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    game = "pettingzoo.classic.poker_v1"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "meta_path", [NotThere(), *sys.meta_path])
        with pytest.raises(EnvSpecError) as refusal:
            made(game)
    told = f"env.id={game} needs pettingzoo, which is not installed: pip install 'fasttrain[pettingzoo]'"
    assert str(refusal.value) == told
    folder = tmp_path / "pettingzoo" / "classic"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ""), ("poker_v1", "import cards_of_poker"), ("broken_v1", "1 / 0")):
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "pettingzoo" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvSpecError) as refusal:
        made(game)
    told = f"env.id={game} needs cards_of_poker, which is not installed: pip install 'pettingzoo[classic]'"
    assert str(refusal.value) == told
    with pytest.raises(EnvSpecError, match="no module named 'pettingzoo.classic.poker_v9'"):
        made("pettingzoo.classic.poker_v9")
    with pytest.raises(EnvSpecError, match="broken_v1' failed: ZeroDivisionError"):
        made("pettingzoo.classic.broken_v1")


def test_seats_that_differ_are_told(monkeypatch: pytest.MonkeyPatch):
    from gymnasium import spaces

    monkeypatch.setattr(nimble.Nimble, "action_space", lambda self, seat: spaces.Discrete(3 + (seat == "blue")))
    with pytest.raises(EnvSpecError, match="the seats differ in their action_space; one policy plays all seats"):
        Seat("nimble")


def test_the_backend_is_the_env_with_opponents_that_can_be_chosen():
    config = configured("env.backend=pettingzoo", "env.id=nimble", "env.kwargs.stones=7", "opponent=self")
    assert (config.env.entry_point, config.env.id) == ("fasttrain_integrations.pettingzoo:Seat", None)
    assert config.env.kwargs == {"game": "nimble", "stones": 7, "opponents": "self"}
    assert config.env.spec.eval_opponent == "random"


def test_it_is_learned_from_the_command_line(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=balance", "env.backend=pettingzoo", "env.id=nimble", "opponent=self", "total_timesteps=128",
        "eval.episodes=4", "num_envs=2", "workers=0", "algo.n_epochs=1", "algo.rollout_size=64", "batch_size=64",
        "fused_update=off", "checkup=off",
    ).ok()  # fmt: skip
    quality = done.json("summary.json")["quality"]
    assert quality["win_rate"] is not None
    assert all(reason.split()[1] in ("won", "lost", "drew") for reason in quality["end_reason"])
    fasttrain("eval", f"run={done.folder}", "eval.episodes=4").ok()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("game", ["connect_four_v3", "tictactoe_v3", "texas_holdem_v4", "hanabi_v5"])
def test_pettingzoos_own_games(game: str):
    pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    try:
        importlib.import_module(f"pettingzoo.classic.{game}")
    except ImportError as error:
        pytest.skip(f"pettingzoo.classic.{game}: {error}")
    env, rng, seats = Seat(f"pettingzoo.classic.{game}"), np.random.default_rng(0), set()
    for seed in range(6):
        seen, _ = env.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            assert env.observation_space.contains(seen)
            seen, reward, over, cut, info = env.step(int(rng.choice(np.flatnonzero(env.action_masks()))))
            over, total = over or cut, total + reward
        seats.add(info["seat"])
        assert info["is_draw"] or info["is_win"] == (total > 0)
    assert seats == {*env.seats}
