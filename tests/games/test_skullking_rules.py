"""Every line of the rules page as a hand-written case, and the kernels against the plain reference on random tricks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from fasttrain_games.skullking import rules, tables
from reference import skull_king as reference


def codes_of(cards: Sequence[int], tigress_as_pirate: bool) -> np.ndarray:
    return np.array([rules.TIGRESS_PIRATE if tigress_as_pirate and card == TIG else card for card in cards], np.int32)


def trick_winner(cards: Sequence[int], tigress_as_pirate: bool) -> tuple[int | None, int]:
    """(index of the winner or None if the trick is destroyed, index of the next leader)."""
    winner, leader = rules.trick_result(codes_of(cards, tigress_as_pirate), len(cards))
    return (None if winner < 0 else int(winner)), int(leader)


def trick_bonus(cards: Sequence[int], tigress_as_pirate: bool) -> int:
    """Points for the trick's winner, due only if the winner makes its bid; Loot apart."""
    codes = codes_of(cards, tigress_as_pirate)
    return int(rules.bonus_of_trick(codes, len(codes), rules.trick_result(codes, len(codes))[0]))


def legal_cards(hand: Sequence[int], trick: Sequence[int], tigress_as_pirate: bool) -> list[int]:
    """The ids of `hand` that may be played onto `trick` (ids in the order played, may be empty), ascending."""
    lead = rules.LEAD_OPEN
    for position, code in enumerate(codes_of(trick, tigress_as_pirate)):
        lead = rules.lead_after(lead, int(code), position)
    allowed = rules.legal_numbers(sum(1 << card for card in hand if card < rules.NUM_NUMBERED), lead)
    return sorted(card for card in hand if card >= rules.NUM_NUMBERED or allowed >> card & 1)


def y(rank: int) -> int:
    return rank - 1


def g(rank: int) -> int:
    return 13 + rank


def p(rank: int) -> int:
    return 27 + rank


def b(rank: int) -> int:
    return 41 + rank


ESC, ESC2, ESC3 = 56, 57, 58
PIR, PIR2 = 61, 62
TIG = 66
KING = 67
MER, MER2 = 68, 69
KRA, WHA = 70, 71
LOOT, LOOT2 = 72, 73


# (cards, Tigress as Pirate, winner, next leader, bonus)
TRICKS = {
    # 5 numbers
    "highest of the lead suit": ([y(5), y(9), g(14), y(2)], False, 1, 1, 10),
    "off-suit never wins": ([y(1), g(14), p(14)], False, 0, 0, 20),
    "black trumps": ([y(14), b(1), y(13)], False, 1, 1, 10),
    "highest black": ([y(14), b(3), b(2), b(9)], False, 3, 3, 10),
    "black led": ([b(5), y(14), b(14)], False, 2, 2, 30),
    "escape led, next sets the suit": ([ESC, y(3), g(9)], False, 1, 1, 0),
    "loot led, next sets the suit": ([LOOT, g(3), y(9)], False, 1, 1, 0),
    "tigress as escape led": ([TIG, p(3), y(9)], False, 1, 1, 0),
    "escape does not win over a one": ([y(1), ESC], False, 0, 0, 0),
    # 4 characters
    "pirate over black 14": ([b(14), PIR], False, 1, 1, 20),
    "first pirate": ([y(3), PIR, PIR2], False, 1, 1, 0),
    "tigress as pirate is a pirate": ([TIG, PIR, y(1)], True, 0, 0, 0),
    "tigress as escape is none": ([TIG, y(1), y(2)], False, 2, 2, 0),
    "mermaid over numbers": ([b(13), MER], False, 1, 1, 0),
    "first mermaid": ([MER2, MER], False, 0, 0, 0),
    "pirate takes mermaids": ([MER, MER2, PIR], False, 2, 2, 40),
    "tigress takes a mermaid": ([MER, TIG], True, 1, 1, 20),
    "king takes pirates": ([PIR, PIR2, KING], False, 2, 2, 60),
    "king takes the tigress": ([TIG, KING, y(14)], True, 1, 1, 40),
    "king takes no tigress as escape": ([TIG, KING], False, 1, 1, 0),
    "mermaid takes the king": ([KING, MER], False, 1, 1, 40),
    "mermaid takes the king under pirates": ([PIR, KING, MER, MER2], False, 2, 2, 40),
    "mermaid before the king": ([MER, PIR, KING], False, 0, 0, 40),
    "mermaid wins with 14s": ([MER, KING, b(14), g(14)], False, 0, 0, 70),
    # 6 nothing but escapes and loot
    "only escapes": ([ESC2, ESC, ESC3], False, 0, 0, 0),
    "only escapes and loot": ([LOOT, ESC, LOOT2], False, 0, 0, 0),
    "tigress as escape wins first": ([TIG, ESC, LOOT], False, 0, 0, 0),
    # 2 kraken
    "kraken destroys": ([y(3), y(9), KRA], False, None, 1, 0),
    "kraken led: evaluated without it": ([KRA, y(3), g(9), y(5)], False, None, 3, 0),
    "kraken and characters": ([PIR, KRA, KING], False, None, 2, 0),
    "kraken and the king taken": ([KING, KRA, MER], False, None, 2, 0),
    "kraken led, only escapes": ([KRA, ESC, LOOT], False, None, 1, 0),
    "kraken second, only escapes": ([ESC, KRA, LOOT], False, None, 0, 0),
    "kraken alone": ([KRA], False, None, 0, 0),
    # 3 white whale
    "whale: highest rank of any suit": ([y(5), g(9), WHA], False, 1, 1, 0),
    "whale: black is no trump": ([b(5), WHA, p(6)], False, 2, 2, 0),
    "whale: earlier on a tie": ([WHA, g(9), b(9), y(9)], False, 1, 1, 0),
    "whale: characters are destroyed": ([KING, y(2), WHA, MER], False, 1, 1, 0),
    "whale: 14s count": ([b(14), WHA, PIR, y(14)], False, 0, 0, 30),
    "whale without numbers: destroyed": ([PIR, KING, WHA], False, None, 2, 0),
    "whale led without numbers": ([WHA, ESC, LOOT], False, None, 0, 0),
    # 1 both: the later acts, the earlier is an escape
    "kraken then whale": ([KRA, y(3), WHA, b(2)], False, 1, 1, 0),
    "whale then kraken": ([WHA, y(3), KRA, b(2)], False, None, 3, 0),
    "kraken then whale, no number": ([KRA, PIR, WHA], False, None, 2, 0),
    "whale then kraken, the whale leads as an escape": ([WHA, ESC, KRA], False, None, 0, 0),
    "whale then kraken alone": ([WHA, KRA], False, None, 0, 0),
    "kraken then whale alone": ([KRA, WHA], False, None, 1, 0),
    "escape, whale, kraken": ([ESC, WHA, KRA], False, None, 0, 0),
}


