"""The `hard` bot: bids the number with the best expected score, then plays for exactly that number.

Bids and plays use one model: every card in hand wins its trick independently with some chance, so that the number of
tricks is Poisson-binomial. In play the chances depend on the unseen cards and on the players who still need tricks.
"""

from __future__ import annotations

from typing import Any

from fasttrain.batch import Float64Array, Record
from fasttrain_games.skullking.rules import (
    ALL_NUMBERS,
    ALL_SPECIALS,
    BLACK,
    NUM_NUMBERED,
    RANKS,
    TIGRESS,
    TIGRESS_PIRATE,
    cards_dealt,
    legal_numbers,
)
from fasttrain_games.skullking.state import count_bits, lowest_bit
from fasttrain_games.skullking.tables import (
    BEATEN_BY_NUMBERS,
    BEATEN_BY_SPECIALS,
    WIN_CHANCE,
    beating_cards,
)
from fasttrain_kernels.jit import njit

# Two assumptions about other players. Against three `medium` bots the win rate changes by less than 0.01 when DUCKING
# goes from 0.15 to 0.5.
FOLLOWED = 0.4  # how often another player leads with the suit of a plain card that this seat keeps
DUCKING = 0.5  # how often a player who needs no trick must play a card that wins one


@njit
def _add_card(counts: Float64Array, num_cards: int, chance: float) -> None:
    """Update `counts`, probabilities of 0..num_cards tricks, for one more card that wins with `chance`."""
    counts[num_cards + 1] = 0.0
    for won in range(num_cards + 1, 0, -1):
        counts[won] = counts[won] * (1.0 - chance) + counts[won - 1] * chance
    counts[0] *= 1.0 - chance


@njit
def hard_bid(game: Record, seat: int, scratch: Float64Array) -> int:
    """The bid with the best expected score by the bot's chances."""
    num_players = game.num_players
    counts = scratch[0]
    counts[0] = 1.0
    held = 0
    numbers = game.hand_numbers[seat]
    specials = game.hand_specials[seat]
    while numbers != 0:
        _add_card(counts, held, WIN_CHANCE[num_players, lowest_bit(numbers)])
        numbers &= numbers - 1
        held += 1
    while specials != 0:
        _add_card(counts, held, WIN_CHANCE[num_players, NUM_NUMBERED + lowest_bit(specials)])
        specials &= specials - 1
        held += 1
    best_bid = 0
    best_value = -1e9
    for bid in range(held + 1):
        value = 0.0
        for won in range(held + 1):
            if won == bid:
                value += counts[won] * (20.0 * bid if bid > 0 else 10.0 * game.round)
            else:
                value -= counts[won] * (10.0 * abs(won - bid) if bid > 0 else 10.0 * game.round)
        if value > best_value:
            best_bid, best_value = bid, value
    return best_bid


@njit
def _payoff(game: Record, seat: int, tricks: int) -> Any:
    """Points for the bid of a seat that wins `tricks` tricks in the round."""
    bid = game.bids[seat]
    if bid == 0:
        return 10.0 * game.round if tricks == 0 else -10.0 * game.round
    return 20.0 * bid if tricks == bid else -10.0 * abs(tricks - bid)


@njit
def _unseen(game: Record, seat: int) -> Any:
    """(numbers, specials): the cards in the others' hands and in the undealt deck, as two bit sets."""
    numbers = ALL_NUMBERS & ~(game.seen_numbers | game.hand_numbers[seat])
    specials = ALL_SPECIALS & ~(game.seen_specials | game.hand_specials[seat])
    return numbers, specials


@njit
def _share_beating(code: int, unseen_numbers: int, unseen_specials: int) -> float:
    """Share of the unseen cards that would beat `code`."""
    unseen = count_bits(unseen_numbers) + count_bits(unseen_specials)
    beating = count_bits(unseen_numbers & BEATEN_BY_NUMBERS[code])
    return (beating + count_bits(unseen_specials & BEATEN_BY_SPECIALS[code])) / unseen


@njit
def _power(base: float, exponent: int) -> float:
    result = 1.0
    for _ in range(exponent):
        result *= base
    return result


