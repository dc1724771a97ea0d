"""The state of one game as a packed record, its random stream, dealing, and the moves that change it.

One record (about 700 bytes) holds everything of a game, so that a kernel reads few cache lines and has one argument.
Seats are 0..num_players-1 clockwise; seat 0 is the learner. Seat numbers are absolute here. At each other seat a bot
decides; at a seat with level SELF the caller does, and the game also stops before the decisions of that seat.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import Float64Array, Record, Records
from fasttrain.native.batch import random_below, seed_stream
from fasttrain_games.skullking.rules import (
    KIND,
    LEAD_NONE,
    LEAD_OPEN,
    LOOT,
    MAX_PLAYERS,
    NUM_CARDS,
    NUM_CODES,
    NUM_NUMBERED,
    NUM_ROUNDS,
    TIGRESS,
    TIGRESS_PIRATE,
    bonus_of_trick,
    cards_dealt,
    lead_after,
    score_of_bid,
    trick_result,
)
from fasttrain_kernels.jit import njit

UNSTARTED, BIDDING, PLAYING, ENDED = range(4)
MAX_PLAYS = MAX_PLAYERS * NUM_ROUNDS

# Indices into the vector of reward weights (6,) float64.
W_ROUND, W_WIN, W_BID_MADE, W_BID_ERROR, W_TRICK_WON, W_TRICK_TOWARD_BID = range(6)

GAME = np.dtype(
    [
        ("rng", "u8"),  # splitmix64 state
        ("seen_numbers", "i8"),  # cards played in this round, including the current trick
        ("seen_specials", "i8"),
        ("hand_numbers", "i8", (MAX_PLAYERS,)),
        ("hand_specials", "i8", (MAX_PLAYERS,)),
        ("reward", "f8"),  # reward of the learner since the game last stopped for an action
        ("num_players", "i4"),
        ("phase", "i4"),
        ("round", "i4"),  # 1..10
        ("dealer", "i4"),
        ("leader", "i4"),  # seat that leads (or led) the current trick
        ("seat", "i4"),  # the seat that decides next; always 0 if all others are bots
        ("played", "i4"),  # cards in the current trick
        ("trick", "i4"),  # tricks completed this round
        ("lead", "i4"),  # lead suit, LEAD_OPEN or LEAD_NONE
        ("tigress", "i4"),  # 0 not played this round, 1 as Pirate, -1 as Escape
        ("turn", "i4"),  # decisions of the learner this game
        ("bids_made", "i4"),  # rounds in which the learner made its bid
        ("num_plays", "i4"),  # valid entries of `plays`
        ("num_allied", "i4"),  # valid entries of the two arrays below
        ("ally_player", "i4", (2,)),  # seat that played Loot
        ("ally_winner", "i4", (2,)),  # seat that won that trick
        ("bids", "i4", (MAX_PLAYERS,)),  # a seat that has not bid yet has its previous round's bid
        ("tricks", "i4", (MAX_PLAYERS,)),
        ("totals", "i4", (MAX_PLAYERS,)),
        ("bonus", "i4", (MAX_PLAYERS,)),  # bonus points at stake this round, without Loot
        ("codes", "i4", (MAX_PLAYERS,)),  # the current trick in the order played
        ("levels", "i4", (MAX_PLAYERS,)),  # who decides at each seat (SEAT_NAMES), drawn at the game's first decision
        ("deck", "u1", (NUM_CARDS,)),  # in any order: a partial shuffle is uniform from every order
        ("plays", "u1", (MAX_PLAYS,)),  # codes of the last round in the order played, kept until the next bids
        ("result_totals", "i4", (MAX_PLAYERS,)),  # points per seat of the last game that ended
        ("result_bids_made", "i4"),
        ("result_turn", "i4"),
        ("last_round", "i4"),  # last round of the present game
        ("next_rounds", "i4", (2,)),  # first and last round of the next game
    ],
    align=True,
)


# Smallest and largest valid value of every field that kernels use as an index or as a loop bound.
RANGES = {
    "num_players": (2, MAX_PLAYERS), "phase": (UNSTARTED, ENDED), "round": (0, NUM_ROUNDS),
    "dealer": (0, MAX_PLAYERS - 1), "leader": (0, MAX_PLAYERS - 1), "seat": (0, MAX_PLAYERS - 1),
    "played": (0, MAX_PLAYERS), "trick": (0, NUM_ROUNDS), "lead": (LEAD_OPEN, LEAD_NONE), "tigress": (-1, 1),
    "num_plays": (0, MAX_PLAYS), "num_allied": (0, 2), "ally_player": (0, MAX_PLAYERS - 1),
    "ally_winner": (0, MAX_PLAYERS - 1), "bids": (0, NUM_ROUNDS), "tricks": (0, NUM_ROUNDS),
    "codes": (0, NUM_CODES - 1), "plays": (0, NUM_CODES - 1), "last_round": (0, NUM_ROUNDS),
    "next_rounds": (1, NUM_ROUNDS),
}  # fmt: skip


def impossible(games: Records, num_levels: int) -> str:
    """The first invalid field of records that come from a file, as a text for an error; empty if all are valid."""
    for name, (least, most) in {**RANGES, "levels": (0, num_levels - 1)}.items():
        if games[name].size and not (least <= games[name].min() and games[name].max() <= most):
            return f"{name} must lie between {least} and {most}"
    started = games["phase"] != UNSTARTED
    whole = np.sort(games["deck"][started], axis=1) == np.arange(NUM_CARDS)
    return "" if whole.all() else "a deck is no permutation of the cards"


@njit
def seed_game(game: Record, seed: int) -> None:
    """Seed the random stream with `seed` (uint64) and sort the deck. Close seeds give unlike streams."""
    seed_stream(game, seed)
    for card in range(NUM_CARDS):
        game.deck[card] = card


@njit
def count_bits(bits: int) -> int:
    """The number of set bits of a non-negative int64 (LLVM compiles this into one instruction)."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (bits * 0x0101010101010101) >> 56


