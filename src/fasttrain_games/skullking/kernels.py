"""The kernels of one step, called in this order: `apply_actions`, `advance`, `write_step`.

There are three kernels, so that the time of opponents can be measured. None allocates memory or calls back into Python.
Shapes: games (N,) GAME records, indices (M,) int64 of the games to step, each once, actions (N,) int, mix (N,
num_players - 1, 5) float64 cumulative weights per seat, weights (6,) float64, scratch (2, 12) float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, Record, Records
from fasttrain.native.batch import random_unit
from fasttrain_games.skullking.bots import SELF, bot_bid, bot_play
from fasttrain_games.skullking.observation import (
    blank_played,
    forget_played,
    is_legal,
    write_mask,
    write_observation,
)
from fasttrain_games.skullking.rules import FIRST_PLAY_ACTION, cards_dealt
from fasttrain_games.skullking.state import (
    BIDDING,
    ENDED,
    PLAYING,
    finish_round,
    finish_trick,
    play_card,
    seed_game,
    start_game,
)
from fasttrain_kernels.jit import njit, njit_inline
from fasttrain_kernels.threads import CHUNK, begin_work, claim, end_work


@njit
def apply_actions(games: Records, indices: Int64Array, actions: Int64Array) -> int:
    """Apply the action of the seat that decides in every listed game and return -1. If an action is illegal, apply none
    and return the index of the first such game.

    With unsigned indices, here and in `write_step`, numba does not check for negative ones: 0.8 µs less per 256 games.
    """
    for position in range(len(indices)):
        index = np.uint64(indices[position])
        game = games[index]
        if not is_legal(game, game.seat, actions[index]):
            return int(indices[position])
    for position in range(len(indices)):
        index = np.uint64(indices[position])
        game = games[index]
        seat = game.seat
        if seat == 0:
            game.turn += 1
        if game.phase == BIDDING:
            game.bids[seat] = actions[index]
        else:
            play_card(game, seat, actions[index] - FIRST_PLAY_ACTION)
    return -1


@njit
def _seat_opponents(game: Record, mix: Float64Array) -> None:
    for seat in range(1, game.num_players):
        draw = random_unit(game)
        level = 0
        while draw >= mix[seat - 1, level]:
            level += 1
        game.levels[seat] = level


@njit_inline
def _advance_game(game: Record, mix: Float64Array, weights: Float64Array, scratch: Float64Array) -> None:
    """Play on until the learner or a "self" seat must decide (`game.seat` is its number) or the game has ended."""
    num_players = game.num_players
    if game.phase == BIDDING:
        if game.turn == 1 and game.seat == 0:
            _seat_opponents(game, mix)
        for seat in range(game.seat + 1, num_players):
            if game.levels[seat] == SELF:
                game.seat = seat
                return
            game.bids[seat] = bot_bid(game, seat, game.levels[seat], scratch)
        game.num_plays = 0
        game.phase = PLAYING
    size = cards_dealt(game.round, num_players)
    seat = (game.leader + game.played) % num_players
    while True:
        if game.played == num_players:
            finish_trick(game, weights)
            if game.trick == size:
                finish_round(game, weights)
                return
            seat = game.leader
        if seat == 0 or game.levels[seat] == SELF:
            game.seat = seat
            return
        play_card(game, seat, bot_play(game, seat, game.levels[seat], scratch))
        seat = seat + 1 if seat + 1 < num_players else 0


@njit
def advance(
    games: Records,
    indices: Int64Array,
    mix: Float64Array,
    weights: Float64Array,
    scratch: Float64Array,
    team: Int64Array,
    me: int,
) -> None:
    """Let the bots bid and play, resolve tricks, score rounds and deal, in every listed game.

    scratch (threads, 2, 12); a free thread takes the next `CHUNK` games.
    """
    own, count = scratch[me], len(indices)
    begin_work(team, me, -(-count // CHUNK))
    piece = claim(team, me)
    while piece >= 0:
        for position in range(piece * CHUNK, min((piece + 1) * CHUNK, count)):
            index = indices[position]
            _advance_game(games[index], mix[index], weights, own)
        piece = claim(team, me)
    end_work(team, me)


@njit
def write_step(
    games: Records,
    indices: Int64Array,
    observations: Float32Array,
    masks: BoolArray,
    rewards: Float32Array,
    terminations: BoolArray,
    truncations: BoolArray,
    finals: Float32Array,
    turns: BoolArray,
    team: Int64Array,
    me: int,
) -> None:
    """Write the results of the step; observation and mask are those of the seat that decides next. A game that ended
    writes the learner's last observation to `finals` and starts again. `turns` (N,): True where an opponent decides."""
    count = len(indices)
    begin_work(team, me, -(-count // CHUNK))
    piece = claim(team, me)
    while piece >= 0:
        for position in range(piece * CHUNK, min((piece + 1) * CHUNK, count)):
            index = np.uint64(indices[position])
            game = games[index]
            rewards[index] = game.reward
            game.reward = 0.0
            ended = game.phase == ENDED
            terminations[index] = ended
            truncations[index] = False
            if ended:
                write_observation(game, 0, finals[index])
                start_game(game)
            turns[index] = game.seat != 0
            write_observation(game, game.seat, observations[index])
            write_mask(game, game.seat, masks[index])
        piece = claim(team, me)
    end_work(team, me)


@njit
def seed_games(games: Records, indices: Int64Array, seeds: Any) -> None:
    """Seed the random stream of game indices[k] with seeds[k] (uint64)."""
    for position in range(len(indices)):
        seed_game(games[indices[position]], seeds[position])


@njit
def restart_games(
    games: Records, indices: Int64Array, observations: Float32Array, masks: BoolArray, turns: BoolArray
) -> None:
    """Begin a new game in every listed env and write the learner's observation and mask: the learner bids first."""
    for index in indices:
        game = games[index]
        start_game(game)
        turns[index] = False
        write_observation(game, 0, observations[index])
        write_mask(game, 0, masks[index])


@njit
def forget_played_cards(
    games: Records, indices: Int64Array, observations: Float32Array, terminations: BoolArray, finals: Float32Array
) -> None:
    """With `card_memory=False`: remove played cards of earlier tricks from the observations that were just written."""
    for index in indices:
        game = games[index]
        forget_played(game, observations[index])
        if terminations[index]:
            blank_played(finals[index], game.num_players)


@njit
def choose_as_bot(games: Records, indices: Int64Array, level: int, actions: Int64Array, scratch: Float64Array) -> None:
    """Write into actions[k] the action of a bot of `level` for the seat that decides in game indices[k]."""
    for position in range(len(indices)):
        game = games[indices[position]]
        if game.phase == BIDDING:
            actions[position] = bot_bid(game, game.seat, level, scratch)
        else:
            actions[position] = FIRST_PLAY_ACTION + bot_play(game, game.seat, level, scratch)