@njit
def _later_chance(code: int, unseen_numbers: int, unseen_specials: int, num_players: int) -> float:
    """Chance that a card kept in hand wins a later trick."""
    if code == TIGRESS:
        code = TIGRESS_PIRATE
    if WIN_CHANCE[num_players, code] == 0.0:
        return 0.0
    chance = _power(1.0 - _share_beating(code, unseen_numbers, unseen_specials), num_players - 1)
    if code < NUM_NUMBERED and code // RANKS != BLACK:
        chance *= 1.0 / num_players + (1.0 - 1.0 / num_players) * FOLLOWED
    return chance


@njit
def _chance_now(game: Record, code: int, unseen: tuple[int, int]) -> float:
    """Chance that a code which is winning the trick now is not beaten by the players who still have to play."""
    num_players = game.num_players
    share = _share_beating(code, unseen[0], unseen[1])
    held = cards_dealt(game.round, num_players) - game.trick
    by_wanting = _power(1.0 - share, held)
    by_ducking = 1.0 - share * DUCKING
    chance = 1.0
    for position in range(game.played + 1, num_players):
        seat = (game.leader + position) % num_players
        chance *= by_wanting if game.bids[seat] > game.tricks[seat] else by_ducking
    return chance


@njit
def _value_of_play(game: Record, seat: int, place: int, chance: float, scratch: Float64Array) -> float:
    """Expected points if held card number `place` wins this trick with `chance`; `scratch[1]`: all cards' chances."""
    counts = scratch[0]
    chances = scratch[1]
    held = cards_dealt(game.round, game.num_players) - game.trick
    counts[0] = 1.0
    folded = 0
    for other in range(held):
        if other != place:
            _add_card(counts, folded, chances[other])
            folded += 1
    won_before = game.tricks[seat]
    value = 0.0
    for later in range(held):
        lost = _payoff(game, seat, won_before + later)
        won = _payoff(game, seat, won_before + later + 1)
        value += counts[later] * (chance * won + (1.0 - chance) * lost)
    return value


@njit
def _fill_chances(game: Record, seat: int, unseen: tuple[int, int], chances: Float64Array) -> None:
    """Write `_later_chance` of every held card into `chances`, numbered cards first."""
    numbers = game.hand_numbers[seat]
    specials = game.hand_specials[seat]
    place = 0
    while numbers != 0:
        chances[place] = _later_chance(lowest_bit(numbers), unseen[0], unseen[1], game.num_players)
        numbers &= numbers - 1
        place += 1
    while specials != 0:
        code = NUM_NUMBERED + lowest_bit(specials)
        chances[place] = _later_chance(code, unseen[0], unseen[1], game.num_players)
        specials &= specials - 1
        place += 1


@njit
def hard_play(game: Record, seat: int, scratch: Float64Array) -> int:
    """The legal card code with the best expected points by the bot's chances; the lowest code on a tie."""
    numbers = game.hand_numbers[seat]
    specials = game.hand_specials[seat]
    legal = legal_numbers(numbers, game.lead)
    if specials == 0 and legal & (legal - 1) == 0:
        return lowest_bit(legal)  # only one card is legal
    unseen = _unseen(game, seat)
    _fill_chances(game, seat, unseen, scratch[1])
    winning_numbers, winning_specials = beating_cards(game.codes, game.played)
    best_code = -1
    best_value = -1e9
    place = 0
    while numbers != 0:
        code = lowest_bit(numbers)
        numbers &= numbers - 1
        if legal >> code & 1:
            chance = _chance_now(game, code, unseen) if winning_numbers >> code & 1 else 0.0
            value = _value_of_play(game, seat, place, chance, scratch)
            if value > best_value:
                best_code, best_value = code, value
        place += 1
    while specials != 0:
        bit = lowest_bit(specials)
        specials &= specials - 1
        code = NUM_NUMBERED + bit
        wins = winning_specials >> bit & 1
        if code == TIGRESS:
            value = _value_of_play(game, seat, place, 0.0, scratch)
            if value > best_value:
                best_code, best_value = code, value
            code = TIGRESS_PIRATE
        chance = _chance_now(game, code, unseen) if wins else 0.0
        value = _value_of_play(game, seat, place, chance, scratch)
        if value > best_value:
            best_code, best_value = code, value
        place += 1
    return best_code
