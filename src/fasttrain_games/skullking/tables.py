"""What bots know about cards: strength order, which cards beat which, and how likely a card wins a trick.

All tables are constants computed from the rules at import and compiled into the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain_games.skullking.rules import (
    ALL_NUMBERS,
    BLACK,
    ESCAPE,
    KIND,
    KING,
    KRAKEN,
    LOOT,
    MAX_PLAYERS,
    MERMAID,
    MERMAIDS,
    NUM_CODES,
    NUM_NUMBERED,
    NUMBER,
    PIRATE,
    PIRATES,
    RANKS,
    SKULL_KING,
    SUIT_BITS,
    TIGRESS,
    WHITE_WHALE,
    scan_trick,
)
from fasttrain_kernels.jit import njit


def _specials(*ids: int) -> int:
    return sum(1 << (card - NUM_NUMBERED) for card in ids)


KING_BIT = _specials(SKULL_KING)
MERMAID_BITS = _specials(*MERMAIDS)
PIRATE_BITS = _specials(*PIRATES, TIGRESS)  # the Tigress may count as a Pirate
CHARACTER_BITS = KING_BIT | MERMAID_BITS | PIRATE_BITS
BEAST_BITS = _specials(KRAKEN, WHITE_WHALE)
BLACK_BITS = SUIT_BITS << (RANKS * BLACK)


def _frozen(values: Any, dtype: Any) -> NDArray[Any]:
    table = np.array(values, dtype)
    table.flags.writeable = False
    return table


def _strengths() -> NDArray[np.int64]:
    """(75,) rough strength of each code. Bots use it to choose which card to throw away and which to lead."""
    by_kind = {ESCAPE: 0, LOOT: 1, MERMAID: 60, PIRATE: 70, KING: 80}
    strengths = []
    for code in range(NUM_CODES):
        kind = int(KIND[code])
        if kind == NUMBER:
            strengths.append(10 + code % RANKS + (30 if code // RANKS == BLACK else 0))
        else:
            strengths.append(by_kind.get(kind, 2))  # 2: the beasts, which win no trick
    return _frozen(strengths, np.int64)


def _higher(rank: int) -> int:
    """Bits of one suit above `rank` (0..13)."""
    return SUIT_BITS & ~((2 << rank) - 1)


def _beaten_by() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(75,), (75,) int64: the numbered and the special cards that beat each code if they are played after it.

    Both beasts are among these cards: with a Kraken nobody wins, with a White Whale no special card wins.
    """
    numbers, specials = [], []
    by_kind = {
        PIRATE: KING_BIT | BEAST_BITS,
        KING: MERMAID_BITS | BEAST_BITS,
        MERMAID: PIRATE_BITS | BEAST_BITS,
    }
    for code in range(NUM_CODES):
        kind = int(KIND[code])
        if kind == NUMBER:
            suit, rank = divmod(code, RANKS)
            numbers.append(_higher(rank) << (RANKS * suit) | (0 if suit == BLACK else BLACK_BITS))
            specials.append(CHARACTER_BITS | BEAST_BITS)
        elif kind in by_kind:
            numbers.append(0)
            specials.append(by_kind[kind])
        else:
            numbers.append(ALL_NUMBERS)
            specials.append(CHARACTER_BITS | BEAST_BITS)
    return _frozen(numbers, np.int64), _frozen(specials, np.int64)


STRENGTH = _strengths()
BEATEN_BY_NUMBERS, BEATEN_BY_SPECIALS = _beaten_by()


def _win_chances() -> NDArray[np.float64]:
    """(9, 75) chance that a card wins its trick with n players (first axis), when no other card is known.

    If a share q of other cards beats it, this is (1 - q)^(n-1), for a plain suit times the chance that the card leads
    or follows its suit. As one of n cards wins each trick, each row is scaled to a mean of 1/n over the 74 cards.
    """
    chances = np.zeros((MAX_PLAYERS + 1, NUM_CODES))
    for players in range(2, MAX_PLAYERS + 1):
        for code in range(NUM_CODES):
            kind = int(KIND[code])
            if kind not in (NUMBER, PIRATE, KING, MERMAID):
                continue
            beaten = int(BEATEN_BY_NUMBERS[code]).bit_count() + int(BEATEN_BY_SPECIALS[code]).bit_count()
            chance = (1.0 - beaten / 73.0) ** (players - 1)
            if kind == NUMBER and code // RANKS != BLACK:
                chance *= 1.0 / players + (1.0 - 1.0 / players) * 0.4
            chances[players, code] = chance
        chances[players, TIGRESS] = chances[players, -1]
        mean = chances[players, : NUM_CODES - 1].mean()
        chances[players] = np.minimum(0.97, chances[players] / (players * mean))
    return _frozen(chances, np.float64)


WIN_CHANCE = _win_chances()


@njit
def beating_cards(codes: Any, count: int) -> Any:
    """The cards (numbers, specials) that would win the trick if played next, after its first `count` codes."""
    if count == 0:
        return ALL_NUMBERS, CHARACTER_BITS
    kraken, whale, king, pirate, mermaid, _, power, _, top_rank, suit_led = scan_trick(codes, count)
    if whale > kraken:
        above = SUIT_BITS & ~((2 << top_rank) - 1) if top_rank >= 0 else SUIT_BITS
        return above | above << RANKS | above << 2 * RANKS | above << 3 * RANKS, 0
    if kraken >= 0:
        return 0, 0
    if king >= 0:
        return 0, MERMAID_BITS if mermaid < 0 else 0
    if pirate >= 0:
        return 0, KING_BIT if mermaid < 0 else 0
    if mermaid >= 0:
        return 0, PIRATE_BITS
    if power < 0:
        return ALL_NUMBERS, CHARACTER_BITS
    if power >= RANKS:
        return (SUIT_BITS & ~((2 << (power - RANKS)) - 1)) << (RANKS * BLACK), CHARACTER_BITS
    return (SUIT_BITS & ~((2 << power) - 1)) << (RANKS * suit_led) | BLACK_BITS, CHARACTER_BITS
