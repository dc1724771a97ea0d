"""Precedence: command line > environment > files (profile, tuned) > the game's own > the algorithm's own > default.

`read` turns typed overrides and environment variables into overrides for Hydra. `effective_values` turns what Hydra
composed into the values of a run, with the source of each. `algorithms` has the games' and algorithms' own values.
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
from fasttrain.spec.checks import FLAGS, PATHS
from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.removed import REMOVED, lookup, pop_key, set_key
from fasttrain.spec.setting import did_you_mean, settings_of
from fasttrain.terminal import one_line

TYPED = "command line"  # the source of a typed value
OUTPUT_KEYS = ("hydra.run.dir", "hydra.sweep.dir")  # the folder of a single run, and of a sweep
OPTIONS_WITH_VALUE = (
    "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p",
    "--info", "-i", "--test",
)  # fmt: skip
SETTINGS = dict(settings_of(Config))
FREE = tuple(key for key, one in SETTINGS.items() if one.default_factory is not MISSING)  # mappings that take any keys
# Text that Hydra's grammar reads without quotes: escaped characters, references, plain letters.
BARE_TEXT = re.compile(r"(?:\\[\\()\[\]{}:=,\s]|\$\{[^}]*\}|[\w/\-+.$%*@?|:\s\\])*", re.ASCII)
PIECES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\$\{[^}]*\}|[^,\[\]{}()'"])+|.""", re.DOTALL)


class Alias(NamedTuple):
    """Another name of a setting, with the setting's own values or with those in `values`."""

    key: str
    values: Mapping[str, str | None] | None = None  # value of the alias → value of the setting, None: no change
    usual: tuple[str, ...] = ()  # values of the alias that change nothing
    refines: bool = False  # True: where the setting is on or auto, the alias's value replaces it


# Other names of settings: those of SB3, and those that users' scripts have.
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
SETTING_OF = {name: alias.key for name, alias in ALIASES.items()}
SHORT = {"population": "population.size", "cluster": "cluster.engine"}  # a group with a plain value: population=8
COMPILES_FIRST = {"FASTTRAIN_ENGINE_SWITCH_AT": "0"}  # compiles all kernels before the first step, for comparisons
PREFIX = "FASTTRAIN_"  # beginning of environment variables of flags and aliases
# These variables are also read without the prefix. Others, such as ENGINE, may belong to another program.
BARE = (
    "num_envs", "use_subproc_envs", "use_subproc_vec_env", "force_dummy_vec_env", "updates_per_step", "batch_size",
    "warmup_steps", "use_amp", "use_compile", "use_torch_compile", "prefetch", "pin_memory", "use_pinned_memory",
    "train_log_enabled", "train_log_to_console", "train_log_to_file", "log_every", "reward_debug",
)  # fmt: skip


def translate_alias(name: str, value: object) -> tuple[str, Any]:
    """Key and value of the setting for an alias's value; None: no change. Raises ConfigError if `value` is wrong."""
    key, values = ALIASES[name][:2]
    if values is None:
        return key, None if str(value) in ALIASES[name].usual else value
    words = {"1": "true", "on": "true", "yes": "true", "0": "false", "off": "false", "no": "false"}
    text = str(value).strip().lower()
    if (text := words.get(text, text)) not in values:
        ways = ", ".join(f"{old}: {new}" for old, new in values.items() if new is not None)
        raise ConfigError(f"{name}={value}: wrong value; {name} is another name for {key} ({ways}); use {key}=…")
    return key, values[text]


def is_refined(name: str, value: object) -> bool:
    """Whether the alias `name` replaces this value of its setting: the alias `refines`, and the value is on or auto."""
    return ALIASES[name].refines and str(value).lower() in ("on", "true", "yes", "1", "auto")


def key_of(override: str) -> str:
    """The dotted key of an override such as `num_envs=4`, `+profile=speed`, `~env.kwargs.size`; empty for an option."""
    if override.startswith("-"):
        return ""
    return override.split("=", 1)[0].lstrip("+~")


def typed_twice_message(group: str, overrides: Sequence[str]) -> str:
    """The message for a group that is typed more than once."""
    typed = [override for override in overrides if key_of(override) == group]
    if len(typed) == 1:  # beside the value in the list of defaults
        return f"{typed[0]}: write {typed[0].lstrip('+')}"
    names = ",".join(override.partition("=")[2] for override in typed)
    both = f", or use both: '+{group}=[{names}]'" if group in ("profile", "tuned") else ""
    return f"{' '.join(typed)}: {group} is given {len(typed)} times; remove one{both}"


class UserInput(NamedTuple):
    """The user's settings from all sources, in the form that Hydra needs."""

    overrides: list[str]
    sources: dict[str, str]  # key → where its value comes from: "command line" or "environment"
    values: Mapping[str, Any] = {}  # Python objects passed to `train(…)`; overrides cannot express them


class File(NamedTuple):
    """A configuration file that was composed, and the dotted keys that it sets."""

    path: str
    keys: tuple[str, ...]
    source: str = ""  # where its values come from: `profile NAME`, `tuned NAME`, `config NAME`


