"""Declares settings as dataclass fields, and builds these dataclasses from plain mappings (YAML, the command line).

A setting is declared in one place. The typed configuration, ranges, `--help`, environment variables, the schema for
Hydra and the rows of the plan are derived from this declaration. Values are converted by the type of the
field: `1e6` to an int, `"on"` to a switch. If that is impossible, the error names the key.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.plain import import_path_or_number, plain
from fasttrain.terminal import value_text

FlagClass = Literal["exact", "rounding", "trade-off"]


class Setting(NamedTuple):
    """The declaration of a setting. The dataclass field has its type and default."""

    text: str
    flag_class: FlagClass | None = None  # only of speed flags; exact: the same numbers as stock
    needs: str = ""  # a property that an algorithm must have; otherwise the setting has no effect
    ours: bool = False  # only fasttrain's own algorithms have it
    stock: Any = None  # the value of a plain SB3 script; the plan prints values that differ
    least: float | None = None
    most: float | None = None
    may_change: bool = False  # whether a resumed run may have another value
    classes: Mapping[Any, FlagClass] = {}  # value → its class, where this differs from `flag_class`
    hidden: bool = False  # only fasttrain's own YAML files set it
    name: str = ""  # the flag's name; empty for settings that are no flags

    def class_of(self, value: object) -> FlagClass:
        """The class of a value."""
        return self.classes.get(value) or self.flag_class or "exact"

    @property
    def class_text(self) -> str:
        return "/".join(dict.fromkeys(map(str, (*self.classes.values(), self.flag_class))))

    def check(self, key: str, value: object) -> None:
        """Raises ConfigError: the value is a number outside the range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        low, high = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        if not low <= value <= high:
            both = f"lie between {low:g} and {high:.10g}"
            one = f"be at least {low:g}" if self.most is None else f"be at most {high:.10g}"
            raise ConfigError(f"{key}={value_text(value)}: must {one if None in (self.least, self.most) else both}")

    def fits(self, spec: object) -> bool:
        """Whether the setting has an effect with this algorithm (an `AlgorithmSpec`)."""
        return not self.needs or bool(getattr(spec, self.needs))


def setting(
    default: object,
    text: str,
    flag_class: FlagClass | None = None,
    *,
    stock: object = MISSING,
    **more: Any,
) -> Any:
    """A dataclass field with a `Setting` in its metadata. `more`: other fields of `Setting`.

    With the default MISSING, `reading.from_mapping` computes the value. Without `stock`, `default` is stock's value.
    """
    metadata = {"setting": Setting(text, flag_class, stock=default if stock is MISSING else stock, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(one: Field[Any]) -> Setting:
    return one.metadata.get("setting") or Setting("")


def settings_of(cls: type, prefix: str = "", parts: bool = False) -> Iterator[tuple[str, Field[Any]]]:
    """The dotted key and field of every setting of a configuration class and its groups.

    `parts`: yield `daemons.timeouts_s.game` and its siblings in place of `daemons.timeouts_s`.
    """
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]) and (parts or "setting" not in one.metadata):
            yield from settings_of(hints[one.name], f"{prefix}{one.name}.", parts)
        else:
            yield prefix + one.name, one


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults as nested mappings of plain values, for Hydra. A setting without a default gets None."""
    hints, defaults = get_type_hints(cls), dict[str, Any]()
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            defaults[one.name] = defaults_of(hints[one.name])
        elif one.default_factory is not MISSING:
            defaults[one.name] = one.default_factory()
        else:
            value = None if one.default is MISSING else one.default
            defaults[one.name] = list(value) if isinstance(value, tuple) else deepcopy(value)
    return defaults


def flags_of(cls: type) -> tuple[Setting, ...]:
    """The flags of a class: its fields that have a `flag_class`."""
    return tuple(declared(one)._replace(name=one.name) for one in fields(cls) if declared(one).flag_class)


T = TypeVar("T")

Switch = Literal["auto", "on", "off"]
Named = Union[str, dict[str, Any]]  # noqa: UP007 - "module:Name", or a mapping with it and its arguments

_TRUE = {"true", "on", "yes", "1"}
_FALSE = {"false", "off", "no", "0"}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'num_envs'?"`, or an empty string if no choice is similar. Never suggests `word` itself."""
    names = {name.lower(): name for name in sorted(set(choices) - {word})}
    lower = word.lower()
    close = difflib.get_close_matches(lower, list(names), n=2, cutoff=0.6)
    if not close:  # `envs` is not similar to `num_envs`, but a part of it
        close = [name for name in names if len(word) > 2 and lower in name][:2]
    return f"; did you mean {' or '.join(repr(names[name]) for name in close)}?" if close else ""


