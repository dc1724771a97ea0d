"""The opponents in plain Python: `random`, `greedy` and `planner`, choosing for the active side.

All values are whole numbers, so that no rounding can part this from the kernels. Expected damage is in 1/216 wounds:
faces that hit × faces that wound × faces that fail the save.
"""

from __future__ import annotations

import math

from fasttrain_games.skirmish.options import GREEDY, RANDOM
from fasttrain_games.skirmish.sheets import Weapon
from reference.skirmish_python.battle import Battle
from reference.skirmish_python.units import (
    ADVANCE,
    BRAVERY,
    HALF,
    MOVE,
    NO_STRATAGEM,
    OVERWATCH,
    REROLL,
    SHOOT,
    SMOKESCREEN,
    Unit,
    save_roll_needed,
    squared_distance,
    wound_roll_needed,
)

ADVANCE_GUESS = 3  # inches that `greedy` reckons with
GREEDY_CHARGE = 9  # inches at most
# The planner's weights, in 1/216 wounds.
TAKES_MARKER, CONTESTS_MARKER, ON_MARKER, PER_HALF_INCH = 3000, 800, 100, 60
WAYS_TO_CHARGE = (36, 36, 36, 35, 33, 30, 26, 21, 15, 10, 6, 3)  # of 36, by 2D6 needed


def expected_damage(attacker: Unit, target: Unit, weapon: Weapon) -> int:
    """Mean damage in 1/216 wounds, at most the target's health; smoke is not reckoned with."""
    hitting = 7 - weapon.skill
    wounding = 7 - wound_roll_needed(weapon.strength, target.sheet.toughness)
    failing = min(6, save_roll_needed(target.sheet, weapon) - 1)
    per_model = weapon.attacks * hitting * wounding * failing * min(weapon.damage, target.sheet.wounds)
    return min(per_model * attacker.models, 216 * target.health)


def play_phase(battle: Battle, level: int) -> None:
    """Choose and carry out everything in the active side's phase."""
    side = battle.active
    stratagem, index = choose_stratagem(battle, level)
    battle.use_stratagem(stratagem, index)
    for unit in battle.units[side]:
        if unit.alive and not battle.over:
            battle.carry_out(unit, choose(battle, unit, level))


def choose(battle: Battle, unit: Unit, level: int) -> int:
    """The choice of a bot for one unit."""
    if level == RANDOM:
        choices = battle.choices(unit)
        return choices[battle.stream.below(len(choices))]
    if battle.phase == MOVE:
        return greedy_move(battle, unit) if level == GREEDY else planner_move(battle, unit)
    if battle.phase == SHOOT:
        return best_shot(battle, unit)
    return greedy_charge(battle, unit) if level == GREEDY else planner_charge(battle, unit)


def choose_stratagem(battle: Battle, level: int) -> tuple[int, int]:
    """A stratagem and its unit."""
    legal = battle.stratagems()
    if legal == [NO_STRATAGEM]:
        return NO_STRATAGEM, 0
    units = battle.living(battle.active)
    if level == RANDOM:
        stratagem = legal[battle.stream.below(len(legal))]
        return stratagem, units[battle.stream.below(len(units))].index
    if battle.phase == MOVE:
        shaken = [unit.index for unit in units if unit.below_half and not unit.bravery]
        return (BRAVERY, shaken[0]) if shaken else (NO_STRATAGEM, 0)
    if battle.phase == SHOOT:
        return _choose_smokescreen(battle, units)
    chargers = [unit.index for unit in units if choose(battle, unit, level) > 0]
    if chargers:
        return REROLL, chargers[0]
    if level == GREEDY:
        return NO_STRATAGEM, 0
    return _choose_overwatch(battle, units)


def _choose_smokescreen(battle: Battle, units: list[Unit]) -> tuple[int, int]:
    """With a CP to spare: for the unit in range of most enemies."""
    if battle.cp[battle.active] < 2:
        return NO_STRATAGEM, 0
    enemies = battle.living(1 - battle.active)
    best, most = -1, 0
    for unit in units:
        count = sum(battle.in_range(enemy, unit) for enemy in enemies)
        if count > most:
            best, most = unit.index, count
    return (SMOKESCREEN, best) if most else (NO_STRATAGEM, 0)


def _choose_overwatch(battle: Battle, units: list[Unit]) -> tuple[int, int]:
    """With a CP to spare: for the first unit that an enemy could charge next turn."""
    if battle.cp[battle.active] >= 2:
        enemies = battle.living(1 - battle.active)
        for unit in units:
            if not unit.overwatch and any(squared_distance(unit, enemy) <= 144 for enemy in enemies):
                return OVERWATCH, unit.index
    return NO_STRATAGEM, 0


