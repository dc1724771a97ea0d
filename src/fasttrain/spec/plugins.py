"""Finds packages that extend fasttrain by entry points, and loads what they offer.

    [project.entry-points."fasttrain.games"]
    tictactoe = "my_games.tictactoe:GAME"

The package of a game or an integration is imported when its name is used, or when all are needed, for example to list
them. Engines are imported at the start, because their settings are a part of the configuration. If two packages offer
different things under one name, using the name is an error. A command is a module with `main`; `-m` is the one that
runs sweeps, and `report` draws the page of each finished run (`write_report`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GAMES, ENGINES, INTEGRATIONS = "fasttrain.games", "fasttrain.engines", "fasttrain.integrations"
COMMANDS = "fasttrain.commands"
WORDS = {GAMES: "game", ENGINES: "engine", INTEGRATIONS: "integration", COMMANDS: "command"}
OURS = (  # the packages of the distribution
    "fasttrain", "fasttrain_deploy", "fasttrain_engines", "fasttrain_games", "fasttrain_integrations",
    "fasttrain_kernels", "fasttrain_report", "fasttrain_studies", "fasttrain_vec",
)  # fmt: skip


def names(group: str) -> list[str]:
    """All names in a group, sorted. Imports none of the packages."""
    return sorted(_entry_points(tuple(sys.path))[group])


def load(group: str, name: str) -> Any:
    """Import the object that a name in a group stands for.

    Raises ConfigError: no package offers the name, two packages do, or the import fails.
    """
    word, known = WORDS[group], _entry_points(tuple(sys.path))[group]
    if name not in known:
        names = f"there are {', '.join(sorted(known))}" if known else f"no package that offers any {word} is installed"
        raise ConfigError(f"no {word} is called {name!r}{hint(name, known)}; {names}")
    first, *others = known[name]
    if others:
        claims = " and ".join(f"{_package(one)} ({one.value})" for one in known[name])
        raise ConfigError(f"the {word} {name!r} is offered by two packages, {claims}; uninstall one of them")
    try:
        return first.load()
    except (Exception, SystemExit) as error:
        reason = str(error).strip().split("\n")[0]
        what = f"cannot be loaded from {first.value}: {type(error).__name__}{': ' * bool(reason)}{reason}"
        raise plugin_error(group, name, what) from error


def plugin_error(group: str, name: str, what: str) -> ConfigError:
    """The error about a fault of the package that offers a name."""
    package = _package(_entry_points(tuple(sys.path))[group][name][0])
    text = f"the {WORDS[group]} {name!r} of the package {package} {what}"
    return ConfigError(f"{text}; install {package} again, or uninstall it")


def hint(name: str, known: Iterable[str]) -> str:
    """Hints for a name that no package offers: a similar name, and whether fasttrain's own entry points are missing."""
    return did_you_mean(name, known) + outdated_metadata_hint()


def outdated_metadata_hint() -> str:
    """The hint that entry points of fasttrain's own are missing; empty if each group has some."""
    groups = _entry_points(tuple(sys.path)).values()
    if all(OURS[0] in {_package(one) for claims in group.values() for one in claims} for group in groups):
        return ""
    again = "pip install -e . once more (python3 scripts/run.py does so)"
    return f"; fasttrain's installed metadata is missing, or older than its source: {again}"


def load_all(group: str) -> dict[str, Any]:
    """All objects of a group by name, except those that cannot be loaded."""
    objects = {}
    for name in names(group):
        with suppress(ConfigError):
            objects[name] = load(group, name)
    return objects


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """The entry points on `sys.path` by group and name, without repetitions of the same object."""
    from importlib.metadata import entry_points  # imported here, because `--help` does not need it

    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
    everything = entry_points()
    for group in WORDS:
        offers = found.setdefault(group, {})
        for one in everything.select(group=group):
            others = offers.get(one.name, ())
            if one.value not in [other.value for other in others]:
                offers[one.name] = (*others, one)
    return found


def _package(one: EntryPoint) -> str:
    return str(one.dist.name) if one.dist is not None else one.value.partition(".")[0]
