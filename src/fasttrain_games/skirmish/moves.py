"""Legal moves and choices of units, and the move of a unit to another cell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import Record
from fasttrain_games.skirmish.sheets import SHEET_LIMITS
from fasttrain_games.skirmish.state import CHARGE, CHARGE_RANGE, FULL, HALF, MOVE, OVER, REROLL, SHOOT, SPENT
from fasttrain_games.skirmish.tables import distance_between, forget_place_of, is_engaged, shooting_targets
from fasttrain_kernels.jit import njit

# N, NE, E, SE, S, SW, W, NW. N points towards the opponent of the side that moves.
STEP_X = np.array([0, 1, 1, 1, 0, -1, -1, -1])
STEP_Y = np.array([1, 1, 0, -1, -1, -1, 0, 1])
MAX_REACH = 2 * (SHEET_LIMITS["move"][1] + 6)
# Index: a distance in half inches. Value: number of diagonal steps within it, because 8 × steps² ≤ half inches².
DIAGONAL_STEPS = np.array([math.isqrt(reach * reach // 8) for reach in range(MAX_REACH + 1)])
for _table in (STEP_X, STEP_Y, DIAGONAL_STEPS):
    _table.flags.writeable = False


@njit
def steps_within(direction: int, half_inches: int) -> Any:
    """The number of cells along a direction within a distance in half inches."""
    return DIAGONAL_STEPS[half_inches] if direction & 1 else half_inches >> 1


@njit
def may_end_at(game: Record, setup: Record, side: int, x: int, y: int) -> bool:
    """Whether a unit of `side` may end a move in a cell."""
    if x < 0 or y < 0 or x >= setup.width or y >= setup.height or setup.blocked[game.mission, y] >> x & 1:
        return False
    for friend in range(setup.num_units[side]):
        if game.x[side, friend] == x and game.y[side, friend] == y and game.health[side, friend] > 0:
            return False
    for enemy in range(setup.num_units[1 - side]):
        dx = game.x[1 - side, enemy] - x
        dy = game.y[1 - side, enemy] - y
        if dx * dx + dy * dy <= 1 and game.health[1 - side, enemy] > 0:
            return False
    return True


@njit
def steps_of_move(game: Record, setup: Record, side: int, unit: int, direction: int, half_inches: int) -> Any:
    """How many cells a unit can move along a direction within a distance in half inches; 0 if no cell is free."""
    sign = 1 - 2 * side
    dx, dy = sign * STEP_X[direction], sign * STEP_Y[direction]
    x, y = game.x[side, unit], game.y[side, unit]
    for step in range(steps_within(direction, half_inches), 0, -1):
        if may_end_at(game, setup, side, x + step * dx, y + step * dy):
            return step
    return 0


@njit
def _move_choices(game: Record, setup: Record, side: int, unit: int) -> int:
    """Legal moves as bits. A move may be shortened, so it is legal if any cell on its way is free."""
    sign = 1 - 2 * side
    move = setup.move[side, unit]
    x, y = game.x[side, unit], game.y[side, unit]
    choices = 1
    for direction in range(8):
        dx, dy = sign * STEP_X[direction], sign * STEP_Y[direction]
        for step in range(1, steps_within(direction, 2 * move + 2) + 1):
            if may_end_at(game, setup, side, x + step * dx, y + step * dy):
                lengths = 4
                if step <= steps_within(direction, 2 * move):
                    lengths = 7 if step <= steps_within(direction, move) else 6
                choices |= lengths << (1 + 3 * direction)
                break
    return choices


@njit
def charge_targets(game: Record, setup: Record, side: int, unit: int) -> int:
    """Enemies that a living unit may charge, as bits."""
    if game.flags[side, unit] & SPENT or is_engaged(game, setup, side, unit):
        return 0
    targets = 0
    for enemy in range(setup.num_units[1 - side]):
        distance = distance_between(game, setup, side, unit, enemy)
        if distance <= CHARGE_RANGE * CHARGE_RANGE and game.health[1 - side, enemy] > 0:
            targets |= 1 << enemy
    return targets


@njit
def choices_of(game: Record, setup: Record, side: int, unit: int) -> Any:
    """Legal choices of a unit of the active side in this phase, as bits."""
    if game.health[side, unit] <= 0 or game.phase >= OVER:
        return 1
    if game.phase == MOVE:
        return _move_choices(game, setup, side, unit)
    if game.phase == SHOOT:
        return 1 | shooting_targets(game, setup, side, unit) << 1
    return 1 | charge_targets(game, setup, side, unit) << 1


@njit
def legal_stratagems(game: Record, setup: Record) -> int:
    """Legal stratagems of the active side in this phase, as bits."""
    side = game.active
    if game.phase >= OVER or setup.units_mode or game.cp[side] < 1:
        return 1
    legal = 0b11101
    if game.phase == CHARGE:
        for unit in range(setup.num_units[side]):
            if choices_of(game, setup, side, unit) != 1:
                return legal | 1 << REROLL
    return legal


@njit
def inches_to_marker(game: Record, setup: Record, side: int, unit: int) -> float:
    """The distance in inches from a unit to its nearest marker."""
    nearest = 1 << 30
    for marker in range(setup.num_markers[game.mission]):
        nearest = min(nearest, marker_distance(game, setup, game.x[side, unit], game.y[side, unit], marker))
    return math.sqrt(nearest) * 0.5


@njit
def marker_distance(game: Record, setup: Record, x: int, y: int, marker: int) -> Any:
    """The squared distance, in half inches, from a cell to a marker."""
    dx = 2 * x + 1 - setup.markers[game.mission, marker, 0]
    dy = 2 * y + 1 - setup.markers[game.mission, marker, 1]
    return dx * dx + dy * dy


@njit
def put_unit(game: Record, setup: Record, side: int, unit: int, x: int, y: int) -> None:
    """Move a unit to another cell and invalidate the cached values about its place."""
    counts = setup.counts_progress and side == 0
    before = inches_to_marker(game, setup, side, unit) if counts else 0.0
    game.x[side, unit] = x
    game.y[side, unit] = y
    if counts:
        game.progress += before - inches_to_marker(game, setup, side, unit)
    forget_place_of(game, side, unit)


@njit
def move_reach(move: int, length: int, roll: int) -> int:
    """The length of a move in half inches: half of the unit's move, all of it, or all of it plus `roll` (a D6)."""
    if length == HALF:
        return move
    return 2 * move if length == FULL else 2 * (move + roll)
