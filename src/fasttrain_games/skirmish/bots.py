"""The opponents `random` and `greedy`; `planner` is in a file of its own. Each bot chooses for the active side.

Scores are integers, damage is in 1/216 wounds. `tests/reference/skirmish_python/bots.py` has the same in plain Python.
"""

from __future__ import annotations

from fasttrain.batch import Record
from fasttrain.native.batch import random_below
from fasttrain_games.skirmish.moves import (
    STEP_X,
    STEP_Y,
    charge_targets,
    choices_of,
    legal_stratagems,
    marker_distance,
    move_reach,
    steps_of_move,
)
from fasttrain_games.skirmish.options import GREEDY, RANDOM
from fasttrain_games.skirmish.planner import GREEDY_CHARGE, expected_damage, melee_margin, planner_charge, planner_move
from fasttrain_games.skirmish.state import (
    BRAVE,
    BRAVERY,
    CHARGE_RANGE,
    MOVE,
    NO_STRATAGEM,
    OVER,
    OVERWATCH,
    OVERWATCHING,
    RANGED,
    REROLL,
    SHOOT,
    SMOKESCREEN,
)
from fasttrain_games.skirmish.tables import distance_between, is_engaged, shooting_targets
from fasttrain_games.skirmish.turns import carry_out, control_at, is_below_half, use_stratagem
from fasttrain_kernels.jit import njit

ADVANCE_GUESS = 3  # inches that `greedy` expects from the roll of an advance


@njit
def play_phase(game: Record, setup: Record) -> None:
    """Let the game's bot choose and carry out all actions of the active side in this phase."""
    side = game.active
    level = game.level
    legal = legal_stratagems(game, setup)
    if legal != 1:
        stratagem, unit = _choose_stratagem(game, setup, side, level, legal)
        use_stratagem(game, stratagem, unit)
    for unit in range(setup.num_units[side]):
        if game.health[side, unit] > 0 and game.phase < OVER:
            carry_out(game, setup, side, unit, _choose(game, setup, side, unit, level))


@njit
def _nth_bit(bits: int, number: int) -> int:
    index = 0
    while True:
        if bits >> index & 1:
            if number == 0:
                return index
            number -= 1
        index += 1


@njit
def _count_bits(bits: int) -> int:
    count = 0
    while bits != 0:
        bits &= bits - 1
        count += 1
    return count


@njit
def _draw_bit(game: Record, bits: int) -> int:
    """Draw one of the set bits, all with the same probability."""
    return _nth_bit(bits, random_below(game, _count_bits(bits)))


@njit
def _choose(game: Record, setup: Record, side: int, unit: int, level: int) -> int:
    """The choice of a bot for one living unit."""
    if level == RANDOM:
        return _draw_bit(game, choices_of(game, setup, side, unit))
    if game.phase == MOVE:
        return _greedy_move(game, setup, side, unit) if level == GREEDY else planner_move(game, setup, side, unit)
    if game.phase == SHOOT:
        return _best_shot(game, setup, side, unit)
    return _choose_charge(game, setup, side, unit, level)


@njit
def _choose_charge(game: Record, setup: Record, side: int, unit: int, level: int) -> int:
    return _greedy_charge(game, setup, side, unit) if level == GREEDY else planner_charge(game, setup, side, unit)


@njit
def _choose_stratagem(game: Record, setup: Record, side: int, level: int, legal: int) -> tuple[int, int]:
    """The stratagem that a bot of this level uses, and its unit."""
    count = setup.num_units[side]
    if level == RANDOM:
        stratagem = _draw_bit(game, legal)
        living = 0
        for unit in range(count):
            living |= (game.health[side, unit] > 0) << unit
        return stratagem, _draw_bit(game, living)
    if game.phase == MOVE:
        for unit in range(count):
            brave = game.health[side, unit] <= 0 or game.flags[side, unit] & BRAVE
            if not brave and is_below_half(game, setup, side, unit):
                return BRAVERY, unit
        return NO_STRATAGEM, 0
    if game.phase == SHOOT:
        return _choose_smokescreen(game, setup, side)
    for unit in range(count):
        if game.health[side, unit] > 0 and _choose_charge(game, setup, side, unit, level) > 0:
            return REROLL, unit
    if level == GREEDY or game.cp[side] < 2:
        return NO_STRATAGEM, 0
    for unit in range(count):
        ready = game.health[side, unit] > 0 and not game.flags[side, unit] & OVERWATCHING
        if ready and _enemies_within(game, setup, side, unit, CHARGE_RANGE):
            return OVERWATCH, unit
    return NO_STRATAGEM, 0


