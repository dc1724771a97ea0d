"""Rosters: the properties of each unit of a side, read from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fasttrain.batch import Record
from fasttrain.errors import ConfigError
from fasttrain.spec.setting import did_you_mean

MAX_UNITS = 8
ROSTER_FOLDER = Path(__file__).parent / "rosters"

# Key → smallest and largest value, for weapons and units. Save 7: no save; control 0: the unit cannot hold a marker.
WEAPON_LIMITS = {"attacks": (1, 20), "skill": (2, 6), "strength": (1, 30), "ap": (0, 6), "damage": (1, 20)}
RANGED_LIMITS = {"range": (1, 100), **WEAPON_LIMITS}
SHEET_LIMITS = {
    "models": (1, 30),
    "wounds": (1, 40),
    "move": (1, 24),
    "toughness": (1, 30),
    "save": (2, 7),
    "invulnerable": (0, 6),
    "leadership": (2, 12),
    "control": (0, 20),
}


@dataclass(frozen=True, slots=True)
class Weapon:
    """A weapon. With range 0 it is a melee weapon: it reaches the enemies within 1.5 inches."""

    range: int
    attacks: int
    skill: int
    strength: int
    ap: int
    damage: int


@dataclass(frozen=True, slots=True)
class Sheet:
    """The constant properties of a unit. `wounds` are per model, `move` is in inches."""

    name: str
    models: int
    wounds: int
    move: int
    toughness: int
    save: int
    invulnerable: int
    leadership: int
    control: int
    ranged: Weapon
    melee: Weapon

    @property
    def health(self) -> int:
        """Wounds of the whole unit."""
        return self.models * self.wounds


def shipped(folder: Path) -> list[str]:
    """The names of the YAML files in `folder`."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_yaml(name: str, folder: Path, key: str) -> tuple[Mapping[str, Any], str]:
    """Read the mapping in a shipped file (by name) or in a user's file (by path). Also returns a name for messages.

    Raises:
        ConfigError: there is no such file, or it has no YAML mapping.
    """
    path = folder / f"{name}.yaml"
    if name not in shipped(folder):
        path = Path(name).expanduser()
        if path.suffix not in (".yaml", ".yml") or not path.is_file():
            names = shipped(folder)
            raise ConfigError(
                f"{key}={name!r}: no such file{did_you_mean(name, names)}; choose {', '.join(names)}, "
                "or give the path of a .yaml file"
            )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{key}: {path} must hold a mapping, it holds {content!r:.80}")
    return content, str(path)


def check_keys(content: Mapping[str, Any], needed: set[str], optional: set[str], where: str) -> None:
    """Raise ConfigError for an unknown or a missing key."""
    for name in content:
        if name not in needed | optional:
            raise ConfigError(f"{where}: unknown key {name!r}{did_you_mean(str(name), needed | optional)}")
    missing = sorted(needed - set(content))
    if missing:
        raise ConfigError(f"{where}: missing key {missing[0]!r}")


def load_roster(name: str, key: str) -> tuple[Sheet, ...]:
    """The units of a shipped roster or of a user's file. `key`: the argument that named it.

    Raises:
        ConfigError: the message names the file, the unit and the wrong key.
    """
    content, path = read_yaml(name, ROSTER_FOLDER, key)
    where = f"{key}: {path}"
    check_keys(content, {"units"}, set(), where)
    units = content["units"]
    if not isinstance(units, list) or not 1 <= len(units) <= MAX_UNITS:
        count = len(units) if isinstance(units, list) else repr(units)[:40]
        raise ConfigError(f"{where}: units must be a list of 1 to {MAX_UNITS}, got {count}")
    return tuple(_sheet(unit, f"{where}: unit {number}") for number, unit in enumerate(units, start=1))


def _sheet(unit: Record, where: str) -> Sheet:
    if not isinstance(unit, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {unit!r:.80}")
    where = f"{where} ({unit.get('name', 'without a name')})"
    check_keys(unit, {"name", "ranged", "melee", *SHEET_LIMITS}, set(), where)
    if not isinstance(unit["name"], str) or not unit["name"]:
        raise ConfigError(f"{where}: name must be a text, got {unit['name']!r:.80}")
    numbers = _numbers({name: unit[name] for name in SHEET_LIMITS}, SHEET_LIMITS, where)
    ranged = _weapon(unit["ranged"], RANGED_LIMITS, f"{where}: ranged")
    melee = _weapon(unit["melee"], WEAPON_LIMITS, f"{where}: melee")
    if numbers["invulnerable"] == 1:
        raise ConfigError(f"{where}: invulnerable=1: choose 0 (none) or 2 to 6")
    return Sheet(name=unit["name"], ranged=ranged, melee=melee, **numbers)


def _weapon(weapon: object, limits: Mapping[str, tuple[int, int]], where: str) -> Weapon:
    if not isinstance(weapon, Mapping):
        raise ConfigError(f"{where} must be a mapping of {', '.join(limits)}, got {weapon!r:.80}")
    check_keys(weapon, set(limits), set(), where)
    return Weapon(**{"range": 0, **_numbers(weapon, limits, where)})


def _numbers(content: Mapping[str, Any], limits: Mapping[str, tuple[int, int]], where: str) -> dict[str, int]:
    for name, value in content.items():
        low, high = limits[name]
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{where}: {name}={value!r}: choose a whole number from {low} to {high}")
    return {name: int(value) for name, value in content.items()}
