"""`fasttrain settings [PREFIX] [--json | --schema]`: every setting with its default, values, class and meaning.

    fasttrain settings                 all of them
    fasttrain settings env.            the settings of a group (algo.n_epochs: one setting)
    fasttrain settings --json          as a list, for programs
    fasttrain settings --schema        as a JSON schema, by which editors check YAML files

All this comes from the declarations of the settings, and so does the reference in the documentation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from functools import cache
from importlib.resources import files
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fasttrain.cli.commands import COMMANDS, OTHER_WORDS
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.backends import backends
from fasttrain.spec.config import ALGO_CLASSES, AlgoConfig, Config
from fasttrain.spec.setting import declared, did_you_mean, settings_of
from fasttrain.terminal import fitting, spelt

JSON_TYPES = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", tuple: "array", dict: "object",
}  # fmt: skip


class Row(NamedTuple):
    """What `fasttrain settings` prints about one setting."""

    key: str
    default: Any  # MISSING if the game or the algorithm decides the default
    choices: tuple[str, ...]
    types: tuple[str, ...]  # names of JSON types
    least: float | None
    most: float | None
    flag_class: str  # exact, rounding or trade-off; empty for a setting that is not about speed
    text: str
    algorithms: tuple[str, ...] = ()  # for a key below `algo.`: the algorithms that have it

    @property
    def usual(self) -> str:
        """The default as the user would type it; empty if there is none."""
        return "" if self.default is MISSING else spelt(_jsonable(self.default))


def main(arguments: Sequence[str]) -> int:
    """Print the settings, or those whose keys begin with the PREFIX among the arguments.

    Raises ConfigError: an unknown option, or no key begins with PREFIX.
    """
    words = [word for word in arguments if word not in ("settings", "--json", "--schema")]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise ConfigError(f"settings {' '.join(words)}: expected one PREFIX, --json or --schema, as in settings env.")
    if "--schema" in arguments:
        print(json.dumps(schema(), indent=2, ensure_ascii=False))
        return EXIT_DONE
    found = [row for row in rows() if row.key.startswith("".join(words))]
    if not found:
        raise ConfigError(f"settings {words[0]}: no such key{did_you_mean(words[0], [row.key for row in rows()])}")
    if "--json" in arguments:
        print(json.dumps([_plain(row) for row in found], indent=2, ensure_ascii=False))
    else:
        print(fitting("\n".join(map(lines, found)), sys.stdout))
    return EXIT_DONE


@cache
def rows() -> tuple[Row, ...]:
    """All settings, in the order of their declarations; those below `algo.` last."""
    run = [_row(key, hint, one) for key, hint, one in _declarations(Config) if not key.startswith("algo.")]
    algo = [_row(f"algo.{key}", hint, one) for key, hint, one in _declarations(AlgoConfig) if key != "name"]
    texts = algorithm_texts()
    keys: dict[str, list[str]] = {}
    for name, spec in ALGORITHMS.items():
        for key in spec.keys():  # noqa: SIM118 - a method of the spec
            keys.setdefault(key, []).append(name)
    for key, names in keys.items():
        hint, default = ALGORITHMS[names[0]].keys()[key]
        row = Row(f"algo.{key}", default, _choices(hint), _types(hint), None, None, "", texts[key], tuple(names))
        algo.append(row)
    return (*(row for row in run if row.text), *algo)


@cache
def algorithm_texts() -> dict[str, str]:
    """The meaning of each key below `algo.`, including the arguments of stock constructors."""
    text = files("fasttrain.spec").joinpath("algorithm_texts.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def completions(line: str) -> tuple[list[str], str]:
    """Commands and values that complete `line`, and `line` without its command: in this second text Hydra completes
    keys and files, because Hydra does not know the commands."""
    program, *words = line.split() or [""]
    last = words.pop() if words and not line.endswith(" ") else ""
    commands = [] if words else [*COMMANDS, *OTHER_WORDS, "help"]
    key, equals, _ = last.partition("=")
    values = [
        f"{key}={value}"
        for row in rows()
        if row.key == key and equals
        for value in (*row.choices, *("true", "false") * ("boolean" in row.types))
    ]
    words = words[1:] if words and words[0] in (*COMMANDS, *OTHER_WORDS) else words
    return [word for word in (*commands, *values) if word.startswith(last)], " ".join([program, *words, last])


def schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) for YAML files of settings."""
    root: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object()}
    for row in rows():
        place, words = root, row.key.split(".")
        for word in words[:-1]:
            place = place["properties"].setdefault(word, _object())
        place["properties"][words[-1]] = _property(row)
    root["properties"]["algo"]["properties"]["name"] = {"enum": list(ALGO_CLASSES)}
    root["properties"]["defaults"] = {"type": "array", "description": "Hydra's list of files that this one builds on."}
    return root


def _object() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _property(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"description": row.text}
    if row.choices:
        words: list[Any] = [*row.choices, *[None] * ("null" in row.types), *[True, False] * ("off" in row.choices)]
        numbers = [{"type": kind} for kind in row.types if kind in ("integer", "number", "array")]
        found |= {"anyOf": [{"enum": words}, *numbers]} if numbers else {"enum": words}
    elif row.types:
        found["type"] = [*row.types]
    found |= {name: bound for name, bound in (("minimum", row.least), ("maximum", row.most)) if bound is not None}
    return found if row.default is MISSING else found | {"default": _jsonable(row.default)}


def _declarations(cls: type) -> list[tuple[str, Any, Any]]:
    found = []
    for key, one in settings_of(cls, parts=True):
        hint: Any = cls
        for word in key.split("."):
            hint = get_type_hints(hint)[word]
        if not declared(one).hidden:
            found.append((key, hint, one))
    return found


def _row(key: str, hint: Any, one: Any) -> Row:
    it = declared(one)
    choices = tuple(backends()) if key == "env.backend" else _choices(hint)
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return Row(key, default, choices, _types(hint), it.least, it.most, it.class_text if it.flag_class else "", it.text)


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    return tuple(str(word) for each in _parts(hint) if get_origin(each) is Literal for word in get_args(each))


def _types(hint: Any) -> tuple[str, ...]:
    kinds = [str if get_origin(each) is Literal else get_origin(each) or each for each in _parts(hint)]
    return tuple(dict.fromkeys(JSON_TYPES[kind] for kind in kinds if kind in JSON_TYPES))


def _plain(row: Row) -> dict[str, Any]:
    return {key: _jsonable(value) for key, value in row._asdict().items() if value not in (None, (), "", MISSING)}


def _jsonable(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def lines(row: Row) -> str:
    """The setting with its default, its text, and its values, class and algorithms."""
    facts = [" | ".join(row.choices), row.flag_class and f"class {row.flag_class}", ", ".join(row.algorithms)]
    told = "; ".join(filter(None, facts))
    return f"{row.key}{'=' * bool(row.usual)}{row.usual}\n    {row.text}" + (f"\n    ({told})" if told else "")