@pytest.mark.parametrize("case", TRICKS)
def test_trick(case: str) -> None:
    cards, as_pirate, winner, leader, bonus = TRICKS[case]
    assert trick_winner(cards, as_pirate) == (winner, leader)
    assert trick_bonus(cards, as_pirate) == bonus
    plays = [reference.Play(card, as_pirate and card == TIG) for card in cards]
    assert reference.resolve(plays) == (winner, leader)
    assert reference.bonus(plays, winner) == bonus


@pytest.mark.parametrize(
    ("hand", "trick", "as_pirate", "legal"),
    [
        ([y(1), g(2), ESC], [], False, [y(1), g(2), ESC]),
        ([y(1), g(2), b(3), PIR], [y(9)], False, [y(1), PIR]),  # follow or any special
        ([g(2), b(3), PIR], [y(9)], False, [g(2), b(3), PIR]),  # void: anything
        ([y(1), b(3)], [b(9)], False, [b(3)]),
        ([y(1), g(2)], [ESC, g(9)], False, [g(2)]),  # the next card set the suit
        ([y(1), g(2)], [LOOT], False, [y(1), g(2)]),  # still open
        ([y(1), g(2)], [LOOT, ESC, y(5), g(5)], False, [y(1)]),
        ([y(1), g(2)], [TIG, y(5)], False, [y(1)]),  # Tigress as Escape sets nothing
        ([y(1), g(2)], [TIG, y(5)], True, [y(1), g(2)]),  # led by a Pirate: no lead suit
        ([y(1), g(2)], [PIR, y(5)], False, [y(1), g(2)]),
        ([y(1), g(2)], [MER, y(5)], False, [y(1), g(2)]),
        ([y(1), g(2)], [KING, y(5)], False, [y(1), g(2)]),
        ([y(1), g(2)], [KRA, y(5)], False, [y(1), g(2)]),
        ([y(1), g(2)], [WHA, y(5)], False, [y(1), g(2)]),
        ([y(1), g(2)], [ESC, PIR, y(5)], False, [y(1)]),  # the same cards played later change nothing
        ([y(1), g(2)], [y(5), KRA, g(5)], False, [y(1)]),
        ([TIG, y(1), g(2)], [g(9)], False, [g(2), TIG]),
    ],
)
def test_legal_cards(hand: list[int], trick: list[int], as_pirate: bool, legal: list[int]) -> None:
    assert legal_cards(hand, trick, as_pirate) == legal


def test_the_bots_table_of_what_beats_a_number_is_the_rules() -> None:
    for card, later in itertools.permutations(range(56), 2):
        assert tables.BEATEN_BY_NUMBERS[card] >> later & 1 == trick_winner([card, later], False)[0], (card, later)


def test_thousands_of_tricks_full_of_specials_agree_with_the_reference() -> None:
    draw = random.Random(7)
    specials = list(range(56, 74))
    for _ in range(6_000):
        pool = draw.sample(specials, 9) + draw.sample(range(56), 9)
        draw.shuffle(pool)
        count = draw.randint(1, 8)
        cards, hand, as_pirate = pool[:count], pool[count:], draw.random() < 0.5
        plays = [reference.Play(card, as_pirate and card == TIG) for card in cards]
        winner, leader = reference.resolve(plays)
        assert trick_winner(cards, as_pirate) == (winner, leader), cards
        assert trick_bonus(cards, as_pirate) == reference.bonus(plays, winner), cards
        legal = {play.card for play in reference.legal_plays(set(hand), plays)}
        assert legal_cards(hand, cards, as_pirate) == sorted(legal)
