"""The Gymnasium environment: both checkers, the same trajectories as the batch, illegal actions, rendering."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain_games.envs
from fasttrain.batch import Slots
from fasttrain.errors import ConfigError, EnvError
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.game import SkullKingGame
from fasttrain_games.skullking.render import card_name

MIXED = {"random": 1.0, "easy": 1.0, "medium": 1.0, "hard": 1.0}


def draw_action(mask: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(mask)))


def test_registered_once_and_made_by_id() -> None:
    before = dict(gymnasium.registry)
    importlib.reload(fasttrain_games.envs)
    assert dict(gymnasium.registry) == before
    env = gymnasium.make("fasttrain/SkullKing-v0", num_players=3, opponents=["easy", "hard"])
    assert isinstance(env.unwrapped, SkullKingEnv)
    observation, info = env.reset(seed=1)
    assert observation.shape == (228,)
    assert info == {}


@pytest.mark.parametrize("num_players", [2, 4, 8])
def test_passes_both_checkers_without_a_warning(num_players: int) -> None:
    env = gymnasium.make("fasttrain/SkullKing-v0", num_players=num_players, render_mode="ansi").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(env)
        sb3_check_env(env, warn=True, skip_render_check=False)


def test_importing_and_stepping_needs_no_torch() -> None:
    code = (
        "import sys, gymnasium, fasttrain_games.envs\n"
        "env = gymnasium.make('fasttrain/SkullKing-v0')\n"
        "env.reset(seed=0)\n"
        "env.step(0)\n"
        "assert 'torch' not in sys.modules and 'stable_baselines3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(("num_players", "card_memory"), [(2, True), (4, True), (7, True), (4, False)])
def test_dummy_vec_env_and_native_batch_agree_bit_for_bit(num_players: int, card_memory: bool) -> None:
    num_envs, options = 5, {"shaping_trick_won": 0.1, "card_memory": card_memory}
    envs = DummyVecEnv([lambda: SkullKingEnv(num_players, MIXED, **options) for _ in range(num_envs)])
    envs.seed(40)
    observations = envs.reset()
    game = SkullKingGame(num_envs, num_players, MIXED, **options)
    masks = np.zeros((num_envs, 86), np.bool_)
    slots = Slots(
        observations=np.zeros_like(observations),
        actions=np.zeros(num_envs, np.int64),
        rewards=np.zeros(num_envs, np.float32),
        terminations=np.zeros(num_envs, np.bool_),
        truncations=np.zeros(num_envs, np.bool_),
        action_masks=masks,
    )
    game.bind(slots)
    game.reset(np.arange(num_envs), [40 + i for i in range(num_envs)])
    rng = np.random.default_rng(2)
    finished = 0
    for step in range(200):
        assert np.array_equal(np.stack(envs.env_method("action_masks")), masks)
        assert np.array_equal(observations, slots.observations)
        actions = np.array([draw_action(mask, rng) for mask in masks])
        if step == 100:  # in the middle of a game
            envs.env_method("set_opponents", "hard")
            game.set_opponents("hard")
        observations, rewards, dones, infos = envs.step(actions)
        slots.actions[:] = actions
        game.step()
        assert np.array_equal(rewards, slots.rewards)
        assert np.array_equal(dones, slots.terminations)
        for i in np.flatnonzero(dones):
            finished += 1
            assert np.array_equal(infos[i]["terminal_observation"], game.final_observations[i])
            assert not infos[i]["TimeLimit.truncated"]
            assert {key: infos[i][key] for key in game.episode_info(i)} == game.episode_info(i)
    assert finished >= 3 * num_envs - num_envs


def test_seeds_and_resets() -> None:
    env, other = SkullKingEnv(), SkullKingEnv()
    first, _ = env.reset(seed=3)
    again, _ = other.reset(seed=3)
    assert np.array_equal(first, again)
    for one in (env, other):
        one.step(0)
    following = env.reset()[0]
    assert np.array_equal(following, other.reset()[0])  # a reset within a game deals a new one from the stream
    hands = [tuple(env.reset()[0][:74]) for _ in range(30)]
    assert len(set(hands)) > 15


def test_reset_after_the_end_hands_out_the_game_already_dealt() -> None:
    env = SkullKingEnv()
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    done = False
    turns = 0
    while not done:
        _, _, done, truncated, info = env.step(draw_action(env.action_masks(), rng))
        turns += 1
        assert not truncated
        assert bool(info) is done
    assert turns == info["turn"] == 65
    assert set(info) == {
        "winner",
        "is_win",
        "score",
        "score_diff",
        "bids_made",
        "end_reason",
        "turn",
        "opponents_beaten",
    }
    assert all(type(value) in (int, float, bool, str) for value in info.values())
    dealt = env.peek().hands
    env.reset()
    assert env.peek().hands == dealt
    env.reset()
    assert env.peek().hands != dealt


def test_observations_are_the_callers_own() -> None:
    env = SkullKingEnv()
    first, _ = env.reset(seed=0)
    copy = first.copy()
    mask = env.action_masks()
    env.step(1)
    assert np.array_equal(first, copy)
    assert mask.sum() == 2
    assert first.dtype == np.float32
    assert mask.dtype == np.bool_


def test_illegal_actions_are_replaced_by_the_lowest_legal_one_and_counted() -> None:
    env, plain = SkullKingEnv(), SkullKingEnv()
    env.reset(seed=5)
    plain.reset(seed=5)
    a = env.step(50)
    b = plain.step(0)
    assert np.array_equal(a[0], b[0])
    assert a[4] == {"illegal_actions": 1}
    assert b[4] == {}
    a = env.step(-7)
    b = plain.step(int(plain.action_masks().argmax()))
    assert np.array_equal(a[0], b[0])
    assert a[4] == {"illegal_actions": 2}
    assert env.step(int(env.action_masks().argmax()))[4] == {"illegal_actions": 2}
    env.reset(seed=5)
    assert env.step(0)[4] == {}


def test_illegal_actions_raise_on_request_and_before_the_first_reset() -> None:
    env = SkullKingEnv(on_illegal="raise")
    with pytest.raises(EnvError, match=r"reset\(\) it first"):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"action 50 is illegal now, legal actions are \[0, 1\]"):
        env.step(50)
    env.step(1)
    with pytest.raises(EnvError, match=r"reset\(\) it first"):
        SkullKingEnv().step(0)


def test_the_card_played_leaves_the_hand_and_the_bid_is_kept() -> None:
    env = SkullKingEnv()
    for seed in range(20):
        env.reset(seed=seed)
        env.step(1)
        assert env.peek().bids[0] == 1
        action = int(np.flatnonzero(env.action_masks())[-1])
        env.step(action)
        assert action - 11 in env.peek().plays


def test_render_shows_the_table() -> None:
    env = SkullKingEnv(render_mode="ansi")
    env.reset(seed=2)
    table = env.render()
    assert table is not None
    assert "round 1/10  bidding" in table
    assert table.count("?") == 4
    env.step(1)
    view = env.peek()
    table = env.render()
    assert table is not None
    lines = table.splitlines()
    assert len(lines) == 7
    assert "?" not in table
    assert lines[-1].startswith("hand: ")
    for seat, line in enumerate(lines[2:6]):
        assert line.startswith("you" if seat == 0 else f"bot {seat}")
        assert ("*" in line) is (seat == view.leader)
        assert line.split()[1 + (seat > 0)] == str(view.bids[seat])
    for code in view.trick:
        assert card_name(code) in table
    done = False
    while not done:
        _, _, done, _, info = env.step(int(env.action_masks().argmax()))
    table = env.render()
    assert table is not None
    assert table.startswith(f"game over: {info['end_reason']} with {info['score']} points ({info['score_diff']:+d})")
    assert SkullKingEnv().render() is None
    assert [card_name(code) for code in (0, 55, 56, 61)] == ["yellow 1", "black 14", "escape", "pirate"]
    assert [card_name(code) for code in (66, 74)] == ["tigress as escape", "tigress as pirate"]
    assert [card_name(code) for code in (67, 71)] == ["skull king", "white whale"]


def test_a_copy_by_pickle_plays_on_alike() -> None:
    env = SkullKingEnv()
    env.reset(seed=1)
    env.step(1)
    copy: Any = pickle.loads(pickle.dumps(env))
    for _ in range(80):
        action = int(env.action_masks().argmax())
        a, b = env.step(action), copy.step(action)
        assert np.array_equal(a[0], b[0])
        assert a[1:] == b[1:]
        if a[2]:
            env.reset()
            copy.reset()
    assert copy.opponents_ns > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"on_illegal": "ignore"}, "on_illegal='ignore': choose 'replace' or 'raise'"),
        ({"num_players": 1}, "num_players=1"),
        ({"opponents": "hart"}, "did you mean 'hard'"),
    ],
)
def test_bad_settings_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkullKingEnv(**kwargs)


def test_an_unknown_render_mode_is_a_type_error_as_make_vec_env_expects() -> None:
    with pytest.raises(TypeError, match="render_mode='human': choose None or 'ansi'"):
        SkullKingEnv(render_mode="human")


def test_an_unknown_reward_key_is_refused() -> None:
    with pytest.raises(TypeError, match="shaping_nonsense"):
        SkullKingEnv(shaping_nonsense=1.0)
