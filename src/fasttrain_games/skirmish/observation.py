"""The observation and the mask of the side that decides next. The layout is in `layout.py`."""

from __future__ import annotations

import math
from typing import Any

from fasttrain.batch import BoolArray, Float32Array, Record
from fasttrain_games.skirmish.combat import models_of
from fasttrain_games.skirmish.layout import (
    CONTROL_SCALE,
    DISTANCE_SCALE,
    GAME_WIDTH,
    LEAD_SCALE,
    MARKER_WIDTH,
    MODELS_SCALE,
    MOVE_SCALE,
    PAIR_WIDTH,
    UNIT_WIDTH,
    UNITS_START,
    VP_SCALE,
)
from fasttrain_games.skirmish.moves import choices_of, legal_stratagems
from fasttrain_games.skirmish.planner import expected_damage
from fasttrain_games.skirmish.state import (
    BRAVE,
    MAX_CP,
    MELEE,
    MOVE,
    OVER,
    OVERWATCHING,
    RANGED,
    SHOCKED,
    SMOKED,
    SPENT,
)
from fasttrain_games.skirmish.tables import distance_between, is_engaged, sees
from fasttrain_games.skirmish.turns import control_at, control_of
from fasttrain_kernels.jit import njit

NUM_MOVES = 25


@njit
def _clip(value: float) -> float:
    return min(1.0, max(-1.0, value))


@njit
def write_observation(game: Record, setup: Record, side: int, row: Float32Array) -> None:
    """Write the observation of `side` into `row` ((O,) float32)."""
    other = 1 - side
    for index in range(row.shape[0]):
        row[index] = 0.0
    row[0] = game.round / game.rounds
    if game.phase < OVER:
        row[1 + game.phase] = 1.0
    row[4] = game.first == side
    row[5] = _clip(game.vp[side] / VP_SCALE)
    row[6] = _clip(game.vp[other] / VP_SCALE)
    row[7] = _clip((game.vp[side] - game.vp[other]) / LEAD_SCALE)
    row[8] = game.cp[side] / MAX_CP
    row[9] = game.cp[other] / MAX_CP
    _write_markers(game, setup, side, row)
    own, enemies = setup.num_units[side], setup.num_units[other]
    deciding = game.cursor if setup.units_mode and game.phase < OVER else -1
    for unit in range(own):
        if game.health[side, unit] > 0:
            _write_unit(game, setup, side, unit, side, unit == deciding, row, UNITS_START + UNIT_WIDTH * unit)
    for unit in range(enemies):
        if game.health[other, unit] > 0:
            _write_unit(game, setup, other, unit, side, False, row, UNITS_START + UNIT_WIDTH * (own + unit))
    start = UNITS_START + UNIT_WIDTH * (own + enemies)
    for unit in range(own):
        if game.health[side, unit] > 0:
            for enemy in range(enemies):
                if game.health[other, enemy] > 0:
                    _write_pair(game, setup, side, unit, enemy, row, start + PAIR_WIDTH * (enemies * unit + enemy))


@njit
def _write_markers(game: Record, setup: Record, side: int, row: Float32Array) -> None:
    for number in range(setup.num_markers[game.mission]):
        marker = setup.images[game.mission, side, number]
        start = GAME_WIDTH + MARKER_WIDTH * number
        own = control_at(game, setup, side, marker)
        enemies = control_at(game, setup, 1 - side, marker)
        row[start] = 1.0
        _write_point(setup, side, setup.markers[game.mission, marker, 0], setup.markers[game.mission, marker, 1],
                     row, start + 1)  # fmt: skip
        row[start + 3] = (own > enemies) - (own < enemies)


@njit
def _write_point(setup: Record, side: int, x: int, y: int, row: Float32Array, start: int) -> None:
    """Write a point, given in half inches, as seen by `side`."""
    if side == 1:
        x, y = 2 * setup.width - x, 2 * setup.height - y
    row[start] = x / setup.width - 1.0
    row[start + 1] = y / setup.height - 1.0