@njit
def lowest_bit(bits: int) -> int:
    """Index of the lowest set bit of a positive int64."""
    return count_bits((bits & -bits) - 1)


@njit
def deal_round(game: Record) -> None:
    """Deal round `game.round` and open its bidding. Only as many cards as are dealt are shuffled."""
    num_players = np.int64(game.num_players)
    size = cards_dealt(game.round, num_players)
    deck = game.deck
    drawn = 0
    for seat in range(num_players):
        numbers = 0
        specials = 0
        for _ in range(size):
            other = drawn + random_below(game, NUM_CARDS - drawn)
            card = np.int64(deck[other])
            deck[other] = deck[drawn]
            deck[drawn] = card
            drawn += 1
            if card < NUM_NUMBERED:
                numbers |= 1 << card
            else:
                specials |= 1 << (card - NUM_NUMBERED)
        game.hand_numbers[seat] = numbers
        game.hand_specials[seat] = specials
        game.tricks[seat] = 0
        game.bonus[seat] = 0
    game.seen_numbers = 0
    game.seen_specials = 0
    game.tigress = 0
    game.num_allied = 0
    game.trick = 0
    game.played = 0
    game.lead = LEAD_OPEN
    game.leader = (game.dealer + 1) % num_players
    game.seat = 0
    game.phase = BIDDING


@njit
def start_game(game: Record) -> None:
    """Begin a new game: draw the first dealer from the game's random stream and deal the first round."""
    num_players = np.int64(game.num_players)
    game.round = game.next_rounds[0]
    game.last_round = game.next_rounds[1]
    game.turn = 0
    game.bids_made = 0
    game.reward = 0.0
    for seat in range(num_players):
        game.totals[seat] = 0
    game.dealer = random_below(game, num_players)
    deal_round(game)


@njit
def play_card(game: Record, seat: int, code: int) -> None:
    """Move a card from a hand onto the trick. The caller has checked that the card is legal."""
    card = code
    if code == TIGRESS_PIRATE:
        card = TIGRESS
        game.tigress = 1
    elif code == TIGRESS:
        game.tigress = -1
    if card < NUM_NUMBERED:
        bit = 1 << card
        game.hand_numbers[seat] ^= bit
        game.seen_numbers |= bit
    else:
        bit = 1 << (card - NUM_NUMBERED)
        game.hand_specials[seat] ^= bit
        game.seen_specials |= bit
    game.lead = lead_after(game.lead, code, game.played)
    game.codes[game.played] = code
    game.plays[game.num_plays] = code
    game.played += 1
    game.num_plays += 1


@njit
def finish_trick(game: Record, weights: Float64Array) -> None:
    """Evaluate a full trick: tricks won, bonuses, alliances, next leader, the learner's shaping terms."""
    num_players = np.int64(game.num_players)
    winner, next_leader = trick_result(game.codes, num_players)
    leader = game.leader
    if winner >= 0:
        seat = (leader + winner) % num_players
        game.tricks[seat] += 1
        game.bonus[seat] += bonus_of_trick(game.codes, num_players, winner)
        for position in range(num_players):
            if position != winner and KIND[game.codes[position]] == LOOT:
                game.ally_player[game.num_allied] = (leader + position) % num_players
                game.ally_winner[game.num_allied] = seat
                game.num_allied += 1
        if seat == 0:
            sign = 1.0 if game.tricks[0] <= game.bids[0] else -1.0
            game.reward += weights[W_TRICK_WON] + sign * weights[W_TRICK_TOWARD_BID]
    game.leader = (leader + next_leader) % num_players
    game.trick += 1
    game.played = 0
    game.lead = LEAD_OPEN


@njit
def _round_score(game: Record, seat: int) -> Any:
    score = score_of_bid(game.bids[seat], game.tricks[seat], game.round)
    if game.bids[seat] != game.tricks[seat]:
        return score
    score += game.bonus[seat]
    for index in range(game.num_allied):
        player = game.ally_player[index]
        winner = game.ally_winner[index]
        partner = winner if seat == player else player
        if seat in (player, winner) and game.bids[partner] == game.tricks[partner]:
            score += 20
    return score


@njit
def finish_round(game: Record, weights: Float64Array) -> None:
    """Score a round, reward the learner, then deal the next round or end the game."""
    num_players = np.int64(game.num_players)
    for seat in range(num_players):
        score = _round_score(game, seat)
        game.totals[seat] += score
        if seat == 0:
            game.reward += weights[W_ROUND] * score
    miss = abs(game.bids[0] - game.tricks[0])
    if miss == 0:
        game.bids_made += 1
        game.reward += weights[W_BID_MADE]
    game.reward -= weights[W_BID_ERROR] * miss
    if game.round < game.last_round:
        game.round += 1
        game.dealer = (game.dealer + 1) % num_players
        deal_round(game)
        return
    game.phase = ENDED
    game.seat = 0
    best = game.totals[0]
    for seat in range(num_players):
        best = max(best, game.totals[seat])
        game.result_totals[seat] = game.totals[seat]
    game.result_bids_made = game.bids_made
    game.result_turn = game.turn
    game.reward += weights[W_WIN] if game.totals[0] == best else -weights[W_WIN]
