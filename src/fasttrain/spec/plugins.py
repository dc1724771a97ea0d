"""Packages that attach to fasttrain by entry points: which names they offer, and what a name stands for.

    [project.entry-points."fasttrain.games"]
    tictactoe = "my_games.tictactoe:GAME"

The package of a game or an integration is imported when one of its names is used, or where all are asked: to list
them, to find whose an id is, for files of the user's that may build upon any. Engines are imported at the start: their
settings are a part of the configuration. A name that two distributions claim for different things belongs to neither:
whoever uses it is told to uninstall one.
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
WORDS = {GAMES: "game", ENGINES: "engine", INTEGRATIONS: "integration"}
OURS = ("fasttrain", "fasttrain_engines", "fasttrain_games")  # what the distribution `fasttrain` lets one import


def names(group: str) -> list[str]:
    """What installed packages offer in a group, sorted; imports none of them."""
    return sorted(_offered(tuple(sys.path))[group])


def load(group: str, name: str) -> Any:
    """What a name in a group stands for; imports its package. Raises ConfigError: no package offers it, two do, or the
    one that does cannot be imported."""
    word, known = WORDS[group], _offered(tuple(sys.path))[group]
    if name not in known:
        there = f"there are {', '.join(sorted(known))}" if known else f"no package that offers any {word} is installed"
        raise ConfigError(f"no {word} is called {name!r}{hint(name, known)}; {there}")
    first, *others = known[name]
    if others:
        claims = " and ".join(f"{_package(one)} ({one.value})" for one in known[name])
        raise ConfigError(f"the {word} {name!r} is claimed by two packages, {claims}; uninstall one of them")
    try:
        return first.load()
    except (Exception, SystemExit) as error:
        why = str(error).strip().split("\n")[0]
        told = f"cannot be loaded from {first.value}: {type(error).__name__}{': ' * bool(why)}{why}"
        raise fault(group, name, told) from error


def fault(group: str, name: str, what: str) -> ConfigError:
    """The error that names the package whose fault it is."""
    package = _package(_offered(tuple(sys.path))[group][name][0])
    told = f"the {WORDS[group]} {name!r} of the package {package} {what}"
    return ConfigError(f"{told}; install {package} again, or uninstall it")


def hint(name: str, known: Iterable[str]) -> str:
    """What to say beside that nobody offers a name: the closest one, and that fasttrain's own are missing."""
    return did_you_mean(name, known) + outdated()


def outdated() -> str:
    """What to say where fasttrain's source offers names and its distribution none; empty where it offers some."""
    offers = [one for group in _offered(tuple(sys.path)).values() for claims in group.values() for one in claims]
    if any(_package(one) == OURS[0] for one in offers):
        return ""
    again = "pip install -e . once more (python3 scripts/run.py does so)"
    return f"; fasttrain's installed metadata is missing, or older than its source: {again}"


def loaded(group: str) -> dict[str, Any]:
    """What all names of a group stand for, but for those that cannot be loaded: whoever uses one is told."""
    found = {}
    for name in names(group):
        with suppress(ConfigError):
            found[name] = load(group, name)
    return found


@functools.cache
def _offered(path: tuple[str, ...]) -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """By group and name the entry points on `sys.path`, those that name the same thing once. Of a distribution that is
    there twice the first on the path counts."""
    from importlib.metadata import entry_points  # which `--help` need not load

    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
    everything = entry_points()
    for group in WORDS:
        offers = found.setdefault(group, {})
        for one in everything.select(group=group):
            there = offers.get(one.name, ())
            if one.value not in [other.value for other in there]:
                offers[one.name] = (*there, one)
    return found


def _package(one: EntryPoint) -> str:
    return str(one.dist.name) if one.dist is not None else one.value.partition(".")[0]