def with_its_file(message: str, files: Iterable[File], folder: str, typed: Mapping[str, str]) -> str:
    """`message` about a setting. If the user did not type it, the file that sets it comes first: a file in `folder` by
    its path, a shipped file of `tuned` as `tuned=NAME`."""
    found = re.match(r"(?:unknown key ')?([\w.]+)", message)
    key = found[1] if found else ""
    own = [file for file in files if file.source.startswith("tuned") or Path(file.path).is_relative_to(folder)]
    setters = [file for file in own if any(f"{one}.".startswith(f"{key}.") for one in file.keys)]
    if not key or key in typed or not setters:
        return message
    setter = setters[-1]
    return f"{setter.path if Path(setter.path).is_relative_to(folder) else setter.source.replace(' ', '=')}: {message}"


def read(
    typed: Sequence[str], environment: Mapping[str, str], swept: bool = False, values: Mapping[str, Any] | None = None
) -> UserInput:
    """Turn typed overrides and environment variables into overrides for Hydra. Typed ones win.

    `profile=speed` becomes `+profile=speed`. Aliases become their settings. `env.id` or `env.entry_point` without `env`
    selects the group `env=gym`, and `env.game=NAME` the game's group. `env.kwargs.x=1`, `algo.kwargs.x=1` and
    `algo.policy_kwargs.x=1` need no plus.

    Args:
        swept: values may be lists of a sweep.
        values: further settings, by any of their names, as Python objects.

    Raises:
        ConfigError: two names of one setting have different values, or `env.game` names a game that needs `env=NAME`.
    """
    named = by_setting_name([NamedValue(key_of(text), text.partition("=")[2], text) for text in typed])
    keys, values = {SETTING_OF.get(key_of(text), key_of(text)) for text in typed}, values or {}
    groups = _env_group(keys, typed)
    variable = {name: environment[one] for name, one in variables(environment).items()}
    exported = by_setting_name([NamedValue(name, value, f"{name}={value}") for name, value in variable.items()])
    exported = [one for one in exported if one.key not in keys]
    algos = [one.value for one in named if one.key == "algo"]
    swept_over = [name for name in re.findall(r"\w+", algos[-1]) if name in ALGO_CLASSES] if algos and swept else []
    overrides = [_for_hydra(one.text, swept_over) for one in named]
    overrides.sort(key=lambda text: key_of(text) == "tuned")  # tuned values win over the profile
    sources = {one.key: "environment" for one in exported}
    sources |= {key: TYPED for key in map(key_of, [*groups, *overrides]) if not key.startswith("hydra")}
    sources |= {SETTING_OF.get(key, key): TYPED for key in values}
    return UserInput([*groups, *(one.text for one in exported), *overrides], sources, values)


def _env_group(keys: set[str], typed: Sequence[str]) -> list[str]:
    """The override `env=…` that the typed keys imply, if any."""
    game = next((text.partition("=")[2] for text in reversed(typed) if key_of(text) == "env.game"), "")
    installed = {*game.split(",")} & {*plugins.names(plugins.GAMES)} if game else set()
    if game in installed and "env" not in keys:
        return [f"env={game}"]
    if installed and ("env" not in keys or "env=gym" in typed):
        raise ConfigError(f"env.game={game}: type env={game} instead, which also uses the game's files")
    return ["env=gym"] if keys & {"env.id", "env.entry_point", "env.game"} and "env" not in keys else []


