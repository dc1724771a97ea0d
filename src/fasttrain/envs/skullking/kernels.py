"""The kernels one vector step of N games consists of, called in this order: apply, advance, write.

They are apart only so that opponents' time can be told from the rest; none allocates, none calls back into Python.
Shapes: games (N,) GAME records, actions (N,) int, mix (N, num_players - 1, 4) float64 cumulative weights per seat,
weights (6,) float64, scratch (2, 12) float64.
"""

from __future__ import annotations

from typing import Any

from numba import prange

from fasttrain.envs.skullking.bots import bot_bid, bot_play
from fasttrain.envs.skullking.observation import is_legal, write_mask, write_observation
from fasttrain.envs.skullking.rules import FIRST_PLAY_ACTION, cards_dealt
from fasttrain.envs.skullking.state import (
    BIDDING,
    ENDED,
    PLAYING,
    finish_round,
    finish_trick,
    play_card,
    seed_game,
    start_game,
)
from fasttrain.envs.stream import random_unit
from fasttrain.jit import njit, njit_threads


@njit
def apply_actions(games: Any, actions: Any) -> int:
    """Apply every learner's action; if any is illegal apply none and return the index of the first, else -1."""
    for index in range(len(games)):
        if not is_legal(games[index], actions[index]):
            return index
    for index in range(len(games)):
        game = games[index]
        game.turn += 1
        if game.phase == BIDDING:
            game.bids[0] = actions[index]
        else:
            play_card(game, 0, actions[index] - FIRST_PLAY_ACTION)
    return -1


@njit
def _seat_opponents(game: Any, mix: Any) -> None:
    for seat in range(1, game.num_players):
        draw = random_unit(game)
        level = 0
        while draw >= mix[seat - 1, level]:
            level += 1
        game.levels[seat] = level


@njit
def _advance_game(game: Any, mix: Any, weights: Any, scratch: Any) -> None:
    """Play on after the learner's decision until it must decide again or the game ended."""
    num_players = game.num_players
    if game.phase == BIDDING:
        if game.turn == 1:
            _seat_opponents(game, mix)
        for seat in range(1, num_players):
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
        if seat == 0:
            return
        play_card(game, seat, bot_play(game, seat, game.levels[seat], scratch))
        seat = seat + 1 if seat + 1 < num_players else 0


@njit
def advance(games: Any, mix: Any, weights: Any, scratch: Any) -> None:
    """Let the opponents bid and play, resolve tricks, score rounds and deal, in every game."""
    for index in range(len(games)):
        _advance_game(games[index], mix[index], weights, scratch)


@njit_threads
def advance_on_threads(games: Any, mix: Any, weights: Any, scratch: Any) -> None:
    """`advance`, a part of the games for each entry of scratch (parts, 2, 12)."""
    count, parts = len(games), len(scratch)
    for part in prange(parts):
        begin, end = count * part // parts, count * (part + 1) // parts
        advance(games[begin:end], mix[begin:end], weights, scratch[part])


@njit_threads
def write_on_threads(
    games: Any,
    observations: Any,
    masks: Any,
    rewards: Any,
    terminations: Any,
    truncations: Any,
    finals: Any,
    parts: int,
) -> None:
    """`write_step` in parts."""
    count = len(games)
    for part in prange(parts):
        begin, end = count * part // parts, count * (part + 1) // parts
        write_step(
            games[begin:end],
            observations[begin:end],
            masks[begin:end],
            rewards[begin:end],
            terminations[begin:end],
            truncations[begin:end],
            finals[begin:end],
        )


@njit
def write_step(
    games: Any, observations: Any, masks: Any, rewards: Any, terminations: Any, truncations: Any, finals: Any
) -> None:
    """Write what the step brought; games that ended leave their last view in `finals` and begin anew."""
    for index in range(len(games)):
        game = games[index]
        rewards[index] = game.reward
        game.reward = 0.0
        ended = game.phase == ENDED
        terminations[index] = ended
        truncations[index] = False
        if ended:
            write_observation(game, finals[index])
            start_game(game)
        write_observation(game, observations[index])
        write_mask(game, masks[index])


@njit
def seed_games(games: Any, indices: Any, seeds: Any) -> None:
    """Begin the stream of seeds[k] (uint64) in game indices[k]."""
    for position in range(len(indices)):
        seed_game(games[indices[position]], seeds[position])


@njit
def restart_games(games: Any, indices: Any, observations: Any, masks: Any) -> None:
    """Begin a new game in every listed env and write its first view."""
    for index in indices:
        start_game(games[index])
        write_observation(games[index], observations[index])
        write_mask(games[index], masks[index])


@njit
def choose_as_bot(games: Any, level: int, actions: Any, scratch: Any) -> None:
    """Write into `actions` what a bot of `level` would do in the learner's place."""
    for index in range(len(games)):
        game = games[index]
        if game.phase == BIDDING:
            actions[index] = bot_bid(game, 0, level, scratch)
        else:
            actions[index] = FIRST_PLAY_ACTION + bot_play(game, 0, level, scratch)