@njit
def _choose_smokescreen(game: Record, setup: Record, side: int) -> tuple[int, int]:
    """A smokescreen for the unit in range of most enemies, if a command point (CP) is left over."""
    if game.cp[side] < 2:
        return NO_STRATAGEM, 0
    best, most = -1, 0
    for unit in range(setup.num_units[side]):
        if game.health[side, unit] > 0:
            count = _enemies_within(game, setup, side, unit, 0)
            if count > most:
                best, most = unit, count
    return (SMOKESCREEN, best) if most else (NO_STRATAGEM, 0)


@njit
def _enemies_within(game: Record, setup: Record, side: int, unit: int, inches: int) -> int:
    """The number of living enemies within `inches` of a unit. `inches` 0: the number whose weapons reach the unit."""
    count = 0
    for enemy in range(setup.num_units[1 - side]):
        reach = inches if inches else setup.range[1 - side, enemy]
        if game.health[1 - side, enemy] > 0 and distance_between(game, setup, side, unit, enemy) <= reach * reach:
            count += 1
    return count


@njit
def _holds_marker(game: Record, setup: Record, side: int, unit: int) -> bool:
    """Whether the unit is within 3 inches of a marker, and no friendly unit with a lower index is."""
    for marker in range(setup.num_markers[game.mission]):
        if marker_distance(game, setup, game.x[side, unit], game.y[side, unit], marker) > 36:
            continue
        held = False
        for friend in range(unit):
            distance = marker_distance(game, setup, game.x[side, friend], game.y[side, friend], marker)
            held = held or (distance <= 36 and game.health[side, friend] > 0)
        if not held:
            return True
    return False


@njit
def _greedy_move(game: Record, setup: Record, side: int, unit: int) -> int:
    """Stay at a marker that no lower-numbered friend holds, else move to the nearest one that `side` does not hold."""
    if is_engaged(game, setup, side, unit) or _holds_marker(game, setup, side, unit):
        return 0
    x, y = game.x[side, unit], game.y[side, unit]
    goal, nearest = -1, 0
    for number in range(setup.num_markers[game.mission]):
        marker = setup.images[game.mission, side, number]
        if control_at(game, setup, side, marker) <= control_at(game, setup, 1 - side, marker):
            distance = marker_distance(game, setup, x, y, marker)
            if goal < 0 or distance < nearest:
                goal, nearest = marker, distance
    if goal < 0:
        return 0
    lengths = 2 if shooting_targets(game, setup, side, unit) else 3
    sign = 1 - 2 * side
    best = 0
    for direction in range(8):
        for length in range(lengths):
            reach = move_reach(setup.move[side, unit], length, ADVANCE_GUESS)
            steps = sign * steps_of_move(game, setup, side, unit, direction, reach)
            cell_x, cell_y = x + steps * STEP_X[direction], y + steps * STEP_Y[direction]
            distance = marker_distance(game, setup, cell_x, cell_y, goal)
            if distance < nearest:
                best, nearest = 1 + 3 * direction + length, distance
    return best


@njit
def _best_shot(game: Record, setup: Record, side: int, unit: int) -> int:
    """The target with the highest expected damage, as 1 + its index; 0: none."""
    targets = shooting_targets(game, setup, side, unit)
    best, most = 0, 0
    for target in range(setup.num_units[1 - side]):
        if targets >> target & 1:
            expected = expected_damage(game, setup, side, unit, target, RANGED)
            if expected > most:
                best, most = 1 + target, expected
    return best


@njit
def _greedy_charge(game: Record, setup: Record, side: int, unit: int) -> int:
    """The target within 9 inches with the highest `melee_margin`, as 1 + its index; 0 if no margin is above 0."""
    targets = charge_targets(game, setup, side, unit)
    best, most = 0, 0
    for target in range(setup.num_units[1 - side]):
        distance = distance_between(game, setup, side, unit, target)
        if targets >> target & 1 and distance <= GREEDY_CHARGE * GREEDY_CHARGE:
            margin = melee_margin(game, setup, side, unit, target)
            if margin > most:
                best, most = 1 + target, margin
    return best
