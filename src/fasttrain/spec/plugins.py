"""Finds packages that extend fasttrain by entry points, and loads what they offer.

    [project.entry-points."fasttrain.games"]
    tictactoe = "my_games.tictactoe:GAME"

The package of a game or an integration is imported when its name is used, or when all are needed, for example to list
them. Engines and settings of commands are imported at the start, because they are parts of the configuration (`Part`).
Such a module may import `fasttrain.errors` and, of `fasttrain.spec`, `setting`, `plugins`, `groups` and `backends` at
its top; all else of fasttrain only inside functions. If two packages offer different things under one name, using the
name is an error. A command is a module with `main`; `-m` runs sweeps, and `report` draws the page of each finished run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.plain import to_dict
from fasttrain.spec.setting import build, defaults_of, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GAMES, ENGINES, INTEGRATIONS = "fasttrain.games", "fasttrain.engines", "fasttrain.integrations"
COMMANDS, SETTINGS = "fasttrain.commands", "fasttrain.settings"
WORDS = {GAMES: "game", ENGINES: "engine", INTEGRATIONS: "integration", COMMANDS: "command",
         SETTINGS: "group of settings"}  # fmt: skip
PARTS = (SETTINGS, ENGINES)  # groups of entry points that add settings to the configuration
OURS = (  # the packages of the distribution
    "fasttrain", "fasttrain_deploy", "fasttrain_engines", "fasttrain_games", "fasttrain_integrations",
    "fasttrain_kernels", "fasttrain_report", "fasttrain_studies", "fasttrain_vec",
)  # fmt: skip
OWN = {  # parts in fasttrain's own wheel: the keys, overrides and commands that need them, and what messages say
    "daemons": ("daemons env=go env=showdown env.backend=daemons", "plays with external engines"),
    "deploy": ("format play export", "belongs to fasttrain_deploy"),
    "studies": ("candidates seeds minutes gate tune sweep population doctor compare", "belongs to fasttrain_studies"),
}
RESERVED = ("gymnasium", "vector", "profile", "tuned", "hydra")  # names that a part cannot have
C = TypeVar("C")


class Owner(NamedTuple):
    """The commands that read a key (`play.`: all keys below it), and advice for users of other commands."""

    commands: tuple[str, ...]
    use: str


class Part:
    """Settings that a package adds to the configuration. A subclass overrides what differs. Engines are `Backend`s."""

    name: str = ""  # name of the entry point
    offered_as: tuple[str, ...] = (SETTINGS,)  # the groups of its entry point
    settings: type | None = None  # a frozen dataclass of `setting(…)` fields and groups of such, with defaults
    owners: ClassVar[Mapping[str, Owner]] = {}  # which commands read its settings
    rules: tuple[Callable[[Any], None], ...] = ()  # raise ConfigError if the configuration has wrong settings
    conf: Path | None = None  # a folder of YAML files, for example env/my_game.yaml

    def added(self) -> list[tuple[str, Any, Any]]:
        """The name, type and default of each field that the configuration gets."""
        if self.settings is None:
            return []
        hints = get_type_hints(self.settings)
        return [(one.name, hints[one.name], one) for one in fields(self.settings)]


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


def checked(group: str, name: str) -> Any:
    """Load a part and check it. Raises ConfigError if loading fails, or the part breaks a rule."""
    part = load(group, name)
    if not isinstance(part, Part) or group not in part.offered_as:
        kind = "plugins.Part" if group == SETTINGS else "backends.Backend"
        raise plugin_error(group, name, f"is no fasttrain.spec.{kind} but {part!r:.80}")
    if part.name != name:
        raise plugin_error(group, name, f"has the name {part.name!r}: its entry point must have the same name")
    try:
        if part.settings:
            to_dict(part.settings())
            build(made := make_dataclass("parts", part.added()), defaults_of(made))  # each default fits its type
        keys = {name for name, *_ in part.added()}
        owners = [key.partition(".")[0] in keys and isinstance(one, Owner) for key, one in part.owners.items()]
        if not all([*owners, *map(callable, part.rules)]):
            raise TypeError("owners must be an Owner for keys of its own, rules a tuple of functions")
        if part.conf and not Path(part.conf).is_dir():
            raise NotADirectoryError(part.conf)
    except Exception as error:  # a wrong class of settings may raise anything
        what = f"has wrong settings or files: {type(error).__name__}: {error}"
        raise plugin_error(group, name, what) from error
    return part


@functools.cache
def _parts(group: str) -> dict[str, Any]:
    """Installed parts of a group by name, fasttrain's own first. A part that cannot be used is an error message."""
    return {name: _part(group, name) for name in sorted(names(group), key=lambda name: name not in OWN)}


def _part(group: str, name: str) -> Any:
    try:
        return checked(group, name)
    except ConfigError as error:
        return str(error)


def parts(*groups: str) -> list[Any]:
    return [one for group in groups for one in _parts(group).values() if isinstance(one, Part)]


def keys_of(*groups: str) -> set[str]:
    """The names that parts have at the top of a configuration."""
    return {name for part in parts(*groups) for name, *_ in part.added()}


def broken_text() -> str:
    """Why installed parts cannot be used, for a message about a missing YAML file, which may be one of theirs."""
    return "".join(f"; {one}" for group in PARTS for one in _parts(group).values() if isinstance(one, str))


def missing_text(typed: str) -> str:
    """The message if the part for a typed key, override or command is not installed or is broken; else empty."""
    name = next((name for name, (words, _) in OWN.items() if typed in words.split()), typed)
    part = {**_parts(SETTINGS), **_parts(ENGINES)}.get(name)
    if part is None and name in OWN:
        again = outdated_metadata_hint() or "; install fasttrain again"
        return f"{typed} {OWN[name][1]}, which this installation of fasttrain lacks{again}"
    return part if isinstance(part, str) else ""


def without_unused(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's plain values without engines that the run does not use, and settings of other packages.

    So plan.json can be read on machines without these packages.
    """
    env, own = values.get("env"), {*" ".join(words for words, _ in OWN.values()).split()}
    used = {env.get("backend") if isinstance(env, Mapping) else None, *(own & keys_of(SETTINGS))}
    return {key: value for key, value in values.items() if key not in (own | keys_of(*PARTS)) - used}


def with_parts(config: type[C]) -> type[C]:
    """The configuration's class with the settings of all installed parts, fasttrain's own first."""
    taken = {*RESERVED, *dir(config)}
    added = list[tuple[str, Any, Any]]()
    for group, part in sorted(((g, p) for g in PARTS for p in parts(g)), key=lambda offer: offer[1].name not in OWN):
        if twice := sorted(taken & {part.name, *(name for name, *_ in part.added())}):
            what = "has a name that means something else in a configuration"
            what += f": {', '.join(twice)}" * (twice != [part.name])
            _parts(group)[part.name] = str(plugin_error(group, part.name, what))
        else:
            taken |= {name for name, *_ in part.added()}
            added += part.added()
    made = make_dataclass(config.__name__, added, bases=(config,), frozen=True, kw_only=True, slots=True)
    made.__module__, made.__doc__ = config.__module__, config.__doc__  # pickle finds the class by its module
    return made


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
