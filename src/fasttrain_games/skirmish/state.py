"""Two packed records: GAME is the state of one game, SETUP is the data that all games of a batch share.

A kernel takes these two as arguments. Sides are 0 (the learner) and 1; positions are absolute. All integers have 64
bits: with integers of two widths numba would compile most kernels twice. The rules and names are those of
`tests/reference/skirmish_python/battle.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain_games.skirmish.missions import MAX_HEIGHT, MAX_MARKERS, MAX_MISSIONS, MAX_TERRAIN
from fasttrain_games.skirmish.options import OPPONENTS, Options
from fasttrain_games.skirmish.sheets import MAX_UNITS, Sheet, Weapon

MOVE, SHOOT, CHARGE, OVER, UNSTARTED = range(5)
NO_STRATAGEM, REROLL, OVERWATCH, SMOKESCREEN, BRAVERY = range(5)
HALF, FULL, ADVANCE = range(3)
MAX_CP = 6
CHARGE_RANGE = 12

# Bits of a unit's flags. The next command phase of the unit's side clears the first six.
ADVANCED, FELL_BACK, CHARGED, SHOCKED, OVERWATCHING, SMOKED, BRAVE = (1 << bit for bit in range(7))
ENDS_IN_COMMAND = ADVANCED | FELL_BACK | CHARGED | SHOCKED | OVERWATCHING | SMOKED
SPENT = ADVANCED | FELL_BACK

# Indices into the vector of reward weights and into `terms`.
R_VP, R_WIN, R_DAMAGE, R_PROGRESS = range(4)
TERMS = ("vp", "win", "damage", "progress")

RANGED, MELEE = range(2)
_UNITS = (2, MAX_UNITS)  # side, unit
_PAIRS = (2, 2, MAX_UNITS, MAX_UNITS)  # weapon, attacker's side, attacker, target

GAME = np.dtype(
    [
        ("rng", "u8"),  # splitmix64 state
        ("sight", "i8"),  # cache of lines of sight: bit 8 × unit of side 0 + unit of side 1
        ("sight_known", "i8"),  # which bits of `sight` are valid
        ("distance_known", "i8"),  # which entries of `distance` are valid
        ("progress", "f8"),  # inches by which units came nearer to markers, in this episode
        ("paid_progress", "f8"),
        ("reward", "f8"),  # reward of the learner since the last decision of either side
        ("terms", "f8", (4,)),  # sums of the reward's terms in this episode
        ("result_terms", "f8", (4,)),
        ("legal", "i8", (MAX_UNITS,)),  # choices of the deciding side's units, as bits
        ("legal_stratagems", "i8"),
        ("level", "i8"),  # the opponent, an index into OPPONENTS
        ("mission", "i8"),
        ("first", "i8"),  # side that goes first
        ("round", "i8"),  # counted from 1
        ("rounds", "i8"),  # length of this game
        ("next_rounds", "i8"),  # length of the next game
        ("next_mission", "i8"),  # 1 + index of the next game's mission; 0: it is drawn
        ("phase", "i8"),
        ("active", "i8"),  # side whose turn it is
        ("cursor", "i8"),  # unit that decides (action_mode="units")
        ("reroll", "i8"),  # unit that may repeat its charge roll in this phase; -1: none
        ("cp", "i8", (2,)),
        ("vp", "i8", (2,)),
        ("x", "i8", _UNITS),
        ("y", "i8", _UNITS),
        ("health", "i8", _UNITS),  # wounds left, 0 destroyed
        ("flags", "i8", _UNITS),
        ("distance", "i8", (MAX_UNITS, MAX_UNITS)),  # cache: squared inches, unit of side 0 × unit of side 1
        ("engaged", "i8", (2,)),  # cache: units within 1.5 inches of an enemy, as bits
        ("engaged_known", "i8"),
        ("targets", "i8", _UNITS),  # cache: the enemies that each unit may shoot, as bits
        ("targets_known", "i8", (2,)),
        ("plan_known", "i8"),  # unit to which the plan_ fields below belong: 1 + MAX_UNITS × side + unit; 0: none
        ("plan_friends", "i8", (MAX_MARKERS,)),  # control of the unit's side at each marker, without the unit
        ("plan_enemies", "i8", (MAX_MARKERS,)),
        ("plan_shot", "i8", (MAX_UNITS,)),  # expected damage of the unit's fire at each enemy, in 1/216 wounds
        ("plan_threat", "i8", (MAX_UNITS,)),
        ("plan_melee", "i8", (MAX_UNITS,)),
        ("margin", "i8"),  # wounds dealt minus wounds taken in this episode
        ("paid_margin", "i8"),
        ("lead", "i8"),  # VP difference when the last reward was paid
        ("since_paid", "i8"),  # decisions of the learner since the secondary reward terms were paid
        ("ended", "i8"),  # 1: an episode ended in the last step; the result_ fields are about that episode
        ("result_outcome", "i8"),  # 1 won, 0 drawn, -1 lost
        ("result_vp", "i8", (2,)),
        ("result_health", "i8", (2,)),
        ("result_round", "i8"),
        ("result_mission", "i8"),
    ],
    align=True,
)

SETUP = np.dtype(
    [
        ("rewards", "f8", (4,)),
        ("blocked", "i8", (MAX_MISSIONS, MAX_HEIGHT)),  # terrain, one row of cells per integer
        ("secondary_every", "i8"),
        ("counts_progress", "i8"),
        ("debug", "i8"),
        ("units_mode", "i8"),
        ("cache", "i8"),
        ("rounds", "i8"),
        ("width", "i8"),
        ("height", "i8"),
        ("num_missions", "i8"),
        ("num_units", "i8", (2,)),
        ("deployment_rows", "i8", (MAX_MISSIONS,)),
        ("num_markers", "i8", (MAX_MISSIONS,)),
        ("markers", "i8", (MAX_MISSIONS, MAX_MARKERS, 2)),
        ("images", "i8", (MAX_MISSIONS, 2, MAX_MARKERS)),  # per side: index of its k-th marker; side 1 turns the board
        ("num_terrain", "i8", (MAX_MISSIONS,)),
        ("terrain", "i8", (MAX_MISSIONS, MAX_TERRAIN, 4)),  # in half inches, like markers and cell centres
        ("models", "i8", _UNITS),
        ("wounds", "i8", _UNITS),
        ("move", "i8", _UNITS),
        ("leadership", "i8", _UNITS),
        ("control", "i8", _UNITS),
        ("range", "i8", _UNITS),
        ("attacks", "i8", (2, *_UNITS)),  # axes: weapon, side, unit
        ("skill", "i8", (2, *_UNITS)),
        ("damage", "i8", (2, *_UNITS)),
        ("wound_roll", "i8", _PAIRS),
        ("save_roll", "i8", _PAIRS),
        ("expected", "i8", _PAIRS),  # mean damage of one attacking model in 1/216 wounds
    ],
    align=True,
)


def impossible(games: NDArray[Any], setup: np.void) -> str:
    """The first invalid field of records that come from a file, as a text for an error; empty if all are valid."""
    last = MAX_UNITS - 1
    ranges = {
        "phase": (0, UNSTARTED), "active": (0, 1), "first": (0, 1), "cursor": (-1, MAX_UNITS), "reroll": (-1, last),
        "next_mission": (0, int(setup["num_missions"])), "next_rounds": (1, int(setup["rounds"])),
        "rounds": (0, int(setup["rounds"])), "mission": (0, int(setup["num_missions"]) - 1),
        "level": (0, len(OPPONENTS) - 1),
        "result_mission": (0, int(setup["num_missions"]) - 1), "cp": (0, MAX_CP),
        "x": (-1, int(setup["width"])), "y": (-1, int(setup["height"])), "plan_known": (0, 2 * MAX_UNITS),
    }  # fmt: skip
    for name, (least, most) in ranges.items():
        if games[name].size and not (least <= games[name].min() and games[name].max() <= most):
            return f"{name} must lie between {least} and {most}"
    return ""


def make_setup(options: Options) -> NDArray[Any]:
    """The (1,) SETUP record of the options."""
    setups = np.zeros(1, SETUP)
    setup = setups[0]
    setup["rewards"] = (options.reward_vp, options.reward_win, options.reward_damage, options.reward_progress)
    setup["secondary_every"] = options.secondary_every
    setup["counts_progress"] = options.reward_progress != 0.0
    setup["debug"] = options.reward_debug
    setup["units_mode"] = options.action_mode == "units"
    for name in ("cache", "rounds", "width", "height"):
        setup[name] = getattr(options, name)
    _write_missions(setup, options)
    for side, roster in enumerate(options.rosters):
        setup["num_units"][side] = len(roster)
        for unit, sheet in enumerate(roster):
            for name in ("models", "wounds", "move", "leadership", "control"):
                setup[name][side, unit] = getattr(sheet, name)
            setup["range"][side, unit] = sheet.ranged.range
            for weapon, arm in enumerate((sheet.ranged, sheet.melee)):
                for name in ("attacks", "skill", "damage"):
                    setup[name][weapon, side, unit] = getattr(arm, name)
                for enemy, target in enumerate(options.rosters[1 - side]):
                    _write_pair(setup, (weapon, side, unit, enemy), arm, target)
    return setups


def _write_missions(setup: np.void, options: Options) -> None:
    setup["num_missions"] = len(options.missions)
    for index, mission in enumerate(options.missions):
        setup["deployment_rows"][index] = mission.deployment_rows
        setup["num_markers"][index] = len(mission.markers)
        setup["markers"][index, : len(mission.markers)] = mission.markers
        for number, (x, y) in enumerate(mission.markers):
            image = mission.markers.index((2 * mission.width - x, 2 * mission.height - y))
            setup["images"][index, :, number] = number, image
        setup["num_terrain"][index] = len(mission.terrain)
        if mission.terrain:
            setup["terrain"][index, : len(mission.terrain)] = 2 * np.array(mission.terrain)
        for y in range(mission.height):
            setup["blocked"][index, y] = sum(1 << x for x in range(mission.width) if mission.in_terrain(x, y))


def _write_pair(setup: np.void, where: tuple[int, int, int, int], weapon: Weapon, target: Sheet) -> None:
    wound_roll = wound_roll_needed(weapon.strength, target.toughness)
    save_roll = max(2, save_roll_needed(target, weapon))  # because a 1 never saves
    faces = (7 - weapon.skill) * (7 - wound_roll) * min(6, save_roll - 1)
    setup["wound_roll"][where] = wound_roll
    setup["save_roll"][where] = save_roll
    setup["expected"][where] = weapon.attacks * faces * min(weapon.damage, target.wounds)


def wound_roll_needed(strength: int, toughness: int) -> int:
    """The lowest roll of a D6 that wounds."""
    if strength >= 2 * toughness:
        return 2
    if strength >= toughness:
        return 3 if strength > toughness else 4
    return 6 if 2 * strength <= toughness else 5


def save_roll_needed(target: Sheet, weapon: Weapon) -> int:
    """The lowest roll of a D6 that saves the unit; above 6 means that it has no save."""
    save = target.save + weapon.ap
    return min(save, target.invulnerable) if target.invulnerable else save
