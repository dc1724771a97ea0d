"""The course of a game: its start, turns and phases, stratagems, and what units do in a phase."""

from __future__ import annotations

from typing import Any

from fasttrain.batch import Float64Array, Record
from fasttrain.native.batch import random_below, random_unit
from fasttrain_games.skirmish.combat import attack, charge, die, fight, models_of
from fasttrain_games.skirmish.moves import STEP_X, STEP_Y, marker_distance, move_reach, put_unit, steps_of_move
from fasttrain_games.skirmish.state import (
    ADVANCE,
    ADVANCED,
    BRAVE,
    BRAVERY,
    CHARGE,
    ENDS_IN_COMMAND,
    FELL_BACK,
    MAX_CP,
    MOVE,
    NO_STRATAGEM,
    OVER,
    OVERWATCH,
    OVERWATCHING,
    RANGED,
    REROLL,
    SHOCKED,
    SHOOT,
    SMOKED,
)
from fasttrain_games.skirmish.tables import forget_all, forget_flags, is_engaged
from fasttrain_kernels.jit import njit


@njit
def start_game(game: Record, setup: Record, mix: Float64Array) -> None:
    """Begin a new game, drawn from the game's random stream. `mix` (4,) are the opponents' cumulative weights."""
    draw = random_unit(game)
    level = 0
    while draw >= mix[level]:
        level += 1
    game.level = level
    mission = random_below(game, setup.num_missions)
    game.mission = game.next_mission - 1 if game.next_mission > 0 else mission
    game.rounds = game.next_rounds
    game.first = random_below(game, 2)
    for side in range(2):
        for unit in range(setup.num_units[side]):
            _deploy(game, setup, side, unit)
            game.health[side, unit] = setup.models[side, unit] * setup.wounds[side, unit]
            game.flags[side, unit] = 0
        game.cp[side] = 0
        game.vp[side] = 0
    game.round = 1
    game.phase = MOVE
    game.active = game.first
    game.cursor = 0
    game.reroll = -1
    game.margin = game.paid_margin = game.lead = game.since_paid = 0
    game.progress = game.paid_progress = 0.0
    for term in range(4):
        game.terms[term] = 0.0
    forget_all(game)
    command_phase(game, setup)


@njit
def _deploy(game: Record, setup: Record, side: int, unit: int) -> None:
    """Put a unit into a random free cell of its strip of the deployment zone."""
    count = setup.num_units[side]
    begin, end = unit * setup.width // count, (unit + 1) * setup.width // count
    rows = setup.deployment_rows[game.mission]
    free = 0
    for y in range(rows):
        for x in range(begin, end):
            free += 1 - (setup.blocked[game.mission, y] >> x & 1)
    drawn = random_below(game, free)
    for y in range(rows):
        for x in range(begin, end):
            if setup.blocked[game.mission, y] >> x & 1:
                continue
            if drawn == 0:
                game.x[side, unit] = x if side == 0 else setup.width - 1 - x
                game.y[side, unit] = y if side == 0 else setup.height - 1 - y
                return
            drawn -= 1


@njit
def control_of(game: Record, setup: Record, side: int, unit: int) -> Any:
    """How much a unit counts for control of a marker: control × models alive, 0 if shocked."""
    if game.flags[side, unit] & SHOCKED:
        return 0
    return setup.control[side, unit] * models_of(game, setup, side, unit)


@njit
def control_at(game: Record, setup: Record, side: int, marker: int) -> Any:
    """The sum of `control_of` over a side's units within 3 inches of a marker."""
    total = 0
    for unit in range(setup.num_units[side]):
        distance = marker_distance(game, setup, game.x[side, unit], game.y[side, unit], marker)
        if distance <= 36 and game.health[side, unit] > 0:
            total += control_of(game, setup, side, unit)
    return total


@njit
def is_below_half(game: Record, setup: Record, side: int, unit: int) -> bool:
    """Whether fewer than half of the unit's models are alive."""
    return bool(2 * models_of(game, setup, side, unit) < setup.models[side, unit])


@njit
def command_phase(game: Record, setup: Record) -> None:
    """Begin the turn of the active side with the command phase."""
    side = game.active
    for unit in range(setup.num_units[side]):
        game.flags[side, unit] &= ~ENDS_IN_COMMAND
    for each in range(2):
        game.cp[each] = min(MAX_CP, game.cp[each] + 1)
    if game.round > 1:
        held = 0
        for marker in range(setup.num_markers[game.mission]):
            held += control_at(game, setup, side, marker) > control_at(game, setup, 1 - side, marker)
        game.vp[side] += min(15, 5 * held)
    for unit in range(setup.num_units[side]):
        if game.health[side, unit] > 0 and is_below_half(game, setup, side, unit):
            if game.flags[side, unit] & BRAVE:
                game.flags[side, unit] &= ~BRAVE
            elif die(game) + die(game) < setup.leadership[side, unit]:
                game.flags[side, unit] |= SHOCKED
    forget_flags(game)


@njit
def use_stratagem(game: Record, stratagem: int, unit: int) -> None:
    """Pay for a stratagem of the active side and set the flag of its unit."""
    if stratagem == NO_STRATAGEM:
        return
    side = game.active
    game.cp[side] -= 1
    if stratagem == REROLL:
        game.reroll = unit
    elif stratagem == BRAVERY:
        game.flags[side, unit] |= BRAVE
    else:
        game.flags[side, unit] |= OVERWATCHING if stratagem == OVERWATCH else SMOKED


@njit
def carry_out(game: Record, setup: Record, side: int, unit: int, choice: int) -> None:
    """Carry out the choice for a unit of the active side in this phase."""
    if choice == 0 or game.health[side, unit] <= 0 or game.phase >= OVER:
        return
    if game.phase == MOVE:
        _move(game, setup, side, unit, (choice - 1) // 3, (choice - 1) % 3)
    elif game.health[1 - side, choice - 1] > 0:
        if game.phase == SHOOT:
            attack(game, setup, side, unit, choice - 1, RANGED, False)
        else:
            charge(game, setup, side, unit, choice - 1)


@njit
def _move(game: Record, setup: Record, side: int, unit: int, direction: int, length: int) -> None:
    roll = die(game) if length == ADVANCE else 0
    if is_engaged(game, setup, side, unit):
        game.flags[side, unit] |= FELL_BACK
    if length == ADVANCE:
        game.flags[side, unit] |= ADVANCED
    forget_flags(game)
    steps = steps_of_move(game, setup, side, unit, direction, move_reach(setup.move[side, unit], length, roll))
    if steps > 0:
        sign = (1 - 2 * side) * steps
        x, y = game.x[side, unit] + sign * STEP_X[direction], game.y[side, unit] + sign * STEP_Y[direction]
        put_unit(game, setup, side, unit, x, y)


@njit
def end_phase(game: Record, setup: Record) -> None:
    """Begin the active side's next phase. After the last one the units fight, and the other side's turn begins."""
    game.reroll = -1
    if game.phase >= OVER:
        return
    if game.phase != CHARGE:
        game.phase += 1
        return
    fight(game, setup)
    if game.phase == OVER:
        return
    if game.active != game.first:
        if game.round == game.rounds:
            game.phase = OVER
            return
        game.round += 1
    game.active = 1 - game.active
    game.phase = MOVE
    command_phase(game, setup)
