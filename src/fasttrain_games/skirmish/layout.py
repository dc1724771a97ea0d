"""The layout of the observation, a flat float32 vector in [-1, 1].

It shows the game to the side that decides next ("own"). The board is turned so that this side plays upwards:

- `game` (10): round / rounds, phase one-hot (movement, shooting, charge; all 0 when the game is over), moves first, own
  and the enemy's VP / 60, their difference / 30, own and the enemy's CP / 6;
- `markers` (6 × 4): exists (1 or 0), x, y (0 is the board's centre), control (1 own, -1 the enemy's);
- `own` and `enemies` (14 per unit, all 0 for a destroyed unit): see UNIT_FEATURES;
- `pairs` (5 per pair of an own unit and an enemy, in C order, all 0 if one of the two is destroyed): see PAIR_FEATURES.
"""

from __future__ import annotations

from fasttrain_games.skirmish.missions import MAX_MARKERS

GAME_FEATURES = (
    "round", "movement", "shooting", "charge", "goes_first", "own_vp", "enemy_vp", "vp_lead", "own_cp", "enemy_cp",
)  # fmt: skip
MARKER_FEATURES = ("exists", "x", "y", "control")
UNIT_FEATURES = (
    "health",  # wounds left / wounds at the start
    "x",
    "y",
    "engaged",
    "spent",  # it advanced or fell back, so it neither shoots nor charges in this turn
    "shocked",
    "smokescreen",
    "overwatch",
    "bravery",
    "deciding",  # 1 for the unit that decides now (action_mode="units")
    "models",  # alive / 20
    "move",  # inches / 24
    "range",  # inches / 48
    "control",  # control × models alive / 20
)
PAIR_FEATURES = (
    "distance",  # inches / 48
    "line_of_sight",
    "shot",  # expected damage of own fire / the enemy's health
    "threat",  # expected damage of the enemy's fire / own health
    "melee",  # (damage dealt / the enemy's health) - (damage taken / own health) in one round of melee
)
VP_SCALE, LEAD_SCALE = 60, 30
DISTANCE_SCALE, MOVE_SCALE, CONTROL_SCALE, MODELS_SCALE = 48, 24, 20, 20

GAME_WIDTH, MARKER_WIDTH, UNIT_WIDTH, PAIR_WIDTH = (
    len(GAME_FEATURES), len(MARKER_FEATURES), len(UNIT_FEATURES), len(PAIR_FEATURES),
)  # fmt: skip
UNITS_START = GAME_WIDTH + MAX_MARKERS * MARKER_WIDTH


def observation_width(own: int, enemies: int) -> int:
    """Entries of the observation, for example 163 with three units per side."""
    return UNITS_START + UNIT_WIDTH * (own + enemies) + PAIR_WIDTH * own * enemies


def describe_observation(own: int, enemies: int) -> dict[str, slice]:
    """Name of each block → its slice, in order and without gaps."""
    starts = [0, GAME_WIDTH, UNITS_START, UNITS_START + UNIT_WIDTH * own, UNITS_START + UNIT_WIDTH * (own + enemies)]
    stops = [*starts[1:], observation_width(own, enemies)]
    names = ("game", "markers", "own", "enemies", "pairs")
    return {name: slice(start, stop) for name, start, stop in zip(names, starts, stops, strict=True)}
