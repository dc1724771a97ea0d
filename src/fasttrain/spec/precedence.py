"""Precedence: command line > environment > files (profile, tuned) > the game's own > the algorithm's own > default.

`read` makes of what was typed and of the environment what Hydra is to compose; `settled` makes of what it composed the
values of a run, and says where each comes from. Own values of games and algorithms: `algorithms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.spec import plugins
from fasttrain.spec.backends import engines
from fasttrain.spec.checks import FLAGS, PATHS
from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.removed import REMOVED, lookup, put, taken
from fasttrain.spec.setting import did_you_mean, settings_of
from fasttrain.terminal import one_line

TYPED = "command line"  # as the source of a value
OUTPUT_KEYS = ("hydra.run.dir", "hydra.sweep.dir")  # of a single command, of a sweep
OPTIONS_WITH_VALUE = (
    "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p",
    "--info", "-i", "--test",
)  # fmt: skip
SETTINGS = dict(settings_of(Config))
FREE = tuple(key for key, one in SETTINGS.items() if one.default_factory is not MISSING)  # keys of the user's own
# What Hydra's grammar reads without quotes: escaped characters, references, plain letters.
BARE_TEXT = re.compile(r"(?:\\[\\()\[\]{}:=,\s]|\$\{[^}]*\}|[\w/\-+.$%*@?|:\s\\])*", re.ASCII)
PIECES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\$\{[^}]*\}|[^,\[\]{}()'"])+|.""", re.DOTALL)


class Alias(NamedTuple):
    """Another name of a setting, and what its values are there; None: the same. A value of None changes nothing."""

    key: str
    values: Mapping[str, str | None] | None = None
    usual: tuple[str, ...] = ()  # its default there, which changes nothing
    refines: bool = False  # the setting is a switch, which becomes this where it is on or auto


# SB3's places of what is a flag here, and the names that systems of users have for one.
ALIASES = {
    "algo.batch_size": Alias("batch_size"),
    "algo.learning_starts": Alias("warmup_steps"),
    "algo.gradient_steps": Alias("updates_per_step"),
    "algo.seed": Alias("seed"),
    "algo.device": Alias("device"),
    "num_workers": Alias("workers"),
    "use_subproc_envs": Alias("workers", {"true": None, "false": "0"}),
    "use_subproc_vec_env": Alias("workers", {"true": None, "false": "0"}),
    "use_pinned_memory": Alias("pin_memory"),
    "use_torch_compile": Alias("use_compile"),
    "batch_inference": Alias("inference_batch_size", {"true": None, "false": "1"}),
    "force_dummy_vec_env": Alias("vec_env", {"true": "dummy", "false": None}),
    "amp_dtype": Alias("use_amp", usual=("bfloat16",), refines=True),
    "compile_mode": Alias("use_compile", usual=("default",), refines=True),
}
COMPILES_FIRST = {"FASTTRAIN_ENGINE_SWITCH_AT": "0"}  # in the environment of runs that are compared or measured
PREFIX = "FASTTRAIN_"  # of the environment variable of each flag, and of each other name of one
# Those that users' own systems export are read without the prefix too. Others, such as ENGINE, say nothing of a run.
BARE = (
    "num_envs", "use_subproc_envs", "use_subproc_vec_env", "force_dummy_vec_env", "updates_per_step", "batch_size",
    "warmup_steps", "use_amp", "use_compile", "use_torch_compile", "prefetch", "pin_memory", "use_pinned_memory",
    "batch_inference", "train_log_enabled", "train_log_to_console", "train_log_to_file", "log_every", "reward_debug",
)  # fmt: skip


def translated(name: str, value: object) -> tuple[str, Any]:
    """Key and value for an alias and its value. Raises ConfigError: it has no such value."""
    key, values = ALIASES[name][:2]
    if values is None:
        return key, None if str(value) in ALIASES[name].usual else value
    words = {"1": "true", "on": "true", "yes": "true", "0": "false", "off": "false", "no": "false"}
    given = str(value).strip().lower()
    if (given := words.get(given, given)) not in values:
        ways = ", ".join(f"{old}: {new}" for old, new in values.items() if new is not None)
        raise ConfigError(f"{name}={value}: another name for {key} ({ways}); use {key}=…")
    return key, values[given]


def is_refined(name: str, value: object) -> bool:
    """Whether an alias says how a setting of that value is on."""
    return ALIASES[name].refines and str(value).lower() in ("on", "true", "yes", "1", "auto")


def key_of(override: str) -> str:
    """The dotted key of `num_envs=4`, `+profile=speed`, `~env.kwargs.size`; empty for an option such as `-m`."""
    if override.startswith("-"):
        return ""
    return override.split("=", 1)[0].lstrip("+~")


def given_twice(group: str, overrides: Sequence[str]) -> str:
    """The message for a group that is typed more than once."""
    typed = [override for override in overrides if key_of(override) == group]
    names = ",".join(override.partition("=")[2] for override in typed)
    both = f", or use both: '+{group}=[{names}]'" if group in ("profile", "tuned") else ""
    return f"{' '.join(typed)}: {group} is given {len(typed)} times; remove one{both}"


