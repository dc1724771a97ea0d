"""The rules of Skirmish in plain Python, to be read: units, geometry, dice and the phases of a turn.

Decisions where the rules page leaves room:

1. Frames. Side 0 (the learner) deploys at low y, side 1 sees the board turned by 180 degrees. Directions, the order of
   cells and every tie are those of the acting side's own frame, and missions are symmetric: neither side is favoured.
2. Directions 0..7 are N, NE, E, SE, S, SW, W, NW (N towards the opponent). Move 1 + 3 × direction + length, length 0
   half, 1 full, 2 advance. A diagonal step is √2 inches. Half a move may be a fraction (move 7: 3.5 inches).
3. Only the last cell of a move matters: tokens and terrain are passed. It must lie on the board, be free of terrain and
   tokens and be more than 1 inch from every living enemy; a diagonal neighbour (1.41 inches) is allowed and is engaged.
   A move that finds no such cell leaves the unit where it is. It is legal if it leads anywhere (an advance: with a 1).
4. Reset draws, in this order: the opponent, the mission, who is first, then a cell for each unit of side 0 and of side
   1. The zone is cut into one strip of columns per unit; a unit gets any free cell of its strip.
5. Command: the active side's shock, smokescreen, overwatch and moves' flags end; both sides +1 CP; scoring; tests. So
   a side scores before its tests. Equal control is nobody's. Below half: 2 × models alive < models.
6. Dice of an attack: all hit rolls, then all wound rolls, then saves one by one until the target is destroyed. The
   models alive when the attack begins count. A smokescreen worsens the roll (6 hits and 1 misses all the same).
7. In heads mode all choices of a phase are made at once and carried out by unit index: a target that is gone by then
   means no shot, no charge; an advance rolls its D6 when it is carried out, fallen back or not. In units mode each
   choice is carried out before the next is made, and a unit with only one legal choice is not asked.
8. A charge needs no line of sight; the charger must not be engaged. No free cell beside the target: it stays and is no
   charger. Of cells equally near the first in the order of directions from the target is taken.
9. Stratagems are named with a phase's choices, before anything else happens, and are paid then, whether they come to
   any use or not: *re-roll* only in one's charge phase, for that phase, used if the first roll fails. *Overwatch*,
   *smokescreen* and *bravery* in any phase of one's own turn. Overwatch ends with the first shot at a charger or at
   one's next command phase; it is fired before the charge roll, if the unit is not engaged and has range and line of
   sight. A smokescreen ends at one's next command phase. Bravery stays until a test is due, which then needs no dice.
   The unit must be alive. A stratagem is legal with 1 CP; re-roll also needs a unit with somebody to charge.
10. In units mode there are no stratagems, for either side.
11. A unit that has nobody left to fight when its turn to fight comes does not fight. Melee weapons have no range.
12. A game that an opponent going first wins before the learner's first decision does not count; another is begun.
13. Progress towards markers (a reward term) is how many inches nearer to its nearest marker each own move or charge
    brings the unit. `turn` in the info is the round in which the game ended.
"""

from __future__ import annotations

import math

from fasttrain_games.skirmish.missions import Mission
from fasttrain_games.skirmish.options import Options, strip_cells
from fasttrain_games.skirmish.sheets import Weapon
from reference.skirmish_python.stream import Stream
from reference.skirmish_python.units import (
    ADVANCE,
    BRAVERY,
    CHARGE,
    CHARGE_RANGE,
    DIRECTIONS,
    FULL,
    HALF,
    MAX_CP,
    MOVE,
    NO_STRATAGEM,
    OVER,
    OVERWATCH,
    REROLL,
    SHOOT,
    SMOKESCREEN,
    Unit,
    save_roll_needed,
    segment_meets_box,
    squared_distance,
    wound_roll_needed,
)


