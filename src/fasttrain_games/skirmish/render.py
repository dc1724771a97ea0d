"""Draws the board as text and as a picture, from a `BoardView`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain_games.skirmish.missions import Mission
from fasttrain_games.skirmish.sheets import Sheet

PHASE_NAMES = ("movement", "shooting", "charge", "over")
CELL_PX = 8
SIDE_COLOURS = ((40, 90, 200), (200, 50, 40))
GROUND, TERRAIN, MARKER, EMPTY_BAR = (214, 208, 184), (120, 112, 96), (230, 170, 20), (60, 60, 60)


class BoardView(NamedTuple):
    """The present state of one game. Side 0 is the learner's; units are (x, y, health), with health 0 if destroyed."""

    mission: Mission
    round: int
    rounds: int
    phase: int
    active: int
    vp: tuple[int, int]
    cp: tuple[int, int]
    units: list[list[tuple[int, int, int]]]
    sheets: tuple[tuple[Sheet, ...], tuple[Sheet, ...]]


def check_render_mode(mode: str | None) -> str | None:
    """Return a valid render mode.

    Raises:
        TypeError: an unknown mode. SB3's make_vec_env tries "rgb_array" and continues without it after a TypeError.
    """
    if mode not in (None, "ansi", "rgb_array"):
        raise TypeError(f"render_mode={mode!r}: choose None, 'ansi' or 'rgb_array'")
    return mode


def outcome_line(info: Mapping[str, Any]) -> str:
    """A line that says how an episode ended, from its info."""
    won = "draw" if info["is_draw"] else "won" if info["is_win"] else "lost"
    return f"game over: {won} {info['model_vp']}:{info['player_vp']} ({info['vp_diff']:+d}), {info['end_reason']}"


def token(side: int, index: int) -> str:
    """The character for a unit: 1 to 8 for the learner's, a to h for the opponent's."""
    return "12345678"[index] if side == 0 else "abcdefgh"[index]


def render_board(view: BoardView) -> str:
    """A line with round and points, the board (two rows of cells per line, opponent on top), then a line per unit."""
    mission = view.mission
    rows = [["." for _ in range(mission.width)] for _ in range((mission.height + 1) // 2)]
    for y in range(mission.height):
        for x in range(mission.width):
            if mission.in_terrain(x, y):
                rows[y // 2][x] = "#"
    for x, y in mission.markers:
        rows[min(y // 4, len(rows) - 1)][min(x // 2, mission.width - 1)] = "+"
    for side, units in enumerate(view.units):
        for index, (x, y, health) in enumerate(units):
            if health > 0:
                rows[y // 2][x] = token(side, index)
    whose = "" if view.phase == len(PHASE_NAMES) - 1 else f" ({('yours', 'opponent')[view.active]})"
    head = (
        f"Skirmish {mission.name}  round {view.round}/{view.rounds}  {PHASE_NAMES[view.phase]}{whose}  "
        f"VP {view.vp[0]}:{view.vp[1]}  CP {view.cp[0]}:{view.cp[1]}"
    )
    return "\n".join([head, *("".join(row) for row in reversed(rows)), *_unit_lines(view)])


def _unit_lines(view: BoardView) -> list[str]:
    lines = []
    for side in (0, 1):
        for index, ((x, y, health), sheet) in enumerate(zip(view.units[side], view.sheets[side], strict=True)):
            state = f"health {health}/{sheet.health} at {x},{y}" if health > 0 else "destroyed"
            lines.append(f"{token(side, index)} {sheet.name}: {state}")
    return lines


def draw_board(view: BoardView) -> NDArray[np.uint8]:
    """The board as (H, W, 3): terrain, markers with a circle of 3 inches, units with a bar of their health."""
    mission = view.mission
    picture = np.empty((mission.height * CELL_PX, mission.width * CELL_PX, 3), np.uint8)
    picture[:] = GROUND
    y_px, x_px = np.mgrid[: picture.shape[0], : picture.shape[1]]
    for left, bottom, right, top in mission.terrain:
        picture[bottom * CELL_PX : top * CELL_PX, left * CELL_PX : right * CELL_PX] = TERRAIN
    for x, y in mission.markers:
        away_px = np.hypot(x_px - x * CELL_PX / 2, y_px - y * CELL_PX / 2)
        picture[(away_px < CELL_PX) | (abs(away_px - 3 * CELL_PX) < 1)] = MARKER
    for side, units in enumerate(view.units):
        for (x, y, health), sheet in zip(units, view.sheets[side], strict=True):
            if health > 0:
                away_px = np.hypot(x_px - (x + 0.5) * CELL_PX, y_px - (y + 0.5) * CELL_PX)
                picture[away_px < 0.9 * CELL_PX] = SIDE_COLOURS[side]
                left = max(0, (x - 1) * CELL_PX)
                bar = picture[(y + 1) * CELL_PX + 4 : (y + 1) * CELL_PX + 7, left : left + 3 * CELL_PX]
                bar[:] = EMPTY_BAR
                bar[:, : round(bar.shape[1] * health / sheet.health)] = SIDE_COLOURS[side]
    flipped: NDArray[np.uint8] = picture[::-1].copy()
    return flipped
