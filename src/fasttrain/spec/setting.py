"""How one setting is declared: a dataclass field with its default, range, class and text; what is read off such fields;
and how plain mappings (from YAML, the command line) become such dataclasses, with messages a user can act on.

The declaration is the only place that knows a setting: the typed configuration, ranges, `--help`, names in the
environment, what Hydra composes against and the rows of the plan come from it. Values from outside are not guessed:
`1e6` becomes an int because it is one, `"on"` a switch because the field is one, else an error names the key.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.plain import named_or_number, plain

FlagClass = Literal["exact", "rounding", "trade-off"]


class Setting(NamedTuple):
    """The declaration of a setting, besides its type and default."""

    text: str
    flag_class: FlagClass | None = None  # of a speed flag: exact gives the numbers of stock
    needs: str = ""  # the capability of an algorithm without which it means nothing; empty: it means something for each
    ours: bool = False  # only fasttrain's own classes can do it
    stock: Any = None  # its value in a plain SB3 script: the plan prints what differs from it
    least: float | None = None
    most: float | None = None
    may_change: bool = False  # in a run that goes on
    classes: Mapping[Any, FlagClass] = {}
    hidden: bool = False  # only shipped files set it
    name: str = ""  # of a flag

    def class_of(self, value: object) -> FlagClass:
        """The class belongs to the value: all steps together are exact, in groups they round."""
        return self.classes.get(value) or self.flag_class or "exact"

    @property
    def class_text(self) -> str:
        """Its class, or those of its values."""
        return "/".join(dict.fromkeys(map(str, (*self.classes.values(), self.flag_class))))

    def fits(self, spec: object) -> bool:
        """Whether it means anything for that algorithm."""
        return not self.needs or bool(getattr(spec, self.needs))


def setting(
    default: object,
    text: str,
    flag_class: FlagClass | None = None,
    *,
    stock: object = MISSING,
    **further: Any,
) -> Any:
    """A dataclass field with a `Setting`, `further` as there. `default`: MISSING where `reading.from_mapping` finds the
    value, an empty dict for a new one each time; `stock`: the default, unless it is given."""
    metadata = {"setting": Setting(text, flag_class, stock=default if stock is MISSING else stock, **further)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(one: Field[Any]) -> Setting:
    """The `Setting` of a field."""
    found: Setting = one.metadata.get("setting") or Setting("")
    return found


def settings_of(cls: type, prefix: str = "", parts: bool = False) -> Iterator[tuple[str, Field[Any]]]:
    """Every setting of a configuration class, dotted; its groups are classes too. `parts`: those of a setting that has
    some, `daemons.timeouts_s.game`, in its place."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]) and (parts or "setting" not in one.metadata):
            yield from settings_of(hints[one.name], f"{prefix}{one.name}.", parts)
        else:
            yield prefix + one.name, one


def defaults_of(cls: type) -> dict[str, Any]:
    """Default values as a nested mapping of plain values, None where there is none: what Hydra composes against."""
    hints, found = get_type_hints(cls), dict[str, Any]()
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            found[one.name] = defaults_of(hints[one.name])
        elif one.default_factory is not MISSING:
            found[one.name] = one.default_factory()
        else:
            value = None if one.default is MISSING else one.default
            found[one.name] = list(value) if isinstance(value, tuple) else deepcopy(value)
    return found


def flags_of(cls: type) -> tuple[Setting, ...]:
    """The flags among a class's fields, in their order: what has a class, with its name."""
    return tuple(declared(one)._replace(name=one.name) for one in fields(cls) if declared(one).flag_class)


def ranges_of(settings: Mapping[str, Field[Any]]) -> dict[str, tuple[float | None, float | None]]:
    """Key → least and most, of those that are bounded."""
    found = {key: (declared(one).least, declared(one).most) for key, one in settings.items()}
    return {key: bounds for key, bounds in found.items() if bounds != (None, None)}


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
    """A `cls` from a mapping. `where` is the dotted prefix for messages, `known` more keys to suggest from. Raises
    ConfigError: unknown or missing key, or a value that does not fit the field's type."""
    hints = get_type_hints(cls)
    names = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key '{where}{key}'{did_you_mean(str(key), [*names, *known])}")
    kwargs = {}
    for name, one in names.items():
        if name in values:
            kwargs[name] = convert(values[name], hints[name], where + name)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(f"missing key '{where}{name}'")
    return cls(**kwargs)


def convert(value: object, hint: object, key: str) -> Any:
    """`value` as the type `hint` says, or `ConfigError` naming `key`, the value and what fits."""
    if is_dataclass(value) and not isinstance(value, type):  # built already, by a caller who had to choose the class
        return value
    value, origin = named_or_number(value, key), get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _misfit(key, value, "a group of keys")
        return build(hint, value, key + ".")
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
        return plain(value, key)
    return _scalar(value, hint, key)


def named(entry: Named, word: str, key: str) -> tuple[str, dict[str, Any]]:
    """`my.module:Thing`, or `{WORD: my.module:Thing, factor: 2}` → the dotted name and the arguments beside it. Raises
    ConfigError: the mapping names nothing."""
    if isinstance(entry, str):
        return entry, {}
    arguments = dict(entry)
    name = arguments.pop("call" if "call" in arguments else word, None)  # `call` leaves the word to an argument
    if not isinstance(name, str):
        raise ConfigError(f"{key}: expected {{{word}: my.module:Name, …}}, got {dict(entry)}")
    return name, arguments


def _scalar(value: object, hint: object, key: str) -> Any:
    if hint is bool:
        text = str(value).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise _misfit(key, value, "true or false")
    if hint in (int, float):
        number = _number(value)
        if number is None or (hint is int and number != int(number)):
            raise _misfit(key, value, "a whole number" if hint is int else "a number")
        return int(number) if hint is int else float(number)
    if (hint is type(None) and value is None) or (hint is str and isinstance(value, str) and value):
        return value
    raise _misfit(key, value, "text" if hint is str else getattr(hint, "__name__", str(hint)))


def _number(value: object) -> float | None:
    """Finite number in `value` (ints, floats, `"1e6"`, `"1_000"`), else None; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return (value if isinstance(value, int) else number) if math.isfinite(number) else None


def _literal(value: object, choices: tuple[Any, ...], key: str) -> Any:
    text = str(value).lower()
    if "off" in choices and text in _FALSE:  # YAML reads a bare on/off as a boolean
        return "off"
    if "off" in choices and text in _TRUE and (on := {"on", "stop"} & {*choices}):  # of a guard, which stops
        return on.pop()
    if value in choices:
        return value
    raise ConfigError(
        f"{key}={value}: not one of {', '.join(map(str, choices))}{did_you_mean(str(value), map(str, choices))}"
    )


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
    raise ConfigError(f"{key}={value}: {'; or '.join(problems)}")


def _misfit(key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{key}={value}: expected {wanted}")
