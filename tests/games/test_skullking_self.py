"""Skull King played from both sides: seats of "self" decide outside, by the same rules and with the same view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_skullking_game import REWARDS, decisions_of, draw_actions, make, reset, side_by_side, write_present

from fasttrain.batch import Slots
from fasttrain.errors import ConfigError, EnvError
from fasttrain_games.skullking.bots import LEVEL_NAMES, SELF
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.game import SkullKingGame
from fasttrain_kernels.threads import ThreadChoice


@pytest.mark.parametrize(("num_players", "num_envs"), [(2, 20), (4, 12), (8, 4)])
def test_all_seats_decided_outside_agree_with_the_reference(num_players: int, num_envs: int) -> None:
    game, slots = make(num_envs, num_players, opponents="self", **REWARDS)
    reset(game, 50)
    reasons = side_by_side(game, slots, num_players * decisions_of(num_players), follow=False)
    assert sum(reasons.values()) == num_envs


PER_SEAT = ("hand_numbers", "hand_specials", "bids", "tricks", "totals", "bonus")
SEATS = ("dealer", "leader", "ally_player", "ally_winner")


def rotated(records: Any, num_players: int) -> Any:
    """The same games with the seat to decide at seat 0."""
    turned = records.copy()
    for record in turned:
        seat = int(record["seat"])
        for name in PER_SEAT:
            record[name][:num_players] = np.roll(record[name][:num_players], -seat)
        for name in SEATS:
            record[name] = (record[name] - seat) % num_players
        record["seat"] = 0
    return turned


@pytest.mark.parametrize("num_players", [2, 5])
def test_an_opponent_sees_what_the_learner_would_see_in_its_place(num_players: int) -> None:
    game, slots = make(8, num_players, opponents="self")
    reset(game, 7)
    shadow, shown = make(8, num_players)
    rng = np.random.default_rng(2)
    others = 0
    for _ in range(65 * num_players):
        shadow.records = rotated(game.records, num_players)
        write_present(shadow)
        assert np.array_equal(slots.observations, shown.observations)
        assert np.array_equal(slots.action_masks, np.array(shown.action_masks))
        others += int(game.opponents_turn.sum())
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
    assert others > 8 * 60 * (num_players - 1)


def answer(game: SkullKingGame, slots: Slots, level: str) -> tuple[np.ndarray, np.ndarray]:
    """Let a bot decide for the seats of "self" until every learner must decide; rewards and ends since its decision."""
    rewards, ended = slots.rewards.copy(), slots.terminations.copy()
    while game.opponents_turn.any():
        listed = np.flatnonzero(game.opponents_turn)
        slots.actions[listed] = game.bot_actions(level, listed)
        game.step_listed(listed)
        rewards[listed] += slots.rewards[listed]
        ended[listed] |= slots.terminations[listed]
    return rewards, ended


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("seats", ["all", "two of three"])
def test_a_bot_fed_through_self_plays_the_same_game(level: str, seats: str) -> None:
    """The games of 4 over two episodes, bit for bit: same cards, same bots, same order on the random stream."""
    bots: Any = level if seats == "all" else [level, "medium", level]
    fed: Any = "self" if seats == "all" else ["self", "medium", "self"]
    plain, expected = make(12, 4, opponents=bots, shaping_trick_won=0.25)
    game, slots = make(12, 4, opponents=fed, shaping_trick_won=0.25)
    for one in (plain, game):
        reset(one, 9)
    rng = np.random.default_rng(5)
    finished = 0
    for _ in range(140):
        assert np.array_equal(slots.observations, expected.observations)
        assert np.array_equal(slots.action_masks, np.array(expected.action_masks))
        slots.actions[:] = expected.actions[:] = draw_actions(slots.action_masks, rng)
        plain.step()
        game.step()
        rewards, ended = answer(game, slots, level)
        assert rewards == pytest.approx(expected.rewards, abs=1e-6)
        assert np.array_equal(ended, expected.terminations)
        for i in np.flatnonzero(ended):
            assert np.array_equal(game.final_observations[i], plain.final_observations[i])
            assert game.episode_info(i) == plain.episode_info(i)
            finished += 1
    assert finished == 24


def test_step_listed_touches_the_listed_games_alone() -> None:
    game, slots = make(9, 4, opponents="self")
    reset(game, 1)
    rng = np.random.default_rng(3)
    arrays = ("rewards", "terminations", "truncations", "observations", "action_masks")
    for _ in range(200):
        listed = np.flatnonzero(rng.random(9) < 0.4)
        rest = np.setdiff1d(np.arange(9), listed)
        slots.actions[:] = 999  # of the others: not even looked at
        slots.actions[listed] = draw_actions(slots.action_masks[listed], rng)
        before = {name: np.array(getattr(slots, name)) for name in arrays}
        records, finals, turns = game.records.copy(), game.final_observations.copy(), game.opponents_turn.copy()
        slots.rewards[rest] = before["rewards"][rest] = 7.5
        game.step_listed(listed)
        for name in arrays:
            assert np.array_equal(np.array(getattr(slots, name))[rest], before[name][rest]), name
        assert np.array_equal(game.records[rest], records[rest])
        assert np.array_equal(game.final_observations[rest], finals[rest])
        assert np.array_equal(game.opponents_turn[rest], turns[rest])
        assert (game.records[listed] != records[listed]).all()


@pytest.mark.parametrize("listed", [[0, 0], [-1], [3], [1, 2, 1]])
def test_a_wrong_list_is_refused_and_nothing_is_applied(listed: list[int]) -> None:
    game, slots = make(3, opponents="self")
    reset(game)
    before = game.records.copy()
    with pytest.raises(EnvError, match=r"step_listed takes games 0 to 2, each once, not \["):
        game.step_listed(np.array(listed))
    assert np.array_equal(game.records, before)
    slots.actions[:] = 0
    game.step_listed(np.array([2, 0]))  # and the marks are gone
    game.step_listed(np.array([], np.int64))
    assert game.opponents_turn.tolist() == [True, False, True]


def test_an_illegal_action_names_env_seat_and_action() -> None:
    game, slots = make(3, opponents="self")
    reset(game)
    slots.actions[:] = [0, 1, 0]
    game.step()
    slots.actions[:] = [1, 50, 0]
    with pytest.raises(EnvError, match=r"env 1, seat 1: action 50 is illegal now, legal actions are \[0, 1\]"):
        game.step_listed(np.array([0, 1]))
    assert [game.peek(i).seat for i in range(3)] == [1, 1, 1]
    with pytest.raises(ConfigError, match="unknown opponent 'self'"):
        game.bot_actions("self")
    with pytest.raises(EnvError, match=r"bind\(slots\) must come before"):
        SkullKingGame(3).bot_actions("easy")


def test_weights_and_changes_seat_self_from_the_next_game_on() -> None:
    game, slots = make(40, 4, opponents={"self": 1, "medium": 1})
    reset(game)
    rng = np.random.default_rng(8)
    for step in range(400):
        if step == 10:
            seated = np.array([game.peek(i).levels[1:] for i in range(40)])
            assert 35 < (seated == SELF).sum() < 85
            game.set_opponents("medium")
        for view in (game.peek(i) for i in np.flatnonzero(game.opponents_turn)):
            assert view.levels[view.seat] == SELF
        slots.actions[:] = draw_actions(slots.action_masks, rng)
        game.step()
    assert not game.opponents_turn.any()  # every game of the mix is over
    game.set_opponents(["easy", "self", "easy"], [3])
    game.reset(np.arange(40), [None] * 40)
    slots.actions[:] = 0
    game.step()
    assert np.flatnonzero(game.opponents_turn).tolist() == [3]
    assert game.peek(3).seat == 2


def test_threads_change_no_game(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 games with bots and seats of "self", in two parts, against one game after the other."""
    monkeypatch.setattr(ThreadChoice, "next", lambda _: True)
    mix = {"random": 1, "easy": 1, "medium": 1, "hard": 1, "self": 1}
    (alone, expected), (parted, slots) = make(300, opponents=mix), make(300, opponents=mix)
    parted.max_threads = 2
    for one in (alone, parted):
        reset(one)
    rng = np.random.default_rng(0)
    for step in range(80):
        listed = np.flatnonzero(rng.random(300) < 0.7)
        slots.actions[:] = expected.actions[:] = draw_actions(expected.action_masks, rng)
        for one in (alone, parted):
            one.step() if step % 2 else one.step_listed(listed)
        for name in ("observations", "action_masks", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(slots, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(parted.opponents_turn, alone.opponents_turn)
        np.testing.assert_array_equal(parted.final_observations, alone.final_observations)
    assert parted.opponents_ns > 0


def play_out(env: SkullKingEnv, seed: int) -> list[str]:
    """What `describe_step` tells at the learner's decisions of a game by random actions."""
    env.reset(seed=seed)
    rng, told, over = np.random.default_rng(seed), [env.describe_step()], False
    while not over:
        *_, over, _, _ = env.step(int(draw_actions(env.action_masks()[None], rng)[0]))
        if over or not env.opponents_turn:
            told.append(env.describe_step())
    return told


@pytest.mark.parametrize("opponents", ["random", "self"])
def test_steps_are_told_card_by_card(opponents: str) -> None:
    env = SkullKingEnv(3, opponents, render_mode="ansi")
    env.player_names = ("you", "agent")
    first, *told = play_out(env, 2)
    assert first == ""
    text = "\n".join(told)
    assert text.count("bids: you ") == 10
    assert text.count(" -> ") == 55  # tricks
    assert text.count(" over (tricks/bid, points): you ") == 10
    points = [line.split(", points): ")[1].split(", ")[0] for line in text.splitlines() if " over (" in line]
    assert sum(int(part.split()[-1]) for part in points) == env.peek().final_totals[0]
    assert "agent 2" in env.render()
    assert SkullKingEnv().describe_step() == ""


def test_actions_have_words() -> None:
    env = SkullKingEnv()
    words = [env.describe_action(action) for action in (3, 11, 11 + 55, 11 + 66, 85)]
    assert words == ["bids 3", "plays yellow 1", "plays black 14", "plays tigress as escape", "plays tigress as pirate"]