@njit
def _write_unit(
    game: Record, setup: Record, side: int, unit: int, viewer: int, deciding: bool, row: Float32Array, start: int
) -> None:
    flags = game.flags[side, unit]
    row[start] = game.health[side, unit] / (setup.models[side, unit] * setup.wounds[side, unit])
    _write_point(setup, viewer, 2 * game.x[side, unit] + 1, 2 * game.y[side, unit] + 1, row, start + 1)
    row[start + 3] = is_engaged(game, setup, side, unit)
    row[start + 4] = flags & SPENT != 0
    row[start + 5] = flags & SHOCKED != 0
    row[start + 6] = flags & SMOKED != 0
    row[start + 7] = flags & OVERWATCHING != 0
    row[start + 8] = flags & BRAVE != 0
    row[start + 9] = deciding
    row[start + 10] = _clip(models_of(game, setup, side, unit) / MODELS_SCALE)
    row[start + 11] = setup.move[side, unit] / MOVE_SCALE
    row[start + 12] = _clip(setup.range[side, unit] / DISTANCE_SCALE)
    row[start + 13] = _clip(control_of(game, setup, side, unit) / CONTROL_SCALE)


@njit
def _write_pair(game: Record, setup: Record, side: int, unit: int, enemy: int, row: Float32Array, start: int) -> None:
    other = 1 - side
    own_health, enemy_health = 216 * game.health[side, unit], 216 * game.health[other, enemy]
    dealt = expected_damage(game, setup, side, unit, enemy, MELEE) / enemy_health
    taken = expected_damage(game, setup, other, enemy, unit, MELEE) / own_health
    row[start] = _clip(math.sqrt(distance_between(game, setup, side, unit, enemy)) / DISTANCE_SCALE)
    row[start + 1] = sees(game, setup, side, unit, enemy)
    row[start + 2] = expected_damage(game, setup, side, unit, enemy, RANGED) / enemy_health
    row[start + 3] = expected_damage(game, setup, other, enemy, unit, RANGED) / own_health
    row[start + 4] = dealt - taken


@njit
def find_legal(game: Record, setup: Record, side: int) -> None:
    """Store the legal actions of the deciding side in the record, where `write_mask` and `is_legal` read them."""
    for unit in range(setup.num_units[side]):
        if not setup.units_mode or unit == game.cursor:
            game.legal[unit] = choices_of(game, setup, side, unit)
    game.legal_stratagems = legal_stratagems(game, setup)


@njit
def write_mask(game: Record, setup: Record, side: int, row: BoolArray) -> None:
    """Write into `row` ((A,) bool) what `find_legal` stored, head after head. A depends on the units of side 0."""
    own = setup.num_units[side]
    num_targets = setup.num_units[1 - side] + 1
    moving = game.phase == MOVE
    if setup.units_mode:
        legal = game.legal[game.cursor]
        for index in range(NUM_MOVES):
            row[index] = moving and legal >> index & 1
        for index in range(num_targets):
            row[NUM_MOVES + index] = not moving and legal >> index & 1
        return
    start = 0
    for unit in range(own):
        legal = game.legal[unit] if moving else 1
        for index in range(NUM_MOVES):
            row[start + index] = legal >> index & 1
        start += NUM_MOVES
    for unit in range(own):
        legal = 1 if moving else game.legal[unit]
        for index in range(num_targets):
            row[start + index] = legal >> index & 1
        start += num_targets
    for index in range(5):
        row[start + index] = game.legal_stratagems >> index & 1
    start += 5
    for unit in range(own):
        row[start + unit] = game.health[side, unit] > 0 if game.legal_stratagems != 1 else unit == 0


@njit
def is_legal(game: Record, setup: Record, action: Any) -> bool:
    """Whether the deciding side may take `action` ((heads,) int), by what `find_legal` has stored."""
    side = game.active
    own = setup.num_units[side]
    moving = game.phase == MOVE
    if setup.units_mode:
        choice = action[0] if moving else action[0] - NUM_MOVES
        return bool(_has_bit(game.legal[game.cursor], choice))
    for unit in range(own):
        move, target = action[unit], action[own + unit]
        chosen, idle = (move, target) if moving else (target, move)
        if idle != 0 or not _has_bit(game.legal[unit], chosen):
            return False
    if not _has_bit(game.legal_stratagems, action[2 * own]):
        return False
    named = action[2 * own + 1]
    if game.legal_stratagems == 1:
        return bool(named == 0)
    return bool(0 <= named < own and game.health[side, named] > 0)


@njit
def _has_bit(bits: int, index: int) -> bool:
    return bool(0 <= index < 60 and bits >> index & 1)
