"""Dice: attacks, charges and the fight phase."""

from __future__ import annotations

from typing import Any

from fasttrain.batch import Record
from fasttrain.native.batch import random_below
from fasttrain_games.skirmish.moves import STEP_X, STEP_Y, put_unit
from fasttrain_games.skirmish.state import CHARGED, MELEE, OVER, OVERWATCHING, RANGED, SHOOT, SMOKED
from fasttrain_games.skirmish.tables import distance_between, forget_groups, forget_health, is_engaged, sees
from fasttrain_kernels.jit import njit


@njit
def die(game: Record) -> Any:
    """A roll of one D6."""
    return random_below(game, 6) + 1


@njit
def models_of(game: Record, setup: Record, side: int, unit: int) -> Any:
    """The number of models of the unit that are alive."""
    wounds = setup.wounds[side, unit]
    return (game.health[side, unit] + wounds - 1) // wounds


@njit
def attack(game: Record, setup: Record, side: int, unit: int, target: int, weapon: int, only_sixes: bool) -> None:
    """A unit of `side` attacks a target of the other side: hit, wound and save rolls, and the casualties."""
    other = 1 - side
    skill = setup.skill[weapon, side, unit]
    if game.phase == SHOOT and game.flags[other, target] & SMOKED:
        skill += 1
    skill = 6 if only_sixes else min(skill, 6)  # a 6 always hits; a 1 never does, because skills begin at 2
    hits = 0
    for _ in range(setup.attacks[weapon, side, unit] * models_of(game, setup, side, unit)):
        hits += die(game) >= skill
    needed = setup.wound_roll[weapon, side, unit, target]
    wounds = 0
    for _ in range(hits):
        wounds += die(game) >= needed
    save = setup.save_roll[weapon, side, unit, target]
    per_model = setup.wounds[other, target]
    health = game.health[other, target]
    before = health
    for _ in range(wounds):
        if die(game) < save:
            front_model = (health - 1) % per_model + 1
            health -= min(setup.damage[weapon, side, unit], front_model)
            if health <= 0:
                break
    game.health[other, target] = health
    forget_health(game)
    game.margin += before - health if side == 0 else health - before
    if health <= 0:
        forget_groups(game)
        for survivor in range(setup.num_units[other]):
            if game.health[other, survivor] > 0:
                return
        game.phase = OVER


@njit
def charge(game: Record, setup: Record, side: int, unit: int, target: int) -> None:
    """A unit of the active side charges: overwatch of the target, the roll, the move."""
    other = 1 - side
    distance = distance_between(game, setup, side, unit, target)
    if game.flags[other, target] & OVERWATCHING and not is_engaged(game, setup, other, target):
        reach = setup.range[other, target]
        if distance <= reach * reach and sees(game, setup, side, unit, target):
            game.flags[other, target] &= ~OVERWATCHING
            attack(game, setup, other, target, unit, RANGED, True)
            if game.health[side, unit] <= 0:
                return
    roll = die(game) + die(game)
    if (roll + 1) * (roll + 1) < distance and game.reroll == unit:
        roll = die(game) + die(game)
    if (roll + 1) * (roll + 1) < distance:
        return
    direction = _side_of_target(game, setup, side, unit, target)
    if direction >= 0:
        sign = 1 - 2 * side
        x = game.x[other, target] + sign * STEP_X[direction]
        y = game.y[other, target] + sign * STEP_Y[direction]
        put_unit(game, setup, side, unit, x, y)
        game.flags[side, unit] |= CHARGED


@njit
def _side_of_target(game: Record, setup: Record, side: int, unit: int, target: int) -> int:
    """The direction from the target to the free cell beside it that is nearest to the unit; -1 if none is free."""
    sign = 1 - 2 * side
    best, nearest = -1, 0
    for direction in range(8):
        x = game.x[1 - side, target] + sign * STEP_X[direction]
        y = game.y[1 - side, target] + sign * STEP_Y[direction]
        if not _is_free(game, setup, x, y):
            continue
        dx, dy = x - game.x[side, unit], y - game.y[side, unit]
        distance = dx * dx + dy * dy
        if best < 0 or distance < nearest:
            best, nearest = direction, distance
    return best


@njit
def _is_free(game: Record, setup: Record, x: int, y: int) -> bool:
    if x < 0 or y < 0 or x >= setup.width or y >= setup.height or setup.blocked[game.mission, y] >> x & 1:
        return False
    for side in range(2):
        for unit in range(setup.num_units[side]):
            if game.x[side, unit] == x and game.y[side, unit] == y and game.health[side, unit] > 0:
                return False
    return True


@njit
def fight(game: Record, setup: Record) -> None:
    """Fight phase: first the active side's units that charged, then the other side, then the active side's others."""
    side = game.active
    for part in range(3):
        fighting = 1 - side if part == 1 else side
        for unit in range(setup.num_units[fighting]):
            if part != 1 and (game.flags[side, unit] & CHARGED != 0) != (part == 0):
                continue
            if game.phase != OVER and game.health[fighting, unit] > 0 and is_engaged(game, setup, fighting, unit):
                attack(game, setup, fighting, unit, _weakest(game, setup, fighting, unit), MELEE, False)


@njit
def _weakest(game: Record, setup: Record, side: int, unit: int) -> int:
    """The enemy with the least health among those within 1.5 inches of an engaged unit."""
    weakest = -1
    for enemy in range(setup.num_units[1 - side]):
        health = game.health[1 - side, enemy]
        weaker = health > 0 and (weakest < 0 or health < game.health[1 - side, weakest])
        if weaker and distance_between(game, setup, side, unit, enemy) <= 2:
            weakest = enemy
    return weakest
