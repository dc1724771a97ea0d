"""Missions: markers, terrain and deployment zones, read from YAML and fitted to the board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain_games.skirmish.sheets import check_keys, read_yaml

MAX_MARKERS = 6
MAX_TERRAIN = 16
MAX_MISSIONS = 8
MAX_WIDTH = 62  # a row of cells is one integer of 64 bits
MAX_HEIGHT = 96
MIN_SIDE = 8
MISSION_FOLDER = Path(__file__).parent / "missions"


@dataclass(frozen=True, slots=True)
class Mission:
    """A mission on a board of width × height cells. Turned by 180 degrees it is the same mission.

    Markers are points in half inches from the lower left corner, so that a marker may lie between cells; the centre of
    cell (x, y) is (2x + 1, 2y + 1). Terrain is rectangles of cells: left, bottom, right, top (right and top exclusive).
    """

    name: str
    width: int
    height: int
    deployment_rows: int
    markers: tuple[tuple[int, int], ...]
    terrain: tuple[tuple[int, int, int, int], ...]

    def in_terrain(self, x: int, y: int) -> bool:
        """Whether the cell lies in terrain."""
        return any(left <= x < right and bottom <= y < top for left, bottom, right, top in self.terrain)


def load_missions(value: object, width: int, height: int) -> tuple[Mission, ...]:
    """The missions of a game; each reset draws one. `value` is a name, a path, a mapping, or a list of these.

    Raises:
        ConfigError: names the file (or `mission`) and the key that is wrong.
    """
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not 1 <= len(values) <= MAX_MISSIONS:
        raise ConfigError(f"mission: give 1 to {MAX_MISSIONS} missions, got {len(values)}")
    missions = []
    for entry in values:
        if isinstance(entry, str):
            content, path = read_yaml(entry, MISSION_FOLDER, "mission")
            missions.append(_mission(content, Path(path).stem, f"mission: {path}", width, height))
        elif isinstance(entry, Mapping):
            name = str(entry.get("name", "custom"))
            missions.append(_mission(entry, name, f"mission {name}", width, height))
        else:
            raise ConfigError(
                f"mission={entry!r}: give a name, the path of a .yaml file, a mapping, or a list of these"
            )
    return tuple(missions)


def _mission(content: Mapping[str, Any], name: str, where: str, width: int, height: int) -> Mission:
    check_keys(content, {"board", "deployment_rows", "markers"}, {"name", "terrain"}, where)
    board = _row(content["board"], 2, f"{where}: board")
    if min(board) < 1:
        raise ConfigError(f"{where}: board={board}: give width and height in inches")
    across, along = width / board[0], height / board[1]
    rows = content["deployment_rows"]
    if type(rows) is not int or rows < 1:
        raise ConfigError(f"{where}: deployment_rows={rows!r}: choose a whole number of at least 1")
    markers: list[tuple[int, int]] = []
    for x, y in _rows(content["markers"], 2, f"{where}: markers"):
        if not (0 <= x <= board[0] and 0 <= y <= board[1]):
            raise ConfigError(f"{where}: markers: {[x, y]} is not on the board of {board} inches")
        point = (_round(2 * x * across), _round(2 * y * along))
        markers += [point, (2 * width - point[0], 2 * height - point[1])]
    terrain: list[tuple[int, int, int, int]] = []
    for x, y, wide, high in _rows(content.get("terrain", []), 4, f"{where}: terrain"):
        if not (x >= 0 and y >= 0 and 0 < wide <= board[0] - x and 0 < high <= board[1] - y):
            raise ConfigError(f"{where}: terrain: {[x, y, wide, high]} is not on the board of {board} inches")
        left, right = _round(x * across), _round((x + wide) * across)
        bottom, top = _round(y * along), _round((y + high) * along)
        box = (left, bottom, right, top)
        turned = (width - right, height - top, width - left, height - bottom)
        terrain += [box, turned] if right > left and top > bottom else []
    markers, terrain = list(dict.fromkeys(markers)), list(dict.fromkeys(terrain))  # turned copies may equal originals
    if not 1 <= len(markers) <= MAX_MARKERS:
        raise ConfigError(f"{where}: markers: {len(markers)} including copies turned by 180°; give 1 to {MAX_MARKERS}")
    if len(terrain) > MAX_TERRAIN:
        raise ConfigError(f"{where}: terrain: {len(terrain)} including copies turned by 180°; at most {MAX_TERRAIN}")
    rows = max(1, _round(rows * along))
    if 2 * rows + 1 > height:
        raise ConfigError(f"{where}: deployment_rows={rows} leave no row between the two zones on height={height}")
    return Mission(name, width, height, rows, tuple(markers), tuple(terrain))


def _round(value: float) -> int:
    return int(value + 0.5)


def _rows(value: object, length: int, where: str) -> list[list[float]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where} must be a list, got {value!r:.80}")
    return [_row(row, length, where) for row in value]


def _row(value: Any, length: int, where: str) -> list[float]:
    numbers = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length
    if not numbers or not all(type(number) in (int, float) for number in value):
        raise ConfigError(f"{where}: {value!r:.80} is not a list of {length} numbers")
    return list(value)
