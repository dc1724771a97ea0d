"""Checks the arguments of Skirmish, for both the native game and the Gymnasium environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import did_you_mean
from fasttrain_games.skirmish.missions import MAX_HEIGHT, MAX_WIDTH, MIN_SIDE, Mission, load_missions
from fasttrain_games.skirmish.sheets import Sheet, load_roster

OPPONENTS = ("random", "greedy", "planner", "self")
RANDOM, GREEDY, PLANNER, SELF = range(4)
ACTION_MODES = ("heads", "units")
REWARDS = ("reward_vp", "reward_win", "reward_damage", "reward_progress")

OpponentMix = str | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Options:
    """Checked arguments. Side 0 is the learner, side 1 the opponent."""

    action_mode: str
    opponent: tuple[float, ...]  # cumulative weights over OPPONENTS
    missions: tuple[Mission, ...]
    rosters: tuple[tuple[Sheet, ...], tuple[Sheet, ...]]
    rounds: int
    width: int
    height: int
    cache: bool
    reward_vp: float
    reward_win: float
    reward_damage: float
    reward_progress: float
    secondary_every: int
    reward_debug: bool

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Head sizes: a move and a target per unit, a stratagem, the stratagem's unit; one head in "units" mode."""
        own, enemies = len(self.rosters[0]), len(self.rosters[1])
        if self.action_mode == "units":
            return (25 + enemies + 1,)
        return (25,) * own + (enemies + 1,) * own + (5, own)


def make_options(**given: object) -> Options:
    """Check the arguments, fill in the defaults and read rosters and missions.

    Raises:
        ConfigError: the message names the key, its value and what fits.
        TypeError: an unknown argument.
    """
    values: dict[str, Any] = {**_DEFAULTS, **given}
    unknown = sorted(set(given) - set(_DEFAULTS))
    if unknown:
        raise TypeError(f"unexpected argument {unknown[0]!r}{did_you_mean(unknown[0], _DEFAULTS)}")
    if values["action_mode"] not in ACTION_MODES:
        raise ConfigError(f"action_mode={values['action_mode']!r}: choose {' or '.join(ACTION_MODES)}")
    for key, low, high in _WHOLE:
        if type(values[key]) is not int or not low <= values[key] <= high:
            raise ConfigError(f"{key}={values[key]!r}: choose a whole number from {low} to {high}")
    for key in REWARDS:
        if type(values[key]) not in (int, float) or not math.isfinite(values[key]):
            raise ConfigError(f"{key}={values[key]!r}: choose a finite number")
        values[key] = float(values[key])
    for key in ("cache", "reward_debug"):
        values[key] = _switch(key, values[key])
    width, height = values["width"], values["height"]
    missions = load_missions(values.pop("mission"), width, height)
    rosters = tuple(_roster(values.pop(key), key) for key in ("roster", "enemy_roster"))
    values["opponent"] = opponents_for(values["opponent"], rosters)
    for mission in missions:
        _check_zones(mission, rosters)
    return Options(missions=missions, rosters=rosters, **values)  # type: ignore[arg-type]


_DEFAULTS: Mapping[str, Any] = {
    "action_mode": "heads",
    "opponent": "greedy",
    "mission": "only_war",
    "roster": "patrol",
    "enemy_roster": "patrol",
    "rounds": 5,
    "width": 44,
    "height": 60,
    "cache": True,
    "reward_vp": 0.1,
    "reward_win": 1.0,
    "reward_damage": 0.0,
    "reward_progress": 0.0,
    "secondary_every": 4,
    "reward_debug": False,
}
_WHOLE = (
    ("rounds", 1, 20),
    ("width", MIN_SIDE, MAX_WIDTH),
    ("height", MIN_SIDE, MAX_HEIGHT),
    ("secondary_every", 1, 10_000),
)


def _switch(key: str, value: object) -> bool:
    if value in (True, False) and isinstance(value, bool):
        return value
    if value in ("on", "off"):
        return bool(value == "on")
    raise ConfigError(f"{key}={value!r}: choose on or off")


def _roster(value: object, key: str) -> tuple[Sheet, ...]:
    if not isinstance(value, str):
        raise ConfigError(f"{key}={value!r}: give the name of a shipped roster or the path of a .yaml file")
    return load_roster(value, key)


def _check_zones(mission: Mission, rosters: tuple[tuple[Sheet, ...], ...]) -> None:
    """Check that every unit has a free cell in its strip of the deployment zone, where the game places it."""
    for key, roster in zip(("roster", "enemy_roster"), rosters, strict=True):
        for unit in range(len(roster)):
            if not strip_cells(mission, len(roster), unit):
                raise ConfigError(
                    f"mission {mission.name}: no free cell for unit {unit + 1} of {key} in its strip of the deployment "
                    "zone; move the terrain, widen the board or take a smaller roster"
                )


def strip_cells(mission: Mission, num_units: int, unit: int) -> list[tuple[int, int]]:
    """The cells (x, y) without terrain in a unit's strip of the deployment zone, row by row, for side 0."""
    columns = range(unit * mission.width // num_units, (unit + 1) * mission.width // num_units)
    rows = range(mission.deployment_rows)
    return [(x, y) for y in rows for x in columns if not mission.in_terrain(x, y)]


def opponents_for(opponent: OpponentMix, rosters: Sequence[Sequence[Sheet]]) -> tuple[float, ...]:
    """As `cumulative_mix`. "self" needs equal numbers of units: otherwise the sides' actions differ in width."""
    cumulative = cumulative_mix(opponent)
    own, enemies = len(rosters[0]), len(rosters[1])
    if cumulative[SELF - 1] < 1.0 and own != enemies:
        raise ConfigError(
            f"opponent={opponent!r}: roster has {own} units, enemy_roster {enemies}; self-play needs equal numbers"
        )
    return cumulative


def cumulative_mix(opponent: OpponentMix) -> tuple[float, ...]:
    """Cumulative weights over OPPONENTS. A game draws u from [0, 1) and takes the first opponent with u < weight.

    Raises:
        ConfigError: unknown name, or a wrong weight.
    """
    if isinstance(opponent, str):
        opponent = {opponent: 1.0}
    if not isinstance(opponent, Mapping):
        raise ConfigError(f"opponent={opponent!r}: give one of {', '.join(OPPONENTS)}, or a mapping of name to weight")
    weights = [0.0] * len(OPPONENTS)
    for name, weight in opponent.items():
        if name not in OPPONENTS:
            raise ConfigError(f"opponent={name!r}: choose {', '.join(OPPONENTS)}{did_you_mean(str(name), OPPONENTS)}")
        if type(weight) not in (int, float) or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"opponent: the weight of {name!r} is {weight!r}, not a number >= 0")
        weights[OPPONENTS.index(name)] += weight
    total = sum(weights)
    if total <= 0:
        raise ConfigError(f"opponent={dict(opponent)!r}: at least one weight must be above 0")
    cumulative = [sum(weights[: index + 1]) / total for index in range(len(weights))]
    # A sum that is below 1 only by rounding becomes 1. Else an opponent of weight 0, or none, could be drawn.
    return tuple(1.0 if value >= 1.0 - 1e-12 else value for value in cumulative)
