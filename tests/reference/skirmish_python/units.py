"""Units, and what dice and lines need: the parts of the plain rules that stand without a game."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain_games.skirmish.sheets import Sheet, Weapon

MOVE, SHOOT, CHARGE, OVER = range(4)
NO_STRATAGEM, REROLL, OVERWATCH, SMOKESCREEN, BRAVERY = range(5)
DIRECTIONS = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))
HALF, FULL, ADVANCE = range(3)
MAX_CP = 6
CHARGE_RANGE = 12


@dataclass
class Unit:
    """One token."""

    sheet: Sheet
    side: int
    index: int
    x: int
    y: int
    health: int
    advanced: bool = False
    fell_back: bool = False
    charged: bool = False
    shocked: bool = False
    overwatch: bool = False
    smokescreen: bool = False
    bravery: bool = False

    @property
    def alive(self) -> bool:
        return self.health > 0

    @property
    def models(self) -> int:
        """Models alive."""
        return -(-self.health // self.sheet.wounds)

    @property
    def below_half(self) -> bool:
        return 2 * self.models < self.sheet.models

    @property
    def control(self) -> int:
        """What it counts for at a marker."""
        return 0 if self.shocked else self.sheet.control * self.models


def squared_distance(a: Unit, b: Unit) -> int:
    """Squared inches between two units."""
    return (a.x - b.x) ** 2 + (a.y - b.y) ** 2


def wound_roll_needed(strength: int, toughness: int) -> int:
    """The D6 that wounds."""
    if strength >= 2 * toughness:
        return 2
    if strength > toughness:
        return 3
    if strength == toughness:
        return 4
    return 6 if 2 * strength <= toughness else 5


def save_roll_needed(sheet: Sheet, weapon: Weapon) -> int:
    """The D6 that saves; 7 and more cannot be rolled, and 1 never saves."""
    save = sheet.save + weapon.ap
    return min(save, sheet.invulnerable) if sheet.invulnerable else save


def segment_meets_box(ax: int, ay: int, bx: int, by: int, box: tuple[int, int, int, int]) -> bool:
    """Whether the segment a-b passes through the inside of `box` (left, bottom, right, top), all whole numbers.

    They are apart if they are apart along x, along y, or across the segment.
    """
    left, bottom, right, top = box
    if max(ax, bx) <= left or min(ax, bx) >= right or max(ay, by) <= bottom or min(ay, by) >= top:
        return False
    sides = [(bx - ax) * (y - ay) - (by - ay) * (x - ax) for x in (left, right) for y in (bottom, top)]
    return min(sides) < 0 < max(sides)