class Given(NamedTuple):
    """What a user asked for: overrides for Hydra, and the source of each key. `values` are Python objects that a
    caller of `train(…)` passes, which cannot be written as overrides."""

    overrides: list[str]
    sources: dict[str, str]  # key → command line, environment
    values: Mapping[str, Any] = {}


class File(NamedTuple):
    """One of the files of which a configuration was composed, and the dotted keys that it sets."""

    path: str
    keys: tuple[str, ...]
    source: str = ""  # where it says what a value's source is: `profile NAME`, `tuned NAME`, `config NAME`


def read(typed: Sequence[str], environment: Mapping[str, str], swept: bool = False) -> Given:
    """What Hydra is to compose of settings that were typed, and of the environment, over which they win.

    `profile=speed` becomes `+profile=speed`; SB3's places of flags become the flags (`ALIASES`); naming an env by
    `env.id` or `env.entry_point` alone selects the plain `env=gym` group first, `env.game=NAME` the game's own;
    `env.kwargs.x=1`, `algo.kwargs.x=1` and `algo.policy_kwargs.x=1` need no plus. Raises ConfigError: both names of one
    setting are given, with different values; or a game without its files.
    """
    keys = {one_name(key_of(text)) for text in typed}
    plain = _env_of(keys, typed)
    exported = by_one_name([NamedValue(name, environment[one]) for name, one in variables(environment).items()])
    exported = [one for one in exported if one.key not in keys]
    said = by_one_name([NamedValue(key_of(text), text.partition("=")[2], text) for text in typed])
    chosen = [one.value for one in said if one.key == "algo"]
    swept_over = [name for name in re.findall(r"\w+", chosen[-1]) if name in ALGO_CLASSES] if chosen and swept else []
    wanted = [_as_hydra_wants_it(one.text, swept_over) for one in said]
    wanted.sort(key=lambda text: key_of(text) == "tuned")  # wins over the profile
    sources = {one.key: "environment" for one in exported}
    sources |= {key: TYPED for key in map(key_of, [*plain, *wanted]) if not key.startswith("hydra")}
    return Given([*plain, *(one.text for one in exported), *wanted], sources)


def _env_of(keys: set[str], typed: Sequence[str]) -> list[str]:
    """The group of `env=` that those who typed `keys` need not name."""
    game = next((text.partition("=")[2] for text in reversed(typed) if key_of(text) == "env.game"), "")
    installed = {*game.split(",")} & {*plugins.names(plugins.GAMES)} if game else set()
    if game in installed and "env" not in keys:
        return [f"env={game}"]
    if installed and ("env" not in keys or "env=gym" in typed):
        raise ConfigError(f"env.game={game}: type env={game} in place of it, which takes the game's files too")
    return ["env=gym"] if keys & {"env.id", "env.entry_point", "env.game"} and "env" not in keys else []


