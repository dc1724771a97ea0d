"""A seat's view of a game as one flat float32 vector, and the mask of its legal actions.

Fixed blocks come first (constants below), then blocks with one entry per seat, then one block per opponent's card in
the current trick. Seats are relative to the viewer: 0 is the viewer itself, 1 is the seat to its left. The viewer is
the learner, or in self-play the seat that decides.
"""

from __future__ import annotations

from fasttrain.batch import BoolArray, Float32Array, Record
from fasttrain_games.skullking.rules import (
    FIRST_PLAY_ACTION,
    KIND,
    KIND_NAMES,
    MAX_PLAYERS,
    MIN_PLAYERS,
    NUM_ACTIONS,
    NUM_CARDS,
    NUM_NUMBERED,
    NUM_ROUNDS,
    NUMBER,
    RANKS,
    TIGRESS,
    TIGRESS_BIT,
    TIGRESS_PIRATE,
    cards_dealt,
    legal_numbers,
    trick_result,
)
from fasttrain_games.skullking.state import BIDDING, ENDED, PLAYING, lowest_bit
from fasttrain_kernels.jit import njit

HAND = 0  # 74: own cards
SEEN = HAND + NUM_CARDS  # 74: cards played in this round, including the current trick
LEAD = SEEN + NUM_CARDS  # 5: one-hot of the lead suit or of "no lead suit"; all zero until a card decides it
ROUND = LEAD + 5  # 10: one-hot
NEED = ROUND + NUM_ROUNDS  # 12: one-hot of the viewer's bid minus tricks: < 0, 0, 1, … 10; all zero while bidding
IS_BIDDING = NEED + NUM_ROUNDS + 2
TRICK = IS_BIDDING + 1  # tricks completed / 10
CARDS_LEFT = TRICK + 1  # own cards / 10
PLAYED = CARDS_LEFT + 1  # cards in the current trick / (players - 1)
TIGRESS_DECLARED = PLAYED + 1  # 1: as Pirate, -1: as Escape, 0: not played in this round
BONUS = TIGRESS_DECLARED + 1  # the viewer's bonus points at stake / 100, without Loot
SEATS = BONUS + 1

# Blocks with one entry per seat, in this order from column SEATS on.
SEAT_FEATURES = ("bids", "tricks", "needs", "scores", "leads", "is_winning", "alliances")
BIDS, TRICKS, NEEDS, SCORES, LEADS, IS_WINNING, ALLIANCES = range(7)
NUM_SEAT_FEATURES = len(SEAT_FEATURES)

# An opponent's card in the current trick: suit one-hot 4, rank / 14, kind one-hot 7, place in the trick / players.
CARD_RANK = 4
CARD_KIND = 5  # column of a kind: CARD_KIND + kind - 1
CARD_ORDER = CARD_KIND + len(KIND_NAMES) - 1
CARD_WIDTH = CARD_ORDER + 1

SCORE_SCALE = 1.0 / 500.0
TENTH = 0.1


def observation_width(num_players: int) -> int:
    """Entries of the observation, for example 248 with 4 players."""
    return SEATS + NUM_SEAT_FEATURES * num_players + CARD_WIDTH * (num_players - 1)


def describe_observation(num_players: int) -> dict[str, slice]:
    """Name of each block of the observation → its slice, in order and without gaps.

    `trick_card_1` is the card that the seat to the viewer's left has on the table, and so on.

    Raises:
        ValueError: num_players not in 2..8.
    """
    if not MIN_PLAYERS <= num_players <= MAX_PLAYERS:
        raise ValueError(f"num_players={num_players}: Skull King takes {MIN_PLAYERS} to {MAX_PLAYERS} players")
    starts = {
        "hand": HAND,
        "seen": SEEN,
        "lead_suit": LEAD,
        "round": ROUND,
        "need": NEED,
        "is_bidding": IS_BIDDING,
        "trick_number": TRICK,
        "cards_left": CARDS_LEFT,
        "cards_played": PLAYED,
        "tigress": TIGRESS_DECLARED,
        "bonus": BONUS,
    }
    for index, name in enumerate(SEAT_FEATURES):
        starts[name] = SEATS + index * num_players
    for seat in range(1, num_players):
        starts[f"trick_card_{seat}"] = SEATS + NUM_SEAT_FEATURES * num_players + (seat - 1) * CARD_WIDTH
    stops = [*list(starts.values())[1:], observation_width(num_players)]
    return {name: slice(start, stop) for (name, start), stop in zip(starts.items(), stops, strict=True)}


@njit
def _clip(value: float) -> float:
    return min(1.0, max(-1.0, value))


@njit
def _write_bits(row: Float32Array, start: int, bits: int) -> None:
    while bits != 0:
        row[start + lowest_bit(bits)] = 1.0
        bits &= bits - 1


@njit
def _place(seat: int, viewer: int, num_players: int) -> int:
    """The number of seats from the viewer clockwise to `seat`."""
    return seat - viewer if seat >= viewer else seat - viewer + num_players


