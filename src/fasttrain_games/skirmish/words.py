"""Texts for actions of Skirmish, for people who watch or play."""

from __future__ import annotations

from collections.abc import Sequence

from fasttrain_games.skirmish.options import Options
from fasttrain_games.skirmish.render import PHASE_NAMES, BoardView, token

COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")  # N: towards the opponent
LENGTHS = ("half a move", "a full move", "an advance")
MOVEMENT, _, CHARGE, _ = range(len(PHASE_NAMES))
STRATAGEMS = ("no stratagem", "re-roll", "overwatch", "smokescreen", "bravery")


def move_in_words(move: int) -> str:
    """The text for a value of a move head."""
    return "stays" if move == 0 else f"{LENGTHS[(move - 1) % 3]} {COMPASS[(move - 1) // 3]}"


def target_in_words(target: int, side: int, phase: int) -> str:
    """The text for a value of a target head of the side that decides."""
    verb = "charges" if phase == CHARGE else "shoots"
    return f"{verb} nobody" if target == 0 else f"{verb} {token(1 - side, target - 1)}"


def choice_in_words(options: Options, view: BoardView, part: int, value: int, unit: int = 0) -> str:
    """The text for a value of one head. With action_mode="units" the only head is that of `unit`."""
    side, phase = view.active, view.phase
    if options.action_mode == "units":
        doing = move_in_words(value) if value < 25 else target_in_words(value - 25, side, phase)
        return f"{token(side, unit)} {doing}"
    own = len(options.rosters[side])
    if part < own:
        return f"{token(side, part)} {move_in_words(value)}"
    if part < 2 * own:
        return f"{token(side, part - own)} {target_in_words(value, side, phase)}"
    return STRATAGEMS[value] if part == 2 * own else f"for {token(side, value)}"


def action_in_words(options: Options, view: BoardView, values: Sequence[int], unit: int = 0) -> str:
    """The text for an action. Heads that the phase does not use are left out."""
    if options.action_mode == "units":
        return choice_in_words(options, view, 0, values[0], unit)
    side, phase = view.active, view.phase
    own = len(options.rosters[side])
    first = 0 if phase == MOVEMENT else own
    units = [choice_in_words(options, view, first + index, values[first + index]) for index in range(own)]
    done = [text for text, value in zip(units, values[first : first + own], strict=True) if value]
    if values[2 * own]:
        done.append(f"{STRATAGEMS[values[2 * own]]} for {token(side, values[2 * own + 1])}")
    return ", ".join(done) or ("stays" if phase == MOVEMENT else "nothing")