class UnknownKeyError(ConfigError):
    """A mapping has a key that its configuration class does not have."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown key '{key}'{did_you_mean(key.rpartition('.')[2], known)}")
        self.key = key


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a `cls` from a mapping. `where` is the dotted prefix for messages.

    Raises ConfigError: a key is unknown or missing, or a value does not fit the field's type or range.
    """
    hints = get_type_hints(cls)
    names = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise UnknownKeyError(f"{where}{key}", names)
    kwargs = {}
    for name, one in names.items():
        if name in values:
            kwargs[name] = convert(values[name], hints[name], where + name)
            declared(one).check(where + name, kwargs[name])
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(f"missing key '{where}{name}'")
    return cls(**kwargs)


def convert(value: object, hint: object, key: str) -> Any:
    """Convert `value` to the type `hint`. Raises ConfigError, naming key and value: `value` does not fit."""
    if is_dataclass(value) and not isinstance(value, type):  # the caller has built it
        return value
    value, origin = import_path_or_number(value, key), get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value_text(value)}: expected a group of keys")
        return build(hint, value, key + ".")
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint), key)
    if origin is Literal:
        return _literal(value, get_args(hint), key)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{key}={value_text(value)}: expected a list")
        return tuple(convert(item, get_args(hint)[0], f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value_text(value)}: expected a mapping")
        return {str(k): convert(v, get_args(hint)[1], f"{key}.{k}") for k, v in value.items()}
    if hint is Any:
        return plain(value, key)
    return _scalar(value, hint, key)


def named(entry: Named, word: str, key: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments in `my.module:Thing` or `{WORD: my.module:Thing, factor: 2}`.

    `call` may stand in place of WORD, if an argument is called WORD. Raises ConfigError: the mapping has no name.
    """
    if isinstance(entry, str):
        return entry, {}
    arguments = dict(entry)
    name = arguments.pop("call" if "call" in arguments else word, None)
    if not isinstance(name, str):
        raise ConfigError(f"{key}: expected {{{word}: my.module:Name, …}}, got {dict(entry)}")
    return name, arguments


def _scalar(value: object, hint: object, key: str) -> Any:
    if hint is bool and (text := str(value).lower()) in _TRUE | _FALSE:
        return text in _TRUE
    if hint in (int, float) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # the text is no number, or the number is infinite
            given = value if isinstance(value, int) else float(value)
            if math.isfinite(given) and (hint is float or given == int(given)):
                return int(given) if hint is int else float(given)
    if (hint is type(None) and value is None) or (hint is str and isinstance(value, str) and value):
        return value
    number = "a finite number" if isinstance(value, float) and not math.isfinite(value) else "a number"
    words: dict[object, str] = {bool: "true or false", int: "a whole number", float: number, str: "text"}
    raise ConfigError(f"{key}={value_text(value)}: expected {words.get(hint) or getattr(hint, '__name__', str(hint))}")


def _literal(value: object, choices: tuple[Any, ...], key: str) -> Any:
    text = str(value).lower()
    if "off" in choices and text in _FALSE:  # YAML reads a bare on/off as a boolean
        return "off"
    if "off" in choices and text in _TRUE and (on := {"on", "stop"} & {*choices}):  # "on" means stop for nan_guard
        return on.pop()
    if value in choices:
        return value
    names = [*map(str, choices)]
    raise ConfigError(f"{key}={value_text(value)}: not one of {', '.join(names)}{did_you_mean(str(value), names)}")


def _union(value: object, hints: tuple[Any, ...], key: str) -> Any:
    if value is None and type(None) in hints:
        return None
    if isinstance(value, Mapping):
        hints = tuple(hint for hint in hints if get_origin(hint) is dict) or hints
    problems = []
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return convert(value, hint, key)
        except ConfigError as error:
            problems.append(str(error).split(": ", 1)[-1])
    kinds = [problem.removeprefix("expected ") for problem in problems if problem.startswith("expected ")]
    others = [problem for problem in problems if not problem.startswith("expected ")]
    wanted = [f"expected {' or '.join(dict.fromkeys(kinds))}"] * bool(kinds)
    raise ConfigError(f"{key}={value_text(value)}: {'; or '.join([*wanted, *others])}")