def settled(
    values: Mapping[str, Any], files: Iterable[File], given: Given, known: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a run, each by its one name, and where those come from that are not by default.

    What was typed wins over the environment, that over files, of which the last one wins. What the game and the
    algorithm know better (`own`) holds where none of these says anything. `values`: what Hydra composed of `files` and
    of the overrides of `given`; `known`: sources of the values of a run that is repeated.
    """
    found, sources, last = dict(values), dict(known or {}), dict[str, str]()
    for file in files:
        for name in file.keys:
            last[one_name(name)] = name
            sources |= {one_name(name): file.source} if file.source else {}
    for name, alias in ALIASES.items():
        if (value := taken(found, name)) is None:
            continue
        key, meant = translated(name, value)
        holds = is_refined(name, lookup(found, key)) if alias.refines else last.get(key, name) == name
        if meant is not None and holds and (alias.refines or key not in given.sources):
            put(found, key, meant)
    for one in by_one_name([NamedValue(key, value) for key, value in given.values.items()]):
        put(found, one.key, one.value)
    return found, sources | given.sources


class NamedValue(NamedTuple):
    """A setting by one of its names, with its value."""

    key: str
    value: Any
    typed: str = ""

    @property
    def text(self) -> str:
        """The setting as an override."""
        return self.typed or f"{self.key}={self.value}"


def by_one_name(said: Sequence[NamedValue]) -> list[NamedValue]:
    """With settings in place of their other names: `batch_size=64` for `algo.batch_size=64`. Raises ConfigError: two
    names of one setting are given, with different values."""
    kept = [one for one in said if one.key not in ALIASES]
    found = {one.key: one for one in kept}
    for one in (each for each in said if each.key in ALIASES):
        key, meant = translated(one.key, one.value)
        other = found.get(key)
        if meant is None:
            continue
        if other is not None and is_refined(one.key, other.value):
            kept = [*(each for each in kept if each.key != key), NamedValue(key, meant)]
        elif other is None or other.key == one.key:
            kept.append(NamedValue(key, meant))
            found[key] = NamedValue(one.key, meant, one.text)
        elif other.value != meant:
            both = f"{one.text} contradicts {other.text}"
            raise ConfigError(f"{both}: they are one setting ({key}); remove one of them")
    return kept


def one_name(key: str) -> str:
    """The setting that a name stands for."""
    return ALIASES[key].key if key in ALIASES else key


def with_names_as_typed(message: str, arguments: Sequence[str], environment: Mapping[str, str], here: str = "") -> str:
    """The message with overrides and paths as they were typed, and with the name of the argument or of the environment
    variable where a setting has its value by another name. `here`: the folder that typed paths begin in."""
    overrides = split_options(arguments)[1]
    for text in overrides:
        with suppress(ConfigError):
            message = message.replace(_as_hydra_wants_it(text), text).replace(f"++{text}", text)
        if here and key_of(text) in PATHS and (path := text.partition("=")[2].strip("'\"").rstrip("/")):
            behind = "[\\w/-]" if path == "." else "[\\w-]"
            whole = rf"(?<![\w./-]){re.escape(str(Path(here, path)))}(?!{behind})"
            message = re.sub(whole, path.replace("\\", r"\\"), message)

    def is_about(name: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(one_name(name))}([=:]| is no setting)", message) is not None

    named = [text for text in overrides if (name := key_of(text)) in ALIASES and name not in message and is_about(name)]
    message += f" (typed: {', '.join(named)})" if named else ""
    typed = {one_name(key_of(text)) for text in overrides}
    found = [
        f"{one}={one_line(environment[one], 60)}"
        for name, one in variables(environment).items()
        if f"{one}=" not in message and one_name(name) not in typed and (is_about(name) or f"{name}=" in message)
    ]
    return f"{message} (environment: {', '.join(found)})" if found else message


def _as_hydra_wants_it(override: str, algorithms: Sequence[str] = ()) -> str:
    """Profiles and tuned settings join the defaults list; an argument for the env's constructor may be new to the YAML,
    and so may a key that each of the `algorithms` swept over has. Raises ConfigError: a setting is to be deleted, which
    would give it its default without a word."""
    key = key_of(override)
    free = key.startswith(tuple(f"{group}." for group in FREE))
    if override.startswith("~"):
        if not key.startswith((*FREE, "hydra")):
            raise ConfigError(f"{override}: a setting cannot be taken away; remove it, or give it a value")
        return override
    override = _in_quotes_where_needed(override)
    if override.startswith(("profile=", "tuned=", *(f"{one.name}=" for one in engines()))):
        return "+" + override
    own = [{f"algo.{name}" for name, _ in settings_of(ALGO_CLASSES[one])} for one in algorithms]
    if free or key in FREE or (own and key in set.intersection(*own)):
        return "++" + override.lstrip("+")
    return override


def _in_quotes_where_needed(override: str) -> str:
    """`env.kwargs.path='~/data'` for `env.kwargs.path=~/data`: texts that Hydra reads in quotes alone, in lists too."""
    key, _, value = override.partition("=")
    if BARE_TEXT.fullmatch(value) or re.match(r"\w+\(", value):
        return override
    result, around = f"{key}=", [""]
    for piece in PIECES.findall(value):
        around += [piece] if piece in "[{(" else []
        around = around[:-1] or [""] if piece in "]})" else around
        head, colon, text = piece.partition(":") if around[-1] == "{" and piece[0] not in "'\"" else ("", "", piece)
        if text[0:1] in ("", "'", '"', *"[]{}(),") or BARE_TEXT.fullmatch(text):
            result += piece
            continue
        bare = text.strip()
        last = re.sub(r"\\+$", lambda found: found[0] * 2, bare)
        result += head + colon + text.replace(bare, f"'{last}'")
    return result.strip()


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options with their values, and overrides. argparse wants the overrides in one piece; people mix them."""
    options, overrides, takes_value = list[str](), list[str](), False
    for argument in arguments:
        if takes_value or argument.startswith("-"):
            options.append(argument)
            takes_value = not takes_value and argument in OPTIONS_WITH_VALUE
        else:
            overrides.append(argument)
    return options, overrides


def without_folder(arguments: Sequence[str]) -> list[str]:
    """What was typed, without the output folder."""
    return [text for text in arguments if key_of(text) not in ("on_existing", *OUTPUT_KEYS)]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings' names, and the environment variables that give them values: `batch_size` → `BATCH_SIZE`. Raises
    ConfigError: a variable with the prefix is close to a flag's name, and none."""
    flags = [flag.name for flag in FLAGS]
    found = {name: name.upper() for name in BARE if environment.get(name.upper())}
    for variable in environment:
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or environment[variable] in ("", COMPILES_FIRST.get(variable)):
            continue
        if name in (*flags, *ALIASES, *REMOVED):  # of one that is no more Hydra's error tells what holds
            found[name] = variable
        elif name in SETTINGS:
            raise ConfigError(
                f"environment variable {variable}: only flags have one; type {name}={environment[variable]}"
            )
        elif hint := did_you_mean(name, flags):
            hint = re.sub(r"'(\w+)'", lambda flag: f"'{PREFIX}{flag[1].upper()}'", hint)
            raise ConfigError(f"environment variable {variable}: no flag has this name{hint}")
    return found
