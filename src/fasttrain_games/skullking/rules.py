"""The rules of Skull King (74-card edition): cards, tricks, legal cards, scoring.

Cards are ids 0..73: `suit * 14 + rank - 1` for the numbered ones (yellow, green, purple, black), then five Escapes,
five Pirates, the Tigress, the Skull King, two Mermaids, the Kraken, the White Whale and two Loot. Inside the kernels a
played card is a *code*: its id, except that a Tigress declared as Pirate is code 74 (so `action = 11 + code`).
A set of cards is a pair of bit sets: `numbers` (bit = id, 56 bits) and `specials` (bit = id - 56, 18 bits).

Where the rules page is not clear, this module decides:

- "Without the Kraken" means: take the Kraken out and evaluate the remaining cards in the order played.
- With Kraken and White Whale in one trick the earlier counts as an Escape, also for the question who leads next.
- A Loot alliance holds if the White Whale decides the trick: there is a winner. A destroyed trick makes no alliance.
- In a trick of only Escapes and Loot, a Loot card that does not win allies its player with the winner.
- The bonus for 14s counts in a trick that the White Whale decides.
- A trick may be evaluated before it is full. If it holds only a Kraken, its player leads next.
- With 8 players rounds 9 and 10 deal 8 cards; bids still run from 0 to the round number, which is `r` in the scoring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain_kernels.jit import njit

NUM_CARDS = 74
NUM_NUMBERED = 56
NUM_ROUNDS = 10
MIN_PLAYERS = 2
MAX_PLAYERS = 8
RANKS = 14
BLACK = 3  # the trump suit; 0 yellow, 1 green, 2 purple

ESCAPES = range(56, 61)
PIRATES = range(61, 66)
TIGRESS = 66
SKULL_KING = 67
MERMAIDS = range(68, 70)
KRAKEN = 70
WHITE_WHALE = 71
LOOTS = range(72, 74)
TIGRESS_PIRATE = 74  # code of a Tigress declared as Pirate
NUM_CODES = 75

NUM_BIDS = NUM_ROUNDS + 1
FIRST_PLAY_ACTION = NUM_BIDS  # action = FIRST_PLAY_ACTION + code
NUM_ACTIONS = NUM_BIDS + NUM_CODES

LEAD_OPEN = -1  # until a card has decided the lead suit
LEAD_NONE = 4  # the trick was led by a character or a beast, so it has no lead suit

SUIT_BITS = (1 << RANKS) - 1
ALL_NUMBERS = (1 << NUM_NUMBERED) - 1
ALL_SPECIALS = (1 << (NUM_CARDS - NUM_NUMBERED)) - 1
TIGRESS_BIT = 1 << (TIGRESS - NUM_NUMBERED)

# The kinds of played codes, indices into KIND_NAMES.
NUMBER, ESCAPE, PIRATE, KING, MERMAID, BEAST_KRAKEN, BEAST_WHALE, LOOT = range(8)
KIND_NAMES = ("number", "escape", "pirate", "skull_king", "mermaid", "kraken", "white_whale", "loot")


def _kinds() -> NDArray[np.int64]:
    kinds = np.zeros(NUM_CODES, np.int64)
    for ids, kind in ((ESCAPES, ESCAPE), (PIRATES, PIRATE), (MERMAIDS, MERMAID), (LOOTS, LOOT)):
        kinds[ids.start : ids.stop] = kind
    kinds[[TIGRESS, SKULL_KING, KRAKEN, WHITE_WHALE, TIGRESS_PIRATE]] = ESCAPE, KING, BEAST_KRAKEN, BEAST_WHALE, PIRATE
    kinds.flags.writeable = False
    return kinds


KIND = _kinds()  # (75,) int64: kind of every code


@njit
def cards_dealt(round_number: int, num_players: int) -> int:
    """Cards that each player holds in a round."""
    return 8 if num_players == MAX_PLAYERS and round_number > 8 else round_number


@njit
def lead_after(lead: int, code: int, position: int) -> int:
    """The lead suit after `code` was played as card number `position` of the trick."""
    if lead != LEAD_OPEN:
        return lead
    if code < NUM_NUMBERED:
        return code // RANKS
    kind = KIND[code]
    if position == 0 and kind != ESCAPE and kind != LOOT:
        return LEAD_NONE
    return LEAD_OPEN


@njit
def legal_numbers(numbers: int, lead: int) -> int:
    """The numbered cards of a hand that may be played. Special cards are always legal."""
    if 0 <= lead < LEAD_NONE:
        following = numbers & (SUIT_BITS << (RANKS * lead))
        if following != 0:
            return following
    return numbers


@njit
def scan_trick(codes: Any, count: int) -> Any:
    """Find the deciding cards among the first `count` cards of a trick.

    Returns a tuple of ints. Six positions, -1 if absent: kraken, whale, first king, first pirate, first mermaid, best
    number. Then the best number's power (rank 0..13 in the lead suit, 14..27 in black, -1 if absent), the position of
    the highest rank of any suit, that rank (0..13), and the suit of the first numbered card (-1 if absent).
    """
    kraken = whale = king = pirate = mermaid = best = power = top = top_rank = suit_led = -1
    for position in range(count):
        code = codes[position]
        kind = KIND[code]
        if kind == NUMBER:
            suit = code // RANKS
            rank = code - RANKS * suit
            if suit_led < 0:
                suit_led = suit
            if rank > top_rank:
                top, top_rank = position, rank
            strength = rank + RANKS if suit == BLACK else rank
            if suit in (BLACK, suit_led) and strength > power:
                best, power = position, strength
        elif kind == PIRATE:
            pirate = position if pirate < 0 else pirate
        elif kind == MERMAID:
            mermaid = position if mermaid < 0 else mermaid
        elif kind == KING:
            king = position
        elif kind == BEAST_KRAKEN:
            kraken = position
        elif kind == BEAST_WHALE:
            whale = position
    return kraken, whale, king, pirate, mermaid, best, power, top, top_rank, suit_led


@njit
def trick_result(codes: Any, count: int) -> Any:
    """(position of the winner or -1 if destroyed, position of the next leader) of the first `count` codes."""
    kraken, whale, king, pirate, mermaid, best, _, top, _, _ = scan_trick(codes, count)
    if whale > kraken:
        return (top, top) if top >= 0 else (-1, whale)
    winner = best
    if king >= 0:
        winner = mermaid if mermaid >= 0 else king
    elif pirate >= 0:
        winner = pirate
    elif mermaid >= 0:
        winner = mermaid
    elif best < 0:  # only Escapes and Loot, and perhaps a Kraken
        winner = 1 if kraken == 0 and count > 1 else 0
    return (winner, winner) if kraken < 0 else (-1, winner)


@njit
def bonus_of_trick(codes: Any, count: int, winner: int) -> int:
    """Bonus points that the winner of a trick gets if it makes its bid: for 14s and captured characters, not for Loot.

    If the White Whale decides the trick, a numbered card wins, so that nothing is captured.
    """
    if winner < 0:
        return 0
    bonus = pirates = mermaids = kings = 0
    for position in range(count):
        code = codes[position]
        kind = KIND[code]
        if kind == NUMBER:
            if code % RANKS == RANKS - 1:
                bonus += 20 if code // RANKS == BLACK else 10
        else:
            pirates += kind == PIRATE
            mermaids += kind == MERMAID
            kings += kind == KING
    winning_kind = KIND[codes[winner]]
    if winning_kind == KING:
        bonus += 30 * pirates
    elif winning_kind == MERMAID:
        bonus += 40 * kings
    elif winning_kind == PIRATE:
        bonus += 20 * mermaids
    return bonus


@njit
def score_of_bid(bid: int, tricks: int, round_number: int) -> int:
    """A seat's points for its bid alone, without bonuses."""
    if bid == 0:
        return 10 * round_number if tricks == 0 else -10 * round_number
    return 20 * bid if tricks == bid else -10 * abs(tricks - bid)
