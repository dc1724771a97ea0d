"""Plain mappings (from YAML, the command line) → frozen dataclasses, with messages a user can act on.

The only place where the types of outside values are decided. Nothing is guessed: `1e6` becomes an int because it is
one, `"on"` becomes a switch because the field is one, everything else is an error that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fasttrain.errors import ConfigError

T = TypeVar("T")

Switch = Literal["auto", "on", "off"]
Named = Union[str, dict[str, Any]]  # noqa: UP007 - a dotted name of the user's, or a mapping with it and arguments

_TRUE = {"true", "on", "yes", "1"}
_FALSE = {"false", "off", "no", "0"}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'num_envs'?"`, or an empty string when nothing is close. Never suggests `word` itself."""
    names = {name.lower(): name for name in sorted(set(choices) - {word})}
    lower = word.lower()
    close = difflib.get_close_matches(lower, list(names), n=2, cutoff=0.6)
    if not close:  # `envs` for `num_envs`: contained rather than similar
        close = [name for name in names if len(word) > 2 and lower in name][:2]
    return f"; did you mean {' or '.join(repr(names[name]) for name in close)}?" if close else ""


def build(cls: type[T], values: Mapping[str, Any], where: str = "", known: Iterable[str] = ()) -> T:
    """A `cls` from a mapping. `where` is the dotted prefix for messages, `known` more keys to suggest from.

    Raises:
        ConfigError: unknown or missing key, or a value that does not fit the field's type.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown key '{where}{key}'{did_you_mean(str(key), [*fields, *known])}")
    kwargs = {}
    for name, field in fields.items():
        if name in values:
            kwargs[name] = convert(values[name], hints[name], where + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key '{where}{name}'")
    return cls(**kwargs)


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint` says, or `ConfigError` naming `key`, the value and what fits."""
    if dataclasses.is_dataclass(value):  # built already, by a caller who had to choose the class
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _misfit(key, value, "a group of keys")
        return build(hint, value, key + ".")
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint), key)
    if origin is Literal:
        return _literal(value, get_args(hint), key)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _misfit(key, value, "a list")
        return tuple(convert(item, get_args(hint)[0], f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _misfit(key, value, "a mapping")
        return {str(k): convert(v, get_args(hint)[1], f"{key}.{k}") for k, v in value.items()}
    if hint is Any:
        return value
    return _scalar(value, hint, key)


def named(entry: Named, word: str, key: str) -> tuple[str, dict[str, Any]]:
    """`my.module:Thing`, or `{WORD: my.module:Thing, factor: 2}` → the dotted name and the arguments beside it.

    Raises:
        ConfigError: the mapping names nothing.
    """
    if isinstance(entry, str):
        return entry, {}
    arguments = dict(entry)
    name = arguments.pop(word, None)
    if not isinstance(name, str):
        raise ConfigError(f"{key}: expected {{{word}: my.module:Name, …}}, got {dict(entry)}")
    return name, arguments


def _scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is bool:
        text = str(value).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise _misfit(key, value, "true or false")
    if hint is int:
        number = _number(value)
        if number is None or number != int(number):
            raise _misfit(key, value, "a whole number")
        return int(number)
    if hint is float:
        number = _number(value)
        if number is None:
            raise _misfit(key, value, "a number")
        return float(number)
    if hint is type(None) and value is None:
        return None
    if hint is str and isinstance(value, str) and value:
        return value
    raise _misfit(key, value, "text" if hint is str else getattr(hint, "__name__", str(hint)))


def _number(value: Any) -> float | None:
    """Finite number in `value` (ints, floats, `"1e6"`, `"1_000"`), else None; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return number if not isinstance(value, int) else value


def _literal(value: Any, choices: tuple[Any, ...], key: str) -> Any:
    if isinstance(value, bool) and {"on", "off"} <= set(choices):  # YAML reads a bare on/off as a boolean
        value = "on" if value else "off"
    text = str(value).lower()
    if {"on", "off"} <= set(choices) and text in _TRUE | _FALSE:
        return "on" if text in _TRUE else "off"
    if value in choices:
        return value
    raise ConfigError(
        f"{key}={value}: not one of {', '.join(map(str, choices))}{did_you_mean(str(value), map(str, choices))}"
    )


def _union(value: Any, hints: tuple[Any, ...], key: str) -> Any:
    if value is None and type(None) in hints:
        return None
    problems = []
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return convert(value, hint, key)
        except ConfigError as error:
            problems.append(str(error).split(": ", 1)[-1])
    raise ConfigError(f"{key}={value}: {'; or '.join(problems)}")


def _misfit(key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{key}={value}: expected {wanted}")
