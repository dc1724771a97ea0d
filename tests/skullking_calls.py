"""Skull King's kernels for one trick or one round: ids of cards in, plain numbers out; what cannot be is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain_games.skullking.rules import (
    LEAD_OPEN,
    LOOTS,
    MAX_PLAYERS,
    MIN_PLAYERS,
    NUM_CARDS,
    NUM_NUMBERED,
    NUM_ROUNDS,
    TIGRESS,
    TIGRESS_PIRATE,
    bonus_of_trick,
    cards_dealt,
    lead_after,
    legal_numbers,
    score_of_bid,
    trick_result,
)


def deal_size(round_number: int, num_players: int) -> int:
    """Cards each player is dealt in round `round_number` (1..10) with 2..8 players.

    Raises:
        ValueError: a number out of range.
    """
    _check_round(round_number)
    if not MIN_PLAYERS <= num_players <= MAX_PLAYERS:
        raise ValueError(f"num_players={num_players}: Skull King takes {MIN_PLAYERS} to {MAX_PLAYERS} players")
    return int(cards_dealt(round_number, num_players))


def trick_winner(cards: Sequence[int] | NDArray[Any], tigress_as_pirate: bool = False) -> tuple[int | None, int]:
    """Who wins a trick: (index of the winner or None if the trick is destroyed, index of the next leader).

    `cards` are ids 0..73 in the order played (1 to 8 of them); `tigress_as_pirate` tells how a Tigress among them
    was declared.

    Raises:
        ValueError: no card, too many cards, an id out of range or twice.
    """
    codes = _codes(cards, tigress_as_pirate)
    winner, leader = trick_result(codes, len(codes))
    return (None if winner < 0 else int(winner)), int(leader)


def trick_bonus(cards: Sequence[int] | NDArray[Any], tigress_as_pirate: bool = False) -> int:
    """Bonus points of a trick for its winner, due only if the winner makes its bid; Loot apart.

    Raises:
        ValueError: as `trick_winner`.
    """
    codes = _codes(cards, tigress_as_pirate)
    winner, _ = trick_result(codes, len(codes))
    return int(bonus_of_trick(codes, len(codes), winner))


def loot_allies(cards: Sequence[int] | NDArray[Any], tigress_as_pirate: bool = False) -> list[int]:
    """Indices in the trick of those who played Loot and are thereby allied with its winner.

    Raises:
        ValueError: as `trick_winner`.
    """
    winner, _ = trick_winner(cards, tigress_as_pirate)
    if winner is None:
        return []
    return [index for index, card in enumerate(cards) if card in LOOTS and index != winner]


def legal_cards(
    hand: Sequence[int] | NDArray[Any], trick: Sequence[int] | NDArray[Any], tigress_as_pirate: bool = False
) -> list[int]:
    """The ids of `hand` that may be played onto `trick` (ids in the order played, may be empty), ascending.

    Raises:
        ValueError: empty hand, an id out of range or twice (also once in hand and once in the trick).
    """
    if len(hand) == 0:
        raise ValueError("the hand is empty: nobody can play from it")
    _check_ids([*hand, *trick])
    lead = LEAD_OPEN
    numbers = 0
    if len(trick) > 0:
        for position, code in enumerate(_codes(trick, tigress_as_pirate)):
            lead = lead_after(lead, int(code), position)
    for card in hand:
        if card < NUM_NUMBERED:
            numbers |= 1 << int(card)
    allowed = legal_numbers(numbers, lead)
    return sorted(int(card) for card in hand if card >= NUM_NUMBERED or allowed >> int(card) & 1)


def score_round(
    bids: Sequence[int],
    tricks: Sequence[int],
    round_number: int,
    bonuses: Sequence[int] | None = None,
    alliances: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """Points of every seat for one round.

    `bonuses` are the points from `trick_bonus` summed per seat; `alliances` are pairs (seat that played Loot, seat
    that won the trick).

    Raises:
        ValueError: lengths differ, a bid or a number of tricks out of range, an alliance of a seat with itself.
    """
    _check_round(round_number)
    extra = [0] * len(bids) if bonuses is None else list(bonuses)
    if not len(bids) == len(tricks) == len(extra):
        raise ValueError(f"one entry per seat needed: {len(bids)} bids, {len(tricks)} tricks, {len(extra)} bonuses")
    for name, values in (("bid", bids), ("tricks", tricks)):
        for seat, value in enumerate(values):
            if not 0 <= value <= round_number:
                raise ValueError(f"{name} of seat {seat} is {value}, not in 0..{round_number}")
    made = [bid == won for bid, won in zip(bids, tricks, strict=True)]
    scores = [int(score_of_bid(bid, won, round_number)) for bid, won in zip(bids, tricks, strict=True)]
    scores = [score + (points if ok else 0) for score, points, ok in zip(scores, extra, made, strict=True)]
    for player, winner in alliances:
        if player == winner or not (0 <= player < len(bids) and 0 <= winner < len(bids)):
            raise ValueError(f"alliance {(player, winner)} needs two different seats in 0..{len(bids) - 1}")
        if made[player] and made[winner]:
            scores[player] += 20
            scores[winner] += 20
    return scores


def _check_round(round_number: int) -> None:
    if not 1 <= round_number <= NUM_ROUNDS:
        raise ValueError(f"round_number={round_number}: a game has rounds 1 to {NUM_ROUNDS}")


def _check_ids(cards: Sequence[int]) -> None:
    for card in cards:
        if not 0 <= card < NUM_CARDS or card != int(card):
            raise ValueError(f"card {card} is not an id in 0..{NUM_CARDS - 1}")
    if len({int(card) for card in cards}) != len(cards):
        raise ValueError(f"a card occurs twice in {list(cards)}: there is one of each id")


def _codes(cards: Sequence[int] | NDArray[Any], tigress_as_pirate: bool) -> NDArray[np.int32]:
    if not 1 <= len(cards) <= MAX_PLAYERS:
        raise ValueError(f"a trick has 1 to {MAX_PLAYERS} cards, not {len(cards)}")
    _check_ids(list(cards))
    codes = np.array(cards, np.int32)
    if tigress_as_pirate:
        codes[codes == TIGRESS] = TIGRESS_PIRATE
    return codes
