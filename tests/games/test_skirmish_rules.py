"""The plain rules of Skirmish against numbers worked out by hand: dice, lines of sight, moves, phases, stratagems."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain_games.skirmish.options import make_options
from fasttrain_games.skirmish.sheets import Sheet, Weapon
from fasttrain_games.skirmish.state import save_roll_needed, wound_roll_needed
from reference.skirmish_python import units as plain
from reference.skirmish_python.battle import Battle
from reference.skirmish_python.stream import Stream
from reference.skirmish_python.units import CHARGE, OVER, SHOOT

# Markers at (10, 10) and, turned, (30, 30) and at the centre; one block of terrain and its image.
MISSION = {"board": [40, 40], "deployment_rows": 6, "markers": [[20, 20], [10, 10]], "terrain": [[14, 10, 4, 2]]}
STAY, REROLL, OVERWATCH, SMOKESCREEN, BRAVERY = range(5)


class Dice(Stream):
    """Rolls what it is told to, then fails."""

    def __init__(self) -> None:
        super().__init__(0)
        self.rolls: list[int] | None = None

    def die(self) -> int:
        if self.rolls is None:
            return super().die()
        return self.rolls.pop(0)


def begin(**options: Any) -> tuple[Battle, Dice]:
    """A battle whose units stand far from everything: side 0 along y = 0, side 1 along y = 39, side 0 to move."""
    dice = Dice()
    options = {"mission": MISSION, "width": 40, "height": 40, "opponent": "random", **options}
    battle = Battle(make_options(**options), dice)
    battle.first = battle.active = 0
    battle.cp = [1, 1]
    for side in battle.units:
        for unit in side:
            unit.x, unit.y = 1 + 4 * unit.index, 39 * unit.side
    dice.rolls = []
    return battle, dice


def duel(**options: Any) -> tuple[Battle, Dice, Any, Any]:
    """Champions (5 models of 3 wounds, T5, save 3+, 5++) on both sides; shooting hits on 3+, S5, AP1, damage 1."""
    battle, dice = begin(roster="duel", enemy_roster="duel", **options)
    return battle, dice, battle.units[0][0], battle.units[1][0]


def place(unit: Any, x: int, y: int, **values: Any) -> None:
    unit.x, unit.y = x, y
    for name, value in values.items():
        setattr(unit, name, value)


@pytest.mark.parametrize(
    ("strength", "toughness", "needed"),
    [(8, 4, 2), (9, 4, 2), (5, 4, 3), (7, 4, 3), (4, 4, 4), (3, 4, 5), (2, 4, 6), (1, 4, 6), (3, 5, 5), (2, 5, 6)],
)
def test_wound_roll(strength: int, toughness: int, needed: int) -> None:
    assert plain.wound_roll_needed(strength, toughness) == needed
    assert wound_roll_needed(strength, toughness) == needed


@pytest.mark.parametrize(
    ("save", "invulnerable", "ap", "needed"), [(3, 0, 0, 3), (3, 0, 2, 5), (3, 5, 3, 5), (5, 4, 0, 4), (6, 0, 2, 8)]
)
def test_save_roll(save: int, invulnerable: int, ap: int, needed: int) -> None:
    weapon = Weapon(12, 1, 3, 4, ap, 1)
    sheet = Sheet("x", 1, 1, 6, 4, save, invulnerable, 7, 1, weapon, weapon)
    assert plain.save_roll_needed(sheet, weapon) == needed
    assert save_roll_needed(sheet, weapon) == needed


def test_an_attack_rolls_hits_then_wounds_then_saves() -> None:
    battle, dice, unit, target = duel()
    unit.health = 4  # 2 models: 4 shots
    battle.phase = SHOOT
    dice.rolls = [1, 2, 3, 6, 3, 4, 3]  # 3+: two hits; S5 on T5 4+: one wound; save 3 + 1 = 4+: fails
    battle.attack(unit, target, unit.sheet.ranged)
    assert dice.rolls == []
    assert target.health == 14
    assert (battle.dealt, battle.taken) == (1, 0)


def test_excess_damage_on_a_model_is_lost() -> None:
    battle, dice, unit, target = duel()
    unit.health = 1  # 1 model: 4 blows of S6, AP2, damage 2
    dice.rolls = [3, 4, 5, 6, 3, 3, 3, 3, 4, 4, 5, 4]  # save min(3 + 2, 5++) = 5+: three fail
    battle.attack(unit, target, unit.sheet.melee)
    assert target.health == 15 - 3 - 2, "2 and 1 on the first model, 2 on the next"
    assert target.models == 4


@pytest.mark.parametrize(
    ("a", "b", "clear"),
    [
        ((10, 10), (25, 10), False),  # through the block of columns 14 to 17, rows 10 and 11
        ((10, 9), (25, 9), True),  # along its lower edge
        ((12, 8), (13, 30), True),
        ((12, 8), (20, 12), False),
        ((12, 11), (15, 13), True),  # past its corner at (14, 12): at x = 14 the line is at 12.5
        ((11, 9), (14, 12), True),  # exactly through that corner: (11.5, 9.5) to (14.5, 12.5) meets (14, 12)
        ((11, 9), (15, 12), False),
        ((15, 2), (15, 9), True),  # ends before it
    ],
)
def test_line_of_sight(a: tuple[int, int], b: tuple[int, int], clear: bool) -> None:
    battle, _, _, _ = duel()
    assert battle.sight(*a, *b) is clear
    assert battle.sight(*b, *a) is clear
    turned = [(39 - x, 39 - y) for x, y in (a, b)]
    assert battle.sight(*turned[0], *turned[1]) is clear, "the image of the block"


def test_moves_end_on_the_farthest_cell() -> None:
    battle, dice, unit, _ = duel()
    place(unit, 20, 5)
    assert battle.end_of_move(unit, 0, 7) == (20, 8), "half of 7 inches: 3.5"
    assert battle.end_of_move(unit, 1, 7) == (22, 7), "2 × 1.41 = 2.83, 3 × 1.41 = 4.24"
    assert battle.end_of_move(unit, 1, 14) == (24, 9), "4 × 1.41 = 5.66, 5 × 1.41 = 7.07"
    battle.carry_out(unit, 1 + 3 * 2 + 1)  # full move east
    assert (unit.x, unit.y) == (27, 5)
    dice.rolls = [4]
    battle.carry_out(unit, 1 + 3 * 6 + 2)  # advance west
    assert (unit.x, unit.advanced, unit.fell_back) == (16, True, False)
    assert battle.shooting_targets(unit) == battle.charge_targets(unit) == []


def test_moves_stop_short_of_what_is_in_the_way() -> None:
    battle, _, unit, enemy = duel()
    place(unit, 16, 5)
    assert battle.end_of_move(unit, 0, 14) == (16, 12), "over the terrain of rows 10 and 11"
    assert battle.end_of_move(unit, 0, 12) == (16, 9), "not into it"
    place(enemy, 20, 6)
    assert battle.end_of_move(unit, 2, 8) == (19, 5), "diagonal to the enemy: 1.41 inches"
    assert battle.end_of_move(unit, 2, 10) == (21, 5), "past it"
    place(enemy, 20, 5)
    assert battle.end_of_move(unit, 2, 10) == (18, 5), "not within 1 inch, not through it into (21, 5)"
    assert battle.end_of_move(unit, 4, 14) == (16, 0), "the edge"
    place(unit, 0, 0)
    assert battle.end_of_move(unit, 5, 14) is None
    assert 1 + 3 * 5 not in battle.choices(unit)


@pytest.mark.parametrize(
    ("dx", "dy", "roll", "reached"),
    [(8, 0, 7, True), (8, 0, 6, False), (5, 5, 7, True), (5, 5, 6, False), (12, 0, 11, True), (12, 0, 10, False)],
)
def test_charge_rolls(dx: int, dy: int, roll: int, reached: bool) -> None:
    battle, dice, unit, enemy = duel()
    battle.phase = CHARGE
    place(unit, 20, 20)
    place(enemy, 20 + dx, 20 + dy)
    assert battle.choices(unit) == [0, 1]
    dice.rolls = [6, roll - 6] if roll > 6 else [1, roll - 1]
    battle.carry_out(unit, 1)
    assert unit.charged is reached
    assert battle.engaged(unit) is reached
    if reached:
        assert (unit.x, unit.y) == (19 + dx, 19 + dy if dy else 20), "the nearest cell beside the target"


def test_markers_go_to_the_side_with_more_control() -> None:
    battle, _ = begin()
    marker = battle.mission.markers[1]
    assert marker == (20, 20), "in half inches: the point (10, 10)"
    rifles, veterans, _ = battle.units[0]
    enemy = battle.units[1][0]
    place(rifles, 10, 12)  # its centre is at (10.5, 12.5): 2.55 inches away
    assert battle.control_at(0, marker) == 20
    assert battle.controls(0, marker)
    place(enemy, 7, 10)
    assert battle.control_at(1, marker) == 20, "(7.5, 10.5): 2.55 inches"
    assert not battle.controls(0, marker), "equal"
    assert not battle.controls(1, marker)
    place(veterans, 12, 12)  # (12.5, 12.5): 3.54 inches
    assert not battle.controls(0, marker)
    veterans.y = 11  # (12.5, 11.5): 2.92 inches
    assert battle.control_at(0, marker) == 30
    rifles.shocked = True
    assert battle.controls(1, marker)
    enemy.health = 4
    assert battle.controls(0, marker), "10 against 8"


def test_command_phase_scores_from_round_two_on() -> None:
    battle, dice = begin()
    for unit, (x, y) in zip(battle.units[0], [(10, 10), (20, 20), (30, 30)], strict=True):
        place(unit, x, y)
    battle.command_phase()
    assert battle.vp == [0, 0]
    assert battle.cp == [2, 2]
    battle.round = 2
    battle.command_phase()
    assert battle.vp == [15, 0]
    battle.cp = [6, 0]
    battle.active = 1
    battle.command_phase()
    assert battle.vp == [15, 0]
    assert battle.cp == [6, 1]
    assert dice.rolls == []


def test_battle_shock() -> None:
    battle, dice = begin()
    rifles, veterans, walker = battle.units[0]
    rifles.health, veterans.health, walker.health = 4, 5, 1  # 4 of 10, 3 of 5, 1 of 1 models
    dice.rolls = [3, 3]
    battle.command_phase()
    assert rifles.shocked, "6 < leadership 7"
    assert not veterans.shocked
    assert dice.rolls == []
    dice.rolls = [3, 4]
    battle.command_phase()
    assert not rifles.shocked
    veterans.health, veterans.bravery = 4, True
    dice.rolls = [1, 1]
    battle.command_phase()
    assert rifles.shocked
    assert not veterans.shocked, "bravery: no roll"
    assert not veterans.bravery


def test_overwatch_is_fired_once_at_a_charger() -> None:
    battle, dice, unit, enemy = duel()
    battle.phase = CHARGE
    place(unit, 20, 20)
    place(enemy, 20, 28, overwatch=True, health=3)
    unit.health = 1
    dice.rolls = [6, 5, 4, 3]  # two shots, one six, a wound, no save
    battle.carry_out(unit, 1)
    assert not unit.alive
    assert battle.phase == OVER
    battle, dice, unit, enemy = duel()
    battle.phase = CHARGE
    place(unit, 20, 20)
    place(enemy, 20, 28, overwatch=True, health=3)
    dice.rolls = [5, 5, 1, 1]
    battle.carry_out(unit, 1)
    assert not enemy.overwatch
    dice.rolls = [3, 4]
    battle.carry_out(unit, 1)
    assert unit.charged