@njit
def _write_seats(game: Record, viewer: int, row: Float32Array, num_players: int) -> None:
    seat = viewer
    for place in range(num_players):
        row[SEATS + SCORES * num_players + place] = _clip(SCORE_SCALE * game.totals[seat])
        seat = seat + 1 if seat + 1 < num_players else 0
    row[SEATS + LEADS * num_players + _place(game.leader, viewer, num_players)] = 1.0
    if game.phase == BIDDING:
        return  # bids are secret: a seat that bids later must not see bids of this round
    seat = viewer
    for place in range(num_players):
        bid = game.bids[seat]
        tricks = game.tricks[seat]
        seat = seat + 1 if seat + 1 < num_players else 0
        row[SEATS + BIDS * num_players + place] = TENTH * bid
        row[SEATS + TRICKS * num_players + place] = TENTH * tricks
        row[SEATS + NEEDS * num_players + place] = TENTH * (bid - tricks)
    for index in range(game.num_allied):
        row[SEATS + ALLIANCES * num_players + _place(game.ally_player[index], viewer, num_players)] += 0.5
        row[SEATS + ALLIANCES * num_players + _place(game.ally_winner[index], viewer, num_players)] += 0.5
    row[NEED + max(0, 1 + game.bids[viewer] - game.tricks[viewer])] = 1.0


@njit
def _write_trick(game: Record, viewer: int, row: Float32Array, num_players: int) -> None:
    if game.lead >= 0:
        row[LEAD + game.lead] = 1.0
    played = game.played
    if played == 0:
        return
    row[PLAYED] = played / (num_players - 1)
    cards = SEATS + NUM_SEAT_FEATURES * num_players
    leads = _place(game.leader, viewer, num_players)
    place = leads
    for position in range(played):
        code = game.codes[position]
        start = cards + (place - 1) * CARD_WIDTH
        place = place + 1 if place + 1 < num_players else 0
        kind = KIND[code]
        if kind == NUMBER:
            suit = code // RANKS
            row[start + suit] = 1.0
            row[start + CARD_RANK] = (code - RANKS * suit + 1) * (1.0 / RANKS)
        else:
            row[start + CARD_KIND + kind - 1] = 1.0
        row[start + CARD_ORDER] = (position + 1) / num_players
    winner, _ = trick_result(game.codes, played)
    if winner >= 0:
        place = leads + winner if leads + winner < num_players else leads + winner - num_players
        row[SEATS + IS_WINNING * num_players + place] = 1.0


@njit
def write_observation(game: Record, viewer: int, row: Float32Array) -> None:
    """Write the observation of seat `viewer` into `row` ((O,) float32). It reads only what that seat may know."""
    num_players = game.num_players
    for index in range(row.shape[0]):
        row[index] = 0.0
    _write_bits(row, HAND, game.hand_numbers[viewer])
    _write_bits(row, HAND + NUM_NUMBERED, game.hand_specials[viewer])
    _write_bits(row, SEEN, game.seen_numbers)
    _write_bits(row, SEEN + NUM_NUMBERED, game.seen_specials)
    row[ROUND + game.round - 1] = 1.0
    row[TRICK] = TENTH * game.trick
    row[BONUS] = _clip(0.01 * game.bonus[viewer])
    row[TIGRESS_DECLARED] = game.tigress
    if game.phase != ENDED:
        row[CARDS_LEFT] = TENTH * (cards_dealt(game.round, num_players) - game.trick)
    if game.phase == BIDDING:
        row[IS_BIDDING] = 1.0
    _write_seats(game, viewer, row, num_players)
    if game.phase == PLAYING:
        _write_trick(game, viewer, row, num_players)


@njit
def blank_played(row: Float32Array, num_players: int) -> None:
    """Set to zero the blocks of `row` that depend on played cards: seen, Tigress, bonus points, alliances."""
    for card in range(NUM_CARDS):
        row[SEEN + card] = 0.0
    row[TIGRESS_DECLARED] = row[BONUS] = 0.0
    for place in range(num_players):
        row[SEATS + ALLIANCES * num_players + place] = 0.0


@njit
def forget_played(game: Record, row: Float32Array) -> None:
    """With `card_memory=False`: remove played cards from `row`, except those of the current trick."""
    blank_played(row, game.num_players)
    if game.phase != PLAYING:
        return
    for position in range(game.played):
        code = game.codes[position]
        card = TIGRESS if code == TIGRESS_PIRATE else code
        row[SEEN + card] = 1.0
        if card == TIGRESS:
            row[TIGRESS_DECLARED] = 1.0 if code == TIGRESS_PIRATE else -1.0


@njit
def is_legal(game: Record, seat: int, action: int) -> bool:
    """Whether `seat`, which decides now, may take `action` (any integer) in this state."""
    if game.phase == BIDDING:
        return bool(0 <= action <= game.round)
    if game.phase != PLAYING or action < FIRST_PLAY_ACTION or action >= NUM_ACTIONS:
        return False
    code = action - FIRST_PLAY_ACTION
    if code < NUM_NUMBERED:
        return bool(legal_numbers(game.hand_numbers[seat], game.lead) >> code & 1)
    if code == TIGRESS_PIRATE:
        return bool(game.hand_specials[seat] & TIGRESS_BIT)
    return bool(game.hand_specials[seat] >> (code - NUM_NUMBERED) & 1)


@njit
def write_mask(game: Record, seat: int, row: BoolArray) -> None:
    """Write the legal actions of `seat`, which decides now, into `row` ((86,) bool)."""
    for action in range(NUM_ACTIONS):
        row[action] = False
    if game.phase == BIDDING:
        for bid in range(game.round + 1):
            row[bid] = True
        return
    numbers = legal_numbers(game.hand_numbers[seat], game.lead)
    specials = game.hand_specials[seat]
    if specials & TIGRESS_BIT:
        row[FIRST_PLAY_ACTION + TIGRESS_PIRATE] = True
    while numbers != 0:
        row[FIRST_PLAY_ACTION + lowest_bit(numbers)] = True
        numbers &= numbers - 1
    while specials != 0:
        row[FIRST_PLAY_ACTION + NUM_NUMBERED + lowest_bit(specials)] = True
        specials &= specials - 1
