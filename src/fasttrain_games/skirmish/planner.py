"""The opponent `planner`: scores every cell that any move of a unit can reach. It is the best bot, and the slowest.

Scores are integers in 1/216 wounds. `tests/reference/skirmish_python/bots.py` has the same bot in plain Python.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import Record
from fasttrain_games.skirmish.combat import models_of
from fasttrain_games.skirmish.moves import (
    STEP_X,
    STEP_Y,
    charge_targets,
    marker_distance,
    move_reach,
    steps_of_move,
)
from fasttrain_games.skirmish.sheets import MAX_UNITS
from fasttrain_games.skirmish.state import ADVANCE, MELEE, OVERWATCHING, RANGED
from fasttrain_games.skirmish.tables import distance_between, is_engaged, line_of_sight
from fasttrain_games.skirmish.turns import control_at, control_of
from fasttrain_kernels.jit import njit

GREEDY_CHARGE = 9  # inches within which the bots expect a charge to succeed
TAKES_MARKER, CONTESTS_MARKER, ON_MARKER, PER_HALF_INCH = 3000, 800, 100, 60
WAYS_TO_CHARGE = np.array([36, 36, 36, 35, 33, 30, 26, 21, 15, 10, 6, 3])  # [n]: how many of 36 rolls (2D6) are ≥ n
WAYS_TO_CHARGE.flags.writeable = False


@njit
def expected_damage(game: Record, setup: Record, side: int, unit: int, target: int, weapon: int) -> Any:
    """Mean damage of an attack in 1/216 wounds, at most the target's health. Smokescreens are ignored."""
    mean = setup.expected[weapon, side, unit, target] * models_of(game, setup, side, unit)
    return min(mean, 216 * game.health[1 - side, target])


@njit
def melee_margin(game: Record, setup: Record, side: int, unit: int, target: int) -> Any:
    """Expected damage dealt minus expected damage taken in one round of melee, in 1/216 wounds."""
    dealt = expected_damage(game, setup, side, unit, target, MELEE)
    return dealt - expected_damage(game, setup, 1 - side, target, unit, MELEE)


@njit
def planner_charge(game: Record, setup: Record, side: int, unit: int) -> int:
    """The target with the highest margin × chance that the charge succeeds (halved if the target is on overwatch)."""
    targets = charge_targets(game, setup, side, unit)
    best, most = 0, 0
    for target in range(setup.num_units[1 - side]):
        if not targets >> target & 1:
            continue
        needed = 0
        while (needed + 1) * (needed + 1) < distance_between(game, setup, side, unit, target):
            needed += 1
        margin = melee_margin(game, setup, side, unit, target) * WAYS_TO_CHARGE[needed]
        if game.flags[1 - side, target] & OVERWATCHING:
            margin //= 2
        if margin > most:
            best, most = 1 + target, margin
    return best


@njit
def fill_plan(game: Record, setup: Record, side: int, unit: int) -> None:
    """Compute the values for `_score_cell` that are the same for all cells, once per unit."""
    key = 1 + MAX_UNITS * side + unit
    if game.plan_known == key:
        return
    own = control_of(game, setup, side, unit)
    for marker in range(setup.num_markers[game.mission]):
        friends = control_at(game, setup, side, marker)
        if marker_distance(game, setup, game.x[side, unit], game.y[side, unit], marker) <= 36:
            friends -= own
        game.plan_friends[marker] = friends
        game.plan_enemies[marker] = control_at(game, setup, 1 - side, marker)
    for enemy in range(setup.num_units[1 - side]):
        game.plan_shot[enemy] = expected_damage(game, setup, side, unit, enemy, RANGED)
        game.plan_threat[enemy] = expected_damage(game, setup, 1 - side, enemy, unit, RANGED)
        game.plan_melee[enemy] = melee_margin(game, setup, side, unit, enemy)
    if setup.cache:
        game.plan_known = key


@njit
def planner_move(game: Record, setup: Record, side: int, unit: int) -> int:
    """The move to the cell with the best score. For an advance: the mean score over the six rolls of the unit's die."""
    engaged = is_engaged(game, setup, side, unit)
    x, y = game.x[side, unit], game.y[side, unit]
    best, most = 0, 6 * _score_cell(game, setup, side, unit, x, y, not engaged)
    sign = 1 - 2 * side
    for direction in range(8):
        for length in range(3):
            rolls = 6 if length == ADVANCE else 1
            free = length != ADVANCE and not engaged
            total = 0
            steps = 0
            for roll in range(1, rolls + 1):
                reach = move_reach(setup.move[side, unit], length, roll)
                steps = sign * steps_of_move(game, setup, side, unit, direction, reach)
                if steps == 0:
                    break
                cell_x, cell_y = x + steps * STEP_X[direction], y + steps * STEP_Y[direction]
                total += _score_cell(game, setup, side, unit, cell_x, cell_y, free) * (6 // rolls)
            if steps != 0 and total > most:
                best, most = 1 + 3 * direction + length, total
    return best


@njit
def _score_cell(game: Record, setup: Record, side: int, unit: int, x: int, y: int, free: bool) -> int:
    """The score of the cell (x, y) for a unit. `free`: the unit may shoot and charge from there."""
    fill_plan(game, setup, side, unit)
    score = _score_markers(game, setup, side, unit, x, y)
    best_shot, best_charge, threat = 0, 0, 0
    own_reach = setup.range[side, unit] * setup.range[side, unit]
    for enemy in range(setup.num_units[1 - side]):
        if game.health[1 - side, enemy] <= 0:
            continue
        enemy_x, enemy_y = game.x[1 - side, enemy], game.y[1 - side, enemy]
        distance = (x - enemy_x) * (x - enemy_x) + (y - enemy_y) * (y - enemy_y)
        reach = setup.range[1 - side, enemy] * setup.range[1 - side, enemy]
        useful = free and distance <= own_reach and game.plan_shot[enemy] > best_shot
        if (useful or distance <= reach) and line_of_sight(game, setup, x, y, enemy_x, enemy_y):
            if useful:
                best_shot = game.plan_shot[enemy]
            if distance <= reach:
                threat += game.plan_threat[enemy]
        margin = game.plan_melee[enemy]
        if distance <= GREEDY_CHARGE * GREEDY_CHARGE:
            best_charge = max(best_charge, margin)
        charge_reach = setup.move[1 - side, enemy] + GREEDY_CHARGE
        if distance <= charge_reach * charge_reach and margin < 0:
            threat -= margin // 2
    if free:
        score += best_shot + best_charge // 2
    return score - threat // 2


@njit
def _score_markers(game: Record, setup: Record, side: int, unit: int, x: int, y: int) -> int:
    """Score of markers that the unit takes or contests at (x, y), minus the distance to the nearest its side lacks."""
    score, nearest = 0, -1
    own = control_of(game, setup, side, unit)
    for marker in range(setup.num_markers[game.mission]):
        friends, enemies = game.plan_friends[marker], game.plan_enemies[marker]
        distance = marker_distance(game, setup, x, y, marker)
        if distance <= 36:
            if friends > enemies:
                score += ON_MARKER
            else:
                score += TAKES_MARKER if friends + own > enemies else CONTESTS_MARKER
        if friends <= enemies and (nearest < 0 or distance < nearest):
            nearest = distance
    # The integer part of the square root of an integer below 2^50 is exact in float64.
    return score - PER_HALF_INCH * int(math.sqrt(nearest)) if nearest >= 0 else score
