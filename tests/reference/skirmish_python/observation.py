"""What the deciding side sees and may do, in plain Python; the layout is `fasttrain_games.skirmish.layout`."""

from __future__ import annotations

import math

from fasttrain_games.skirmish.layout import (
    CONTROL_SCALE,
    DISTANCE_SCALE,
    LEAD_SCALE,
    MARKER_WIDTH,
    MODELS_SCALE,
    MOVE_SCALE,
    PAIR_WIDTH,
    UNIT_WIDTH,
    VP_SCALE,
)
from fasttrain_games.skirmish.missions import MAX_MARKERS
from reference.skirmish_python.battle import Battle
from reference.skirmish_python.bots import expected_damage
from reference.skirmish_python.units import CHARGE, MAX_CP, MOVE, SHOOT, Unit, squared_distance


def observe(battle: Battle, side: int, deciding: int) -> list[float]:
    """The observation of `side`; `deciding` is the index of its unit that must decide, -1 for none."""
    values = _game(battle, side) + _markers(battle, side)
    for unit in battle.units[side]:
        values += _unit(battle, unit, side, unit.index == deciding)
    for unit in battle.units[1 - side]:
        values += _unit(battle, unit, side, False)
    for unit in battle.units[side]:
        for enemy in battle.units[1 - side]:
            values += _pair(battle, unit, enemy)
    return values


def _clip(value: float) -> float:
    return min(1.0, max(-1.0, value))


def _game(battle: Battle, side: int) -> list[float]:
    phases = [float(battle.phase == phase) for phase in (MOVE, SHOOT, CHARGE)]
    own, enemy = battle.vp[side], battle.vp[1 - side]
    lead = _clip((own - enemy) / LEAD_SCALE)
    victory_points = [_clip(own / VP_SCALE), _clip(enemy / VP_SCALE), lead]
    turn = [battle.round / battle.options.rounds, *phases, float(battle.first == side)]
    command_points = [battle.cp[side] / MAX_CP, battle.cp[1 - side] / MAX_CP]
    return [*turn, *victory_points, *command_points]


def _markers(battle: Battle, side: int) -> list[float]:
    values: list[float] = []
    for x, y in battle.markers_of(side):
        control = float(battle.controls(side, (x, y))) - float(battle.controls(1 - side, (x, y)))
        values += [1.0, *_point(battle, side, x, y), control]
    return values + [0.0] * (MARKER_WIDTH * MAX_MARKERS - len(values))


def _point(battle: Battle, side: int, x: int, y: int) -> list[float]:
    """A point in half inches as seen by `side`."""
    width, height = battle.mission.width, battle.mission.height
    if side == 1:
        x, y = 2 * width - x, 2 * height - y
    return [x / width - 1.0, y / height - 1.0]


def _unit(battle: Battle, unit: Unit, side: int, deciding: bool) -> list[float]:
    if not unit.alive:
        return [0.0] * UNIT_WIDTH
    flags = [
        battle.engaged(unit), unit.advanced or unit.fell_back, unit.shocked, unit.smokescreen, unit.overwatch,
        unit.bravery, deciding,
    ]  # fmt: skip
    return [
        unit.health / unit.sheet.health,
        *_point(battle, side, 2 * unit.x + 1, 2 * unit.y + 1),
        *(float(flag) for flag in flags),
        _clip(unit.models / MODELS_SCALE),
        unit.sheet.move / MOVE_SCALE,
        _clip(unit.sheet.ranged.range / DISTANCE_SCALE),
        _clip(unit.control / CONTROL_SCALE),
    ]


def _pair(battle: Battle, unit: Unit, enemy: Unit) -> list[float]:
    if not (unit.alive and enemy.alive):
        return [0.0] * PAIR_WIDTH
    own_health, enemy_health = 216 * unit.health, 216 * enemy.health
    dealt = expected_damage(unit, enemy, unit.sheet.melee) / enemy_health
    taken = expected_damage(enemy, unit, enemy.sheet.melee) / own_health
    return [
        _clip(math.sqrt(squared_distance(unit, enemy)) / DISTANCE_SCALE),
        float(battle.sees(unit, enemy)),
        expected_damage(unit, enemy, unit.sheet.ranged) / enemy_health,
        expected_damage(enemy, unit, enemy.sheet.ranged) / own_health,
        dealt - taken,
    ]


def legal(battle: Battle, cursor: int) -> list[bool]:
    """The mask of the deciding side, head after head; in units mode of the unit `cursor`."""
    options, side = battle.options, battle.active
    enemies = len(battle.units[1 - side])
    if options.action_mode == "units":
        mask = [False] * (25 + enemies + 1)
        shift = 0 if battle.phase == MOVE else 25
        for choice in battle.choices(battle.units[side][cursor]):
            mask[shift + choice] = True
        return mask
    moves: list[bool] = []
    targets: list[bool] = []
    for unit in battle.units[side]:
        choices = battle.choices(unit)
        moves += [index in (choices if battle.phase == MOVE else [0]) for index in range(25)]
        targets += [index in ([0] if battle.phase == MOVE else choices) for index in range(enemies + 1)]
    stratagems = battle.stratagems()
    named = [0] if len(stratagems) == 1 else [unit.index for unit in battle.living(side)]
    return [
        *moves,
        *targets,
        *(index in stratagems for index in range(5)),
        *(index in named for index in range(len(battle.units[side]))),
    ]
