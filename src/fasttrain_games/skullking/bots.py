"""The opponents: `random` and the rule-based `easy`, `medium`, `hard`. Each decides only by what its own seat may know.

A bot reads its own hand, the current trick, the cards seen this round and, while playing, everybody's bids and tricks.
Decisions are loops over the few set bits of the legal cards; `hard` has a file of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import Float64Array, Record
from fasttrain.native.batch import random_below
from fasttrain_games.skullking.hard_bot import hard_bid, hard_play
from fasttrain_games.skullking.rules import (
    NUM_NUMBERED,
    RANKS,
    SUIT_BITS,
    TIGRESS,
    TIGRESS_BIT,
    TIGRESS_PIRATE,
    legal_numbers,
)
from fasttrain_games.skullking.state import count_bits, lowest_bit
from fasttrain_games.skullking.tables import (
    BLACK_BITS,
    KING_BIT,
    MERMAID_BITS,
    PIRATE_BITS,
    STRENGTH,
    WIN_CHANCE,
    beating_cards,
)
from fasttrain_kernels.jit import njit, njit_inline

RANDOM, EASY, MEDIUM, HARD, SELF = range(5)  # SELF is no bot: the game stops and waits for an action
LEVEL_NAMES = ("random", "easy", "medium", "hard")
SEAT_NAMES = (*LEVEL_NAMES, "self")  # who may play a seat that is not the learner's

_COURT = SUIT_BITS & ~(SUIT_BITS >> 2)  # ranks 13 and 14 of one suit
COURT_BITS = _COURT | _COURT << RANKS | _COURT << 2 * RANKS
HIGH_BLACK_BITS = BLACK_BITS & ~(BLACK_BITS >> 7)  # black 8 to 14


@njit
def bot_bid(game: Record, seat: int, level: int, scratch: Float64Array) -> Any:
    """The bid of a bot. It does not look at the other bids."""
    if level == RANDOM:
        return random_below(game, game.round + 1)
    if level == EASY:
        return _easy_bid(game, seat)
    if level == MEDIUM:
        return _medium_bid(game, seat)
    return hard_bid(game, seat, scratch)


@njit_inline
def bot_play(game: Record, seat: int, level: int, scratch: Float64Array) -> int:
    """The card code that a bot plays; it is always legal."""
    if level == HARD:
        return hard_play(game, seat, scratch)
    numbers = legal_numbers(game.hand_numbers[seat], game.lead)
    specials = game.hand_specials[seat]
    if level == RANDOM:
        return _random_play(game, numbers, specials)
    wants_trick = game.bids[seat] > game.tricks[seat]
    if level == EASY:
        return _strongest(numbers, specials, TIGRESS_PIRATE) if wants_trick else _weakest(numbers, specials, TIGRESS)
    return _medium_play(game, numbers, specials, wants_trick)


@njit
def _random_play(game: Record, numbers: int, specials: int) -> int:
    """Draw uniformly from the legal actions. The Tigress counts as two actions: as Pirate and as Escape."""
    num_numbers = count_bits(numbers)
    num_specials = count_bits(specials)
    choice = random_below(game, num_numbers + num_specials + (specials & TIGRESS_BIT != 0))
    if choice < num_numbers:
        for _ in range(choice):
            numbers &= numbers - 1
        return lowest_bit(numbers)
    choice -= num_numbers
    if choice == num_specials:
        return TIGRESS_PIRATE
    for _ in range(choice):
        specials &= specials - 1
    return NUM_NUMBERED + lowest_bit(specials)


@njit
def _easy_bid(game: Record, seat: int) -> Any:
    """The number of strong cards, plus a random -1, 0 or 1. It does not depend on the number of players."""
    strong = count_bits(game.hand_numbers[seat] & (COURT_BITS | HIGH_BLACK_BITS))
    strong += count_bits(game.hand_specials[seat] & (PIRATE_BITS | KING_BIT | MERMAID_BITS))
    return min(max(strong + random_below(game, 3) - 1, 0), game.round)


@njit
def _medium_bid(game: Record, seat: int) -> Any:
    """The expected number of tricks, rounded."""
    numbers = game.hand_numbers[seat]
    specials = game.hand_specials[seat]
    expected = 0.5
    while numbers != 0:
        expected += WIN_CHANCE[game.num_players, lowest_bit(numbers)]
        numbers &= numbers - 1
    while specials != 0:
        expected += WIN_CHANCE[game.num_players, NUM_NUMBERED + lowest_bit(specials)]
        specials &= specials - 1
    return min(np.int64(expected), game.round)


@njit
def _medium_play(game: Record, numbers: int, specials: int, wants_trick: bool) -> int:
    """If `wants_trick`, the strongest card that wins (last to play: the weakest); else the strongest that loses."""
    leading = game.played == 0
    last = game.played == game.num_players - 1
    if leading:
        return _strongest(numbers, specials, TIGRESS_PIRATE) if wants_trick else _weakest(numbers, specials, TIGRESS)
    winning_numbers, winning_specials = beating_cards(game.codes, game.played)
    taking_numbers = numbers & winning_numbers
    taking_specials = specials & winning_specials
    tigress = specials & TIGRESS_BIT  # as an Escape she never takes the trick
    losing_numbers = numbers & ~winning_numbers
    losing_specials = (specials & ~winning_specials) | tigress
    can_take = taking_numbers | taking_specials != 0
    can_lose = losing_numbers | losing_specials != 0
    if wants_trick:
        if not can_take:
            return _weakest(losing_numbers, losing_specials, TIGRESS)
        if last:
            return _weakest(taking_numbers, taking_specials, TIGRESS_PIRATE)
        return _strongest(taking_numbers, taking_specials, TIGRESS_PIRATE)
    if can_lose:
        return _strongest(losing_numbers, losing_specials, TIGRESS)
    if last:
        return _strongest(taking_numbers, taking_specials, TIGRESS_PIRATE)
    return _weakest(taking_numbers, taking_specials, TIGRESS_PIRATE)


@njit
def _strongest(numbers: int, specials: int, tigress: int) -> int:
    """The code of the strongest card in two bit sets, not both empty. A Tigress counts as the code `tigress`."""
    best = -1
    best_strength = -1
    while numbers != 0:
        code = lowest_bit(numbers)
        numbers &= numbers - 1
        if STRENGTH[code] >= best_strength:
            best, best_strength = code, STRENGTH[code]
    while specials != 0:
        code = NUM_NUMBERED + lowest_bit(specials)
        specials &= specials - 1
        code = tigress if code == TIGRESS else code
        if STRENGTH[code] >= best_strength:
            best, best_strength = code, STRENGTH[code]
    return best


@njit
def _weakest(numbers: int, specials: int, tigress: int) -> int:
    """The weakest code of a non-empty set. A Tigress in it counts as the code `tigress`."""
    best = -1
    best_strength = 1 << 30
    while numbers != 0:
        code = lowest_bit(numbers)
        numbers &= numbers - 1
        if STRENGTH[code] < best_strength:
            best, best_strength = code, STRENGTH[code]
    while specials != 0:
        code = NUM_NUMBERED + lowest_bit(specials)
        specials &= specials - 1
        code = tigress if code == TIGRESS else code
        if STRENGTH[code] < best_strength:
            best, best_strength = code, STRENGTH[code]
    return best