def effective_values(
    values: Mapping[str, Any], files: Iterable[File], given: UserInput, known: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a run by setting, and the source of each that is not a default.

    Typed values win over the environment. The environment wins over files. Of several files the last one wins.

    Args:
        values: what Hydra composed of `files` and the overrides of `given`.
        known: sources of values from a stored run.
    """
    result, sources, last = dict(values), dict(known or {}), dict[str, str]()
    for file in files:
        for name in file.keys:
            last[SETTING_OF.get(name, name)] = name
            sources |= {SETTING_OF.get(name, name): file.source} if file.source else {}
    for name, alias in ALIASES.items():
        if (value := pop_key(result, name)) is None:
            continue
        key, translated = translate_alias(name, value)
        applies = is_refined(name, lookup(result, key)) if alias.refines else last.get(key, name) == name
        if translated is not None and applies and (alias.refines or key not in given.sources):
            set_key(result, key, translated)
    for one in by_setting_name([NamedValue(name, value, f"{name}={value}") for name, value in given.values.items()]):
        set_key(result, one.key, one.value)
    return result, sources | given.sources


class NamedValue(NamedTuple):
    """A value of a setting under one of the setting's names."""

    key: str
    value: Any
    text: str  # as it was typed


def by_setting_name(values: Sequence[NamedValue]) -> list[NamedValue]:
    """Replace aliases by their settings: `algo.batch_size=64` becomes `batch_size=64`.

    Raises ConfigError if two names of one setting have different values.
    """
    result = [one for one in values if one.key not in ALIASES]
    by_key = {one.key: one for one in result}
    for one in (each for each in values if each.key in ALIASES):
        key, translated = translate_alias(one.key, one.value)
        other, meant = by_key.get(key), NamedValue(key, translated, f"{key}={translated}")
        if translated is None:
            continue
        if other is not None and is_refined(one.key, other.value):
            result = [*(each for each in result if each.key != key), meant]
        elif other is None or other.key == one.key:
            result.append(meant)
            by_key[key] = NamedValue(one.key, translated, one.text)
        elif other.value != translated:
            both = f"{one.text} contradicts {other.text}"
            raise ConfigError(f"{both}: they are one setting ({key}); remove one of them")
    return result


def with_names_as_typed(message: str, arguments: Sequence[str], environment: Mapping[str, str], here: str = "") -> str:
    """`message` with overrides and paths as typed; used aliases and environment variables of its settings are added.

    `here`: the folder from which relative paths start.
    """
    overrides = split_options(arguments)[1]
    for text in overrides:
        with suppress(ConfigError):
            message = message.replace(_for_hydra(text), text).replace(f"++{text}", text)
        if (key := key_of(text)) in SHORT:
            message = message.replace(f"{SHORT[key]}={text.partition('=')[2]}", text)
        if here and key_of(text) in PATHS and (path := text.partition("=")[2].strip("'\"").rstrip("/")):
            behind = "[\\w/-]" if path == "." else "[\\w-]"
            whole = rf"(?<![\w./-]){re.escape(str(Path(here, path)))}(?!{behind})"
            message = re.sub(whole, path.replace("\\", r"\\"), message)

    def is_about(name: str) -> bool:
        key = re.escape(SETTING_OF.get(name, name))
        return re.search(rf"(?<![\w.]){key}([=:]| is no setting)", message) is not None

    aliases = [
        text for text in overrides if (name := key_of(text)) in ALIASES and name not in message and is_about(name)
    ]
    message += f" (typed: {', '.join(aliases)})" if aliases else ""
    typed = {SETTING_OF.get(key_of(text), key_of(text)) for text in overrides}
    exported = [
        f"{one}={one_line(environment[one], 60)}"
        for name, one in variables(environment).items()
        if f"{one}=" not in message
        and SETTING_OF.get(name, name) not in typed
        and (is_about(name) or f"{name}=" in message)
    ]
    return f"{message} (environment: {', '.join(exported)})" if exported else message


def _for_hydra(override: str, algorithms: Sequence[str] = ()) -> str:
    """The form in which Hydra accepts an override: with quotes and with `+` or `++` where they are needed.

    Args:
        algorithms: names of the algorithms that are swept over: keys that all of them have are accepted.

    Raises:
        ConfigError: the override deletes a setting (`~key`). The setting would then have its default.
    """
    key = key_of(override)
    free = key.startswith(tuple(f"{group}." for group in FREE))
    if override.startswith("~"):
        if not key.startswith((*FREE, "hydra")):
            raise ConfigError(f"{override}: a setting cannot be deleted; remove this, or give the setting a value")
        return override
    if not BARE_TEXT.fullmatch(override.partition("=")[2]):
        override = _quoted(override)
    if override.startswith(("profile=", "tuned=", *(f"{one.name}=" for one in plugins.parts(plugins.ENGINES)))):
        return "+" + override
    own = [{f"algo.{name}" for name, _ in settings_of(ALGO_CLASSES[one])} for one in algorithms]
    if free or key in FREE or (own and key in set.intersection(*own)):
        return "++" + override.lstrip("+")
    return override


def _quoted(override: str) -> str:
    """Put text in quotes if Hydra needs them, also inside lists: `env.kwargs.path='~/data'`."""
    key, _, value = override.partition("=")
    if re.match(r"\w+\(", value):
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
        escaped = re.sub(r"\\+$", lambda match: match[0] * 2, bare)
        result += head + colon + text.replace(bare, f"'{escaped}'")
    return result.strip()


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into options (with their values) and overrides. Users may mix them."""
    options, overrides, takes_value = list[str](), list[str](), False
    for argument in arguments:
        if takes_value or argument.startswith("-"):
            options.append(argument)
            takes_value = not takes_value and argument in OPTIONS_WITH_VALUE
        else:
            overrides.append(argument)
    return options, overrides


def without_folder(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that choose the output folder."""
    return [text for text in arguments if key_of(text) not in ("on_existing", *OUTPUT_KEYS)]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Name of a flag → environment variable that sets it: `batch_size` → `BATCH_SIZE`.

    Raises ConfigError if a variable with the prefix names another setting, or seems to be a typo of a flag.
    """
    flags = [flag.name for flag in FLAGS]
    found = {name: name.upper() for name in BARE if environment.get(name.upper())}
    for variable in environment:
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or environment[variable] in ("", COMPILES_FIRST.get(variable)):
            continue
        if name in (*flags, *ALIASES, *REMOVED):  # a removed setting is refused later
            found[name] = variable
        elif name in SETTINGS:
            raise ConfigError(
                f"environment variable {variable}: only flags have one; type {name}={environment[variable]}"
            )
        elif hint := did_you_mean(name, flags):
            hint = re.sub(r"'(\w+)'", lambda flag: f"'{PREFIX}{flag[1].upper()}'", hint)
            raise ConfigError(f"environment variable {variable}: no flag has this name{hint}")
    return found
