from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_skullking_game import make as bound
from test_skullking_game import reset

from fasttrain.batch import Slots
from fasttrain.errors import ConfigError
from fasttrain_games.skullking import state
from fasttrain_games.skullking.bots import LEVEL_NAMES
from fasttrain_games.skullking.game import SkullKingGame
from fasttrain_games.skullking.opponents import cumulative_mix, level_of


def make(num_envs: int, num_players: int = 4, seed: int = 0, **kwargs: Any) -> tuple[SkullKingGame, Slots]:
    game, slots = bound(num_envs, num_players, **kwargs)
    reset(game, seed)
    slots.terminations[:] = False
    return game, slots


def duel(player: str, opponents: str, num_players: int = 4, games: int = 800) -> tuple[float, float]:
    """(win rate, mean score minus the opponents' mean score) of one `player` among `opponents`, one game per env."""
    game, slots = make(games, num_players, seed=1000, opponents=opponents)
    while not slots.terminations.any():
        slots.actions[:] = game.bot_actions(player)
        game.step()
    totals = game.records["result_totals"][:, :num_players]
    wins = float((totals[:, 0] == totals.max(axis=1)).mean())
    return wins, float(totals[:, 0].mean() - totals[:, 1:].mean())


# (stronger, weaker, least win rate of one stronger among three weaker, most of one weaker among three stronger,
#  least lead in points); a fair share is 0.25 and the standard error 0.018.
LADDER = [("easy", "random", 0.65, 0.10, 120), ("medium", "easy", 0.55, 0.06, 100), ("hard", "medium", 0.40, 0.21, 45)]


@pytest.mark.parametrize(("stronger", "weaker", "least", "most", "lead"), LADDER)
def test_each_level_beats_the_one_below(stronger: str, weaker: str, least: float, most: float, lead: float) -> None:
    wins, points = duel(stronger, weaker)
    assert wins > least
    assert points > lead
    wins, points = duel(weaker, stronger)
    assert wins < most
    assert points < -20


@pytest.mark.parametrize(("num_players", "fair", "lead"), [(2, 0.5, 20), (6, 1 / 6, 50)])
def test_hard_beats_medium_with_few_and_many_players(num_players: int, fair: float, lead: float) -> None:
    wins, points = duel("hard", "medium", num_players)
    assert wins > fair + 0.05
    assert points > lead


def test_no_bot_looks_at_hidden_cards() -> None:
    """With other hands, other bids before they are shown, and another deck, every level decides the same."""
    game, slots = make(200, 4)
    rng = np.random.default_rng(0)
    differing_hands = 0
    for _ in range(40):
        records = game.records.copy()
        for level in LEVEL_NAMES:
            game.records = records.copy()
            plain = game.bot_actions(level)
            game.records = records.copy()
            swapped = game.records
            for name in ("hand_numbers", "hand_specials"):
                # Hand sizes differ between seats during a trick; what is swapped here is unseen either way.
                swapped[name][:, 1:4] = swapped[name][:, [2, 3, 1]]
            swapped["bids"][swapped["phase"] == state.BIDDING] ^= 1
            swapped["deck"] = rng.permuted(swapped["deck"], axis=1)
            assert np.array_equal(game.bot_actions(level), plain), level
            differing_hands += int((swapped["hand_numbers"] != records["hand_numbers"]).any(axis=1).sum())
        game.records = records
        slots.actions[:] = game.bot_actions("medium")
        game.step()
    assert differing_hands > 20_000


def hold(
    game: SkullKingGame,
    hand: list[int],
    trick: tuple[int, ...] = (),
    lead: int = state.LEAD_OPEN,
    need: int | None = None,
) -> None:
    """Put env 0 into the middle of round `len(hand)`: the learner holds `hand` with `trick` on the table."""
    record = game.records[0]
    bits = sum(1 << card for card in hand)
    record["hand_numbers"][0] = bits & (1 << 56) - 1
    record["hand_specials"][0] = bits >> 56
    record["round"] = len(hand)
    record["trick"] = 0
    record["phase"] = state.BIDDING if need is None else state.PLAYING
    record["played"] = len(trick)
    record["codes"][: len(trick)] = trick
    record["lead"] = lead
    record["leader"] = (4 - len(trick)) % 4
    seen = sum(1 << (66 if code == 74 else code) for code in trick)
    record["seen_numbers"] = seen & (1 << 56) - 1
    record["seen_specials"] = seen >> 56
    record["bids"][:4] = [max(need or 0, 0), 0, 0, 0]
    record["tricks"][:4] = [max(-(need or 0), 0), 0, 0, 0]


@pytest.mark.parametrize(
    ("level", "hand", "low", "high"),
    [
        ("hard", [56, 57, 58], 0, 0), ("hard", [0, 14, 28, 56, 57], 0, 0), ("hard", [55, 61, 67], 2, 3),
        ("hard", [54, 55, 61, 62, 63, 67, 0, 14], 5, 7), ("medium", [56, 57, 58], 0, 0),
        ("medium", [55, 61, 67], 2, 3), ("easy", [56, 57, 58, 0], 0, 1), ("easy", [61, 62, 67, 68], 3, 4),
    ],
)  # fmt: skip
def test_bids_follow_the_hand(level: str, hand: list[int], low: int, high: int) -> None:
    game, _ = make(1)
    hold(game, hand)
    for _ in range(20):
        assert low <= game.bot_actions(level)[0] <= high