class Battle:
    """One game: everything that happens between decisions. Illegal choices are the caller's business."""

    def __init__(self, options: Options, stream: Stream) -> None:
        self.options = options
        self.stream = stream
        self.level = self._draw_opponent()
        self.mission: Mission = options.missions[stream.below(len(options.missions))]
        self.first = stream.below(2)
        self.units: list[list[Unit]] = [[], []]
        for side in (0, 1):
            for index in range(len(options.rosters[side])):
                self.units[side].append(self._deploy(side, index))
        self.round = 1
        self.phase = MOVE
        self.active = self.first
        self.cp = [0, 0]
        self.vp = [0, 0]
        self.reroll = -1  # unit of the active side whose charge roll may be repeated in this phase
        self.dealt = 0  # wounds that side 1 lost so far, and side 0
        self.taken = 0
        self.progress = 0.0  # inches
        self.command_phase()

    def _draw_opponent(self) -> int:
        draw = self.stream.unit()
        return next(level for level, bound in enumerate(self.options.opponent) if draw < bound)

    def _deploy(self, side: int, index: int) -> Unit:
        roster = self.options.rosters[side]
        cells = strip_cells(self.mission, len(roster), index)
        x, y = cells[self.stream.below(len(cells))]
        if side == 1:
            x, y = self.mission.width - 1 - x, self.mission.height - 1 - y
        return Unit(roster[index], side, index, x, y, roster[index].health)

    # --- what there is to see

    def living(self, side: int) -> list[Unit]:
        return [unit for unit in self.units[side] if unit.alive]

    def health(self, side: int) -> int:
        return sum(unit.health for unit in self.units[side])

    @property
    def over(self) -> bool:
        return self.phase == OVER

    def engaged_with(self, unit: Unit) -> list[Unit]:
        """Living enemies within 1.5 inches."""
        return [enemy for enemy in self.living(1 - unit.side) if 4 * squared_distance(unit, enemy) <= 9]

    def engaged(self, unit: Unit) -> bool:
        return bool(self.engaged_with(unit))

    def sight(self, ax: int, ay: int, bx: int, by: int) -> bool:
        """Whether no terrain lies between two cells."""
        for left, bottom, right, top in self.mission.terrain:
            box = (2 * left, 2 * bottom, 2 * right, 2 * top)
            if segment_meets_box(2 * ax + 1, 2 * ay + 1, 2 * bx + 1, 2 * by + 1, box):
                return False
        return True

    def sees(self, a: Unit, b: Unit) -> bool:
        return self.sight(a.x, a.y, b.x, b.y)

    def in_range(self, unit: Unit, target: Unit) -> bool:
        return squared_distance(unit, target) <= unit.sheet.ranged.range**2

    def markers_of(self, side: int) -> list[tuple[int, int]]:
        """The markers in the order in which a side counts them: for side 1 the images of side 0's."""
        markers = self.mission.markers
        if side == 0:
            return list(markers)
        return [(2 * self.mission.width - x, 2 * self.mission.height - y) for x, y in markers]

    def marker_distance(self, x: int, y: int, marker: tuple[int, int]) -> int:
        """Squared half inches from a cell to a marker."""
        return (2 * x + 1 - marker[0]) ** 2 + (2 * y + 1 - marker[1]) ** 2

    def near_marker(self, x: int, y: int, marker: tuple[int, int]) -> bool:
        """Within 3 inches."""
        return self.marker_distance(x, y, marker) <= 36

    def control_at(self, side: int, marker: tuple[int, int]) -> int:
        return sum(unit.control for unit in self.living(side) if self.near_marker(unit.x, unit.y, marker))

    def controls(self, side: int, marker: tuple[int, int]) -> bool:
        return self.control_at(side, marker) > self.control_at(1 - side, marker)

    # --- what a unit may do

    def may_end_at(self, unit: Unit, x: int, y: int) -> bool:
        if not (0 <= x < self.mission.width and 0 <= y < self.mission.height) or self.mission.in_terrain(x, y):
            return False
        if any((friend.x, friend.y) == (x, y) for friend in self.living(unit.side)):
            return False
        return all((enemy.x - x) ** 2 + (enemy.y - y) ** 2 > 1 for enemy in self.living(1 - unit.side))

    def end_of_move(self, unit: Unit, direction: int, half_inches: int) -> tuple[int, int] | None:
        """The farthest cell along a direction where the unit may stop."""
        dx, dy = DIRECTIONS[direction]
        if unit.side == 1:
            dx, dy = -dx, -dy
        steps = 0
        while 4 * (steps + 1) ** 2 * (dx * dx + dy * dy) <= half_inches**2:
            steps += 1
        for step in range(steps, 0, -1):
            if self.may_end_at(unit, unit.x + step * dx, unit.y + step * dy):
                return unit.x + step * dx, unit.y + step * dy
        return None

    def choices(self, unit: Unit) -> list[int]:
        """Legal choices of a unit of the active side in this phase: moves, or targets (0 nobody, 1 + index)."""
        if not unit.alive or self.over:
            return [0]
        if self.phase == MOVE:
            move = unit.sheet.move
            reaches = (move, 2 * move, 2 * move + 2)
            return [0] + [
                1 + 3 * direction + length
                for direction in range(8)
                for length in (HALF, FULL, ADVANCE)
                if self.end_of_move(unit, direction, reaches[length]) is not None
            ]
        targets = self.shooting_targets(unit) if self.phase == SHOOT else self.charge_targets(unit)
        return [0] + [1 + target.index for target in targets]

    def shooting_targets(self, unit: Unit) -> list[Unit]:
        if unit.advanced or unit.fell_back or self.engaged(unit):
            return []
        return [
            enemy
            for enemy in self.living(1 - unit.side)
            if self.in_range(unit, enemy) and self.sees(unit, enemy) and not self.engaged(enemy)
        ]

    def charge_targets(self, unit: Unit) -> list[Unit]:
        if unit.advanced or unit.fell_back or self.engaged(unit):
            return []
        enemies = self.living(1 - unit.side)
        return [enemy for enemy in enemies if squared_distance(unit, enemy) <= CHARGE_RANGE**2]

    def stratagems(self) -> list[int]:
        """Legal stratagems of the active side in this phase."""
        if self.over or self.options.action_mode == "units" or self.cp[self.active] < 1:
            return [NO_STRATAGEM]
        somebody = self.phase == CHARGE and any(len(self.choices(unit)) > 1 for unit in self.living(self.active))
        return [NO_STRATAGEM, *([REROLL] if somebody else []), OVERWATCH, SMOKESCREEN, BRAVERY]

    # --- what happens

    def use_stratagem(self, stratagem: int, index: int) -> None:
        """Pay for a stratagem of the active side and note it at its unit."""
        if stratagem == NO_STRATAGEM:
            return
        self.cp[self.active] -= 1
        unit = self.units[self.active][index]
        if stratagem == REROLL:
            self.reroll = index
        elif stratagem == OVERWATCH:
            unit.overwatch = True
        elif stratagem == SMOKESCREEN:
            unit.smokescreen = True
        else:
            unit.bravery = True

    def carry_out(self, unit: Unit, choice: int) -> None:
        """A unit of the active side does what was chosen for it in this phase."""
        if choice == 0 or not unit.alive or self.over:
            return
        if self.phase == MOVE:
            self._move(unit, (choice - 1) // 3, (choice - 1) % 3)
            return
        target = self.units[1 - unit.side][choice - 1]
        if not target.alive:
            return
        if self.phase == SHOOT:
            self.attack(unit, target, unit.sheet.ranged)
        else:
            self._charge(unit, target)

    def _move(self, unit: Unit, direction: int, length: int) -> None:
        half_inches = unit.sheet.move * (1 if length == HALF else 2)
        if length == ADVANCE:
            half_inches += 2 * self.stream.die()
        if self.engaged(unit):
            unit.fell_back = True
        if length == ADVANCE:
            unit.advanced = True
        cell = self.end_of_move(unit, direction, half_inches)
        if cell is not None:
            self._put(unit, cell)

    def _put(self, unit: Unit, cell: tuple[int, int]) -> None:
        before = self._inches_to_marker(unit)
        unit.x, unit.y = cell
        if unit.side == 0:
            self.progress += before - self._inches_to_marker(unit)

    def _inches_to_marker(self, unit: Unit) -> float:
        nearest = min(self.marker_distance(unit.x, unit.y, marker) for marker in self.mission.markers)
        return math.sqrt(nearest) * 0.5

    def _charge(self, unit: Unit, target: Unit) -> None:
        distance = squared_distance(unit, target)
        if target.overwatch and not self.engaged(target) and self.in_range(target, unit) and self.sees(target, unit):
            target.overwatch = False
            self.attack(target, unit, target.sheet.ranged, only_sixes=True)
            if not unit.alive:
                return
        roll = self.stream.die() + self.stream.die()
        if (roll + 1) ** 2 < distance and self.reroll == unit.index:
            roll = self.stream.die() + self.stream.die()
        if (roll + 1) ** 2 < distance:
            return
        cell = self._cell_beside(unit, target)
        if cell is not None:
            self._put(unit, cell)
            unit.charged = True

    def _cell_beside(self, unit: Unit, target: Unit) -> tuple[int, int] | None:
        taken = [(other.x, other.y) for side in (0, 1) for other in self.living(side)]
        best, best_distance = None, 0
        for dx, dy in DIRECTIONS:
            x, y = (target.x + dx, target.y + dy) if unit.side == 0 else (target.x - dx, target.y - dy)
            on_board = 0 <= x < self.mission.width and 0 <= y < self.mission.height
            if not on_board or (x, y) in taken or self.mission.in_terrain(x, y):
                continue
            distance = (x - unit.x) ** 2 + (y - unit.y) ** 2
            if best is None or distance < best_distance:
                best, best_distance = (x, y), distance
        return best

    def attack(self, unit: Unit, target: Unit, weapon: Weapon, only_sixes: bool = False) -> None:
        """Hit, wound and save rolls of one attack, and the casualties."""
        smoke = 1 if self.phase == SHOOT and target.smokescreen else 0
        hits = 0
        for _ in range(weapon.attacks * unit.models):
            roll = self.stream.die()
            if roll == 6 or (not only_sixes and roll > 1 and roll - smoke >= weapon.skill):
                hits += 1
        wounds = 0
        for _ in range(hits):
            if self.stream.die() >= wound_roll_needed(weapon.strength, target.sheet.toughness):
                wounds += 1
        for _ in range(wounds):
            roll = self.stream.die()
            if roll == 1 or roll < save_roll_needed(target.sheet, weapon):
                self._damage(target, weapon.damage)
            if not target.alive:
                break
        if not self.living(target.side):
            self.phase = OVER

    def _damage(self, target: Unit, damage: int) -> None:
        front_model = (target.health - 1) % target.sheet.wounds + 1
        lost = min(damage, front_model)
        target.health -= lost
        if target.side == 1:
            self.dealt += lost
        else:
            self.taken += lost

    def end_phase(self) -> None:
        """Go on to the active side's next phase, or fight and begin the other side's turn."""
        self.reroll = -1
        if self.over:
            return
        if self.phase != CHARGE:
            self.phase += 1
            return
        self.fight()
        if self.over:
            return
        if self.active != self.first:
            if self.round == self.options.rounds:
                self.phase = OVER
                return
            self.round += 1
        self.active = 1 - self.active
        self.phase = MOVE
        self.command_phase()

    def fight(self) -> None:
        """Close combat: who charged, the other side, the rest of the active one; each at its weakest enemy."""
        active, other = self.units[self.active], self.units[1 - self.active]
        order = [unit for unit in active if unit.charged]
        order += other
        order += [unit for unit in active if not unit.charged]
        for unit in order:
            if unit.alive and not self.over:
                enemies = self.engaged_with(unit)
                if enemies:
                    weakest = min(enemies, key=lambda enemy: (enemy.health, enemy.index))
                    self.attack(unit, weakest, unit.sheet.melee)

    def command_phase(self) -> None:
        """Begin the active side's turn."""
        side = self.active
        for unit in self.units[side]:
            unit.advanced = unit.fell_back = unit.charged = False
            unit.shocked = unit.smokescreen = unit.overwatch = False
        for index in (0, 1):
            self.cp[index] = min(MAX_CP, self.cp[index] + 1)
        if self.round > 1:
            held = sum(self.controls(side, marker) for marker in self.mission.markers)
            self.vp[side] += min(15, 5 * held)
        for unit in self.living(side):
            if unit.below_half:
                if unit.bravery:
                    unit.bravery = False
                elif self.stream.die() + self.stream.die() < unit.sheet.leadership:
                    unit.shocked = True