def greedy_move(battle: Battle, unit: Unit) -> int:
    """Holds a marker that no friend of lower index holds; else towards the nearest one its side does not control."""
    if battle.engaged(unit):
        return 0
    markers = battle.markers_of(unit.side)
    friends = [friend for friend in battle.living(unit.side) if friend.index < unit.index]
    for marker in markers:
        held = any(battle.near_marker(friend.x, friend.y, marker) for friend in friends)
        if battle.near_marker(unit.x, unit.y, marker) and not held:
            return 0
    wanted = [marker for marker in markers if not battle.controls(unit.side, marker)]
    if not wanted:
        return 0
    goal = min(wanted, key=lambda marker: battle.marker_distance(unit.x, unit.y, marker))
    may_shoot = bool(battle.shooting_targets(unit))
    best, nearest = 0, battle.marker_distance(unit.x, unit.y, goal)
    for move in range(1, 25):
        direction, length = (move - 1) // 3, (move - 1) % 3
        if length == ADVANCE and may_shoot:
            continue
        half_inches = unit.sheet.move * (1 if length == HALF else 2) + (2 * ADVANCE_GUESS if length == ADVANCE else 0)
        cell = battle.end_of_move(unit, direction, half_inches)
        if cell is not None and battle.marker_distance(*cell, goal) < nearest:
            best, nearest = move, battle.marker_distance(*cell, goal)
    return best


def best_shot(battle: Battle, unit: Unit) -> int:
    """The target with the highest expected damage."""
    best, most = 0, 0
    for target in battle.shooting_targets(unit):
        expected = expected_damage(unit, target, unit.sheet.ranged)
        if expected > most:
            best, most = 1 + target.index, expected
    return best


def melee_margin(unit: Unit, target: Unit) -> int:
    """Expected damage dealt in one round of melee, less what comes back."""
    return expected_damage(unit, target, unit.sheet.melee) - expected_damage(target, unit, target.sheet.melee)


def greedy_charge(battle: Battle, unit: Unit) -> int:
    """The target within 9 inches with the best margin above 0."""
    best, most = 0, 0
    for target in battle.charge_targets(unit):
        margin = melee_margin(unit, target)
        if squared_distance(unit, target) <= GREEDY_CHARGE**2 and margin > most:
            best, most = 1 + target.index, margin
    return best


def planner_charge(battle: Battle, unit: Unit) -> int:
    """The target with the best margin above 0, weighted by the chance of the charge; overwatch halves it."""
    best, most = 0, 0
    for target in battle.charge_targets(unit):
        needed = 0
        while (needed + 1) ** 2 < squared_distance(unit, target):
            needed += 1
        margin = melee_margin(unit, target) * WAYS_TO_CHARGE[needed]
        if target.overwatch:
            margin //= 2
        if margin > most:
            best, most = 1 + target.index, margin
    return best


def planner_move(battle: Battle, unit: Unit) -> int:
    """Scores every cell that any move can reach, an advance by the mean over its six rolls."""
    move = unit.sheet.move
    engaged = battle.engaged(unit)
    best, most = 0, 6 * score_cell(battle, unit, unit.x, unit.y, not engaged)
    for choice in range(1, 25):
        direction, length = (choice - 1) // 3, (choice - 1) % 3
        rolls = range(1, 7) if length == ADVANCE else (0,)
        total = 0
        for roll in rolls:
            half_inches = move if length == HALF else 2 * (move + roll)
            cell = battle.end_of_move(unit, direction, half_inches)
            if cell is None:
                break
            total += score_cell(battle, unit, *cell, length != ADVANCE and not engaged) * (6 // len(rolls))
        else:
            if total > most:
                best, most = choice, total
    return best


def score_cell(battle: Battle, unit: Unit, x: int, y: int, free: bool) -> int:
    """What it is worth to stand there: markers, own fire, threats to come; `free`: may shoot and charge from there."""
    score = _score_markers(battle, unit, x, y)
    best_shot_value, best_charge, threat = 0, 0, 0
    for enemy in battle.living(1 - unit.side):
        distance = (x - enemy.x) ** 2 + (y - enemy.y) ** 2
        visible = battle.sight(x, y, enemy.x, enemy.y)
        if visible and distance <= unit.sheet.ranged.range**2:
            best_shot_value = max(best_shot_value, expected_damage(unit, enemy, unit.sheet.ranged))
        if visible and distance <= enemy.sheet.ranged.range**2:
            threat += expected_damage(enemy, unit, enemy.sheet.ranged)
        margin = melee_margin(unit, enemy)
        if distance <= GREEDY_CHARGE**2:
            best_charge = max(best_charge, margin)
        if distance <= (enemy.sheet.move + GREEDY_CHARGE) ** 2 and margin < 0:
            threat -= margin // 2
    if free:
        score += best_shot_value + best_charge // 2
    return score - threat // 2


def _score_markers(battle: Battle, unit: Unit, x: int, y: int) -> int:
    """Markers taken or contested by standing there, and how far it is to the nearest that friends do not hold."""
    score, nearest = 0, -1
    for marker in battle.mission.markers:
        near_now = battle.near_marker(unit.x, unit.y, marker)
        friends = battle.control_at(unit.side, marker) - (unit.control if near_now else 0)
        enemies = battle.control_at(1 - unit.side, marker)
        distance = battle.marker_distance(x, y, marker)
        if distance <= 36:
            if friends > enemies:
                score += ON_MARKER
            else:
                score += TAKES_MARKER if friends + unit.control > enemies else CONTESTS_MARKER
        if friends <= enemies and (nearest < 0 or distance < nearest):
            nearest = distance
    return score - PER_HALF_INCH * math.isqrt(nearest) if nearest >= 0 else score
