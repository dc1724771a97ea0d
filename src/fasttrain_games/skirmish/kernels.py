"""The kernels of one vector step, called in this order: `apply_actions`, `advance`, `write_step`.

For games that ended, `advance` and `write_step` are called again. There are three kernels, so that the time of
opponents can be measured; each rule is in one kernel only. None allocates memory or calls back into Python. Shapes:
games (N,) GAME, setups (1,) SETUP, mix (N, 4) float64 cumulative weights, indices (K,) int64, actions (N, heads) int64.
"""

from __future__ import annotations

from typing import Any

from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, Record, Records
from fasttrain.native.batch import seed_stream
from fasttrain_games.skirmish.bots import play_phase
from fasttrain_games.skirmish.moves import choices_of
from fasttrain_games.skirmish.observation import find_legal, is_legal, write_mask, write_observation
from fasttrain_games.skirmish.options import SELF
from fasttrain_games.skirmish.state import MOVE, OVER, R_DAMAGE, R_PROGRESS, R_VP, R_WIN
from fasttrain_games.skirmish.turns import carry_out, end_phase, start_game, use_stratagem
from fasttrain_kernels.jit import njit
from fasttrain_kernels.threads import CHUNK, begin_work, claim, end_work

NUM_MOVES = 25


@njit
def apply_actions(games: Records, setups: Records, actions: Int64Array, indices: Int64Array) -> int:
    """Apply the listed games' actions; returns -1. If an action is illegal, apply none and return its game's index."""
    setup = setups[0]
    for index in indices:
        if games[index].phase >= OVER or not is_legal(games[index], setup, actions[index]):
            return int(index)
    for index in indices:
        _apply(games[index], setup, actions[index])
    return -1


@njit
def _apply(game: Record, setup: Record, action: Any) -> None:
    side = game.active
    if side == 0:
        game.since_paid += 1
    moving = game.phase == MOVE
    if setup.units_mode:
        carry_out(game, setup, side, game.cursor, action[0] if moving else action[0] - NUM_MOVES)
        game.cursor += 1
        return
    own = setup.num_units[side]
    use_stratagem(game, action[2 * own], action[2 * own + 1])
    for unit in range(own):
        carry_out(game, setup, side, unit, action[unit] if moving else action[own + unit])
    end_phase(game, setup)


@njit
def _to_decision(game: Record, setup: Record) -> None:
    """Play on until the learner or a "self" opponent must decide, or the game is over."""
    while game.phase < OVER:
        side = game.active
        if side == 0 or game.level == SELF:
            if not setup.units_mode:
                return
            while game.cursor < setup.num_units[side]:
                if choices_of(game, setup, side, game.cursor) != 1:
                    return
                game.cursor += 1
        else:
            play_phase(game, setup)
        game.cursor = 0
        end_phase(game, setup)


@njit
def _outcome(game: Record, setup: Record) -> int:
    """1: the learner won, -1: it lost, 0: a draw. Also stores the episode's results in the `result_` fields."""
    for side in range(2):
        game.result_vp[side] = game.vp[side]
        game.result_health[side] = 0
        for unit in range(setup.num_units[side]):
            game.result_health[side] += game.health[side, unit]
    game.result_round = game.round
    game.result_mission = game.mission
    if game.result_health[0] == 0:
        return -1
    if game.result_health[1] == 0:
        return 1
    return int(game.vp[0] > game.vp[1]) - int(game.vp[0] < game.vp[1])


@njit
def _settle_reward(game: Record, setup: Record) -> None:
    """Set the learner's reward since the last decision, with the secondary terms if they are due."""
    over = game.phase == OVER
    lead = game.vp[0] - game.vp[1]
    for_vp = setup.rewards[R_VP] * (lead - game.lead)
    game.lead = lead
    for_win, for_damage, for_progress = 0.0, 0.0, 0.0
    if over:
        game.result_outcome = _outcome(game, setup)
        for_win = setup.rewards[R_WIN] * game.result_outcome
    if over or game.since_paid >= setup.secondary_every:
        for_damage = setup.rewards[R_DAMAGE] * (game.margin - game.paid_margin)
        for_progress = setup.rewards[R_PROGRESS] * (game.progress - game.paid_progress)
        game.paid_margin = game.margin
        game.paid_progress = game.progress
        game.since_paid = 0
    game.reward = for_vp + for_win + for_damage + for_progress
    if setup.debug:
        game.terms[R_VP] += for_vp
        game.terms[R_WIN] += for_win
        game.terms[R_DAMAGE] += for_damage
        game.terms[R_PROGRESS] += for_progress
        if over:
            for term in range(4):
                game.result_terms[term] = game.terms[term]


@njit
def advance(
    games: Records, setups: Records, mix: Float64Array, indices: Int64Array, anew: bool, team: Int64Array, me: int
) -> None:
    """Continue each listed game, or with `anew` begin a new one, until an action is needed or the game is over.

    A free thread takes the next `CHUNK` games.
    """
    setup, count = setups[0], len(indices)
    begin_work(team, me, -(-count // CHUNK))
    piece = claim(team, me)
    while piece >= 0:
        for position in range(piece * CHUNK, min((piece + 1) * CHUNK, count)):
            index = indices[position]
            _advance_game(games[index], setup, mix[index], anew)
        piece = claim(team, me)
    end_work(team, me)


@njit
def _advance_game(game: Record, setup: Record, mix: Float64Array, anew: bool) -> None:
    """As `advance`, for one game. A new game that the opponent wins before the first decision is dealt again."""
    while True:
        if anew:
            start_game(game, setup, mix)
        _to_decision(game, setup)
        if not anew:
            _settle_reward(game, setup)
            game.ended = game.phase == OVER
        elif game.phase == OVER:
            continue
        break


@njit
def write_step(
    games: Records,
    setups: Records,
    indices: Int64Array,
    observations: Float32Array,
    masks: BoolArray,
    rewards: Float32Array,
    terminations: BoolArray,
    turns: BoolArray,
    team: Int64Array,
    me: int,
) -> None:
    """Write the results of the step, with observation and mask of the side that decides next.

    `turns` (N,) bool: True where the opponent decides next. For a game that is over it writes the learner's last
    observation; after a new game has begun, the caller calls this kernel again.
    """
    setup, count = setups[0], len(indices)
    begin_work(team, me, -(-count // CHUNK))
    piece = claim(team, me)
    while piece >= 0:
        for position in range(piece * CHUNK, min((piece + 1) * CHUNK, count)):
            index = indices[position]
            game = games[index]
            side = game.active if game.phase < OVER else 0
            rewards[index] = game.reward
            terminations[index] = game.ended != 0
            turns[index] = side == 1
            find_legal(game, setup, side)
            write_observation(game, setup, side, observations[index])
            write_mask(game, setup, side, masks[index])
        piece = claim(team, me)
    end_work(team, me)


@njit
def forget_outcomes(games: Records, indices: Int64Array) -> None:
    """Clear the results of the last step (reward, end of episode) in the listed games."""
    for index in indices:
        games[index].reward = 0.0
        games[index].ended = 0


@njit
def seed_games(games: Records, indices: Int64Array, seeds: Any) -> None:
    """Seed the random stream of game indices[k] with seeds[k] (uint64)."""
    for position in range(len(indices)):
        seed_stream(games[indices[position]], seeds[position])