@pytest.mark.parametrize(
    ("level", "hand", "trick", "lead", "need", "code"),
    [
        # last to play: win as cheaply as possible, or throw the most dangerous loser
        ("medium", [5, 8, 13], (4, 6, 2), 0, 1, 8),
        ("medium", [1, 5, 8], (4, 6, 2), 0, 0, 5),
        ("medium", [8, 13, 9], (4, 6, 2), 0, 0, 13),  # it wins anyway: the highest goes
        ("medium", [66, 20], (4, 6, 2), 0, 1, 74),
        ("medium", [66, 5], (4, 6, 2), 0, 0, 5),
        ("medium", [61, 67, 3], (68, 62, 5), 4, 1, 3),  # a mermaid lies there: the king would lose, nothing wins
        ("medium", [13, 51], (5, 71, 9), 0, 1, 13),  # under the whale only the highest rank counts
        ("hard", [5, 8, 1], (4, 6, 2), 0, 0, 5),
        ("hard", [67, 1], (13, 5, 6), 0, 1, 67),
        ("hard", [67, 56], (13, 5, 6), 0, 0, 56),
        # the king is already there: nothing but a mermaid takes it
        ("hard", [61, 68], (67, 5, 6), 4, 2, 68),
        ("easy", [1, 12], (13,), 0, 1, 12),
        ("easy", [1, 12], (13,), 0, 0, 1),
        ("easy", [1, 66], (13,), 0, 1, 74),
    ],
)
def test_plays_serve_the_bid(
    level: str, hand: list[int], trick: tuple[int, ...], lead: int, need: int, code: int
) -> None:
    game, _ = make(1)
    hold(game, hand, trick, lead, need)
    assert game.bot_actions(level)[0] - 11 == code


def test_random_is_uniform_over_the_legal_actions() -> None:
    game, _ = make(1)
    hold(game, [3, 20, 60, 66, 72], (5,), 0, 1)  # must follow yellow: 3, or a special; the Tigress counts twice
    counts = np.bincount([game.bot_actions("random")[0] for _ in range(5000)], minlength=86)
    assert np.flatnonzero(counts).tolist() == [14, 71, 77, 83, 85]
    assert np.abs(counts[counts > 0] - 1000).max() < 130  # 4.6 standard deviations
    hold(game, [3, 20, 60])
    counts = np.bincount([game.bot_actions("random")[0] for _ in range(4000)])
    assert np.abs(counts - 1000).max() < 130
    assert len(counts) == 4


def levels_at_table(game: SkullKingGame) -> np.ndarray:
    return game.records["levels"][:, 1 : game.num_players]


def play_steps(game: SkullKingGame, slots: Slots, steps: int) -> None:
    for _ in range(steps):
        slots.actions[:] = slots.action_masks.argmax(axis=1)
        game.step()


def test_mixes_are_seated_as_written() -> None:
    game, slots = make(4, opponents=["hard", "random", "easy"])
    play_steps(game, slots, 1)
    assert levels_at_table(game).tolist() == [[3, 0, 1]] * 4
    game, slots = make(4000, opponents={"easy": 3, "hard": 1})
    play_steps(game, slots, 1)
    levels = levels_at_table(game)
    assert set(np.unique(levels)) == {1, 3}
    assert (levels == 1).mean(axis=0) == pytest.approx([0.75] * 3, abs=0.03)
    first = levels.copy()
    play_steps(game, slots, 65)
    assert 0.3 < (levels_at_table(game) != first).mean() < 0.45  # drawn anew: 2 * 3/4 * 1/4 differ


def test_opponents_change_from_the_next_game_on() -> None:
    game, slots = make(3, opponents="easy")
    play_steps(game, slots, 10)
    game.set_opponents("hard", indices=[0, 2])
    play_steps(game, slots, 55)
    assert levels_at_table(game).tolist() == [[1] * 3] * 3  # to the end of the running game
    assert slots.terminations.all()
    play_steps(game, slots, 1)
    assert levels_at_table(game)[:, 0].tolist() == [3, 1, 3]
    game.set_opponents({"random": 1.0})
    play_steps(game, slots, 65)
    assert levels_at_table(game).tolist() == [[0] * 3] * 3
    game.reset(np.arange(3), [None] * 3)
    game.set_opponents(["easy", "medium", "hard"])  # nobody has decided anything yet: this is a next game
    play_steps(game, slots, 1)
    assert levels_at_table(game).tolist() == [[1, 2, 3]] * 3


def test_names() -> None:
    assert [level_of(name) for name in ("random", "easy", "medium", "hard")] == [0, 1, 2, 3]
    assert [level_of(f"rule_based{suffix}") for suffix in ("", "_easy", "_medium", "_hard")] == [2, 1, 2, 3]
    for bad in ("rule_based_random", "", "Hard", "_easy"):
        with pytest.raises(ConfigError, match="unknown opponent"):
            level_of(bad)


def test_cumulative_mix_leaves_no_gap() -> None:
    mix = cumulative_mix({"random": 0.1, "easy": 0.2, "medium": 0.7}, 3)
    assert mix.tolist() == [pytest.approx([0.1, 0.3, 1.0, 1.0, 1.0])] * 2
    assert (mix[:, 2:] == 1.0).all()
    assert cumulative_mix("easy", 2).tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0]]
