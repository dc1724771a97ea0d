"""How one setting is declared: a dataclass field with its default, range, class and text; what is read off such fields.

The declaration is the only place that knows a setting: the typed configuration, ranges, `--help`, names in the
environment, what Hydra composes against and the rows of the plan come from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

FlagClass = Literal["exact", "rounding", "trade-off"]


class Setting(NamedTuple):
    """What is declared of a setting besides its type and default."""

    text: str
    flag_class: FlagClass | None = None  # of a speed flag: exact gives the numbers of stock
    needs: str = ""  # the capability of an algorithm without which it means nothing; empty: it means something for each
    ours: bool = False  # only fasttrain's own classes can do it
    stock: Any = None  # its value in a plain SB3 script: the plan prints what differs from it
    least: float | None = None
    most: float | None = None
    may_change: bool = False  # in a run that goes on
    classes: Mapping[Any, FlagClass] = {}


def setting(
    default: Any,
    text: str,
    flag_class: FlagClass | None = None,
    *,
    stock: Any = MISSING,
    needs: str = "",
    ours: bool = False,
    least: float | None = None,
    most: float | None = None,
    may_change: bool = False,
    classes: Mapping[Any, FlagClass] | None = None,
) -> Any:
    """A dataclass field with a `Setting`.

    Args:
        default: MISSING where `reading.from_mapping` finds the value, an empty list or dict for a new one each time.
        stock: the default, unless it is given.
        further: as in `Setting`.
    """
    plain = default if stock is MISSING else stock
    declared = Setting(text, flag_class, needs, ours, plain, least, most, may_change, classes or {})
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"setting": declared})
    return field(default=default, metadata={"setting": declared})


def declared(one: Field[Any]) -> Setting:
    """What is declared of a field."""
    found: Setting = one.metadata.get("setting") or Setting("")
    return found


def settings_of(cls: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every setting of a configuration class, dotted; its groups are classes too."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            yield from settings_of(hints[one.name], f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, one


def defaults_of(cls: Any) -> dict[str, Any]:
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


class Flag(NamedTuple):
    """A speed flag: a setting that has a class."""

    name: str
    flag_class: FlagClass
    needs: str
    stock: Any
    text: str
    ours: bool
    classes: Mapping[Any, FlagClass]

    def class_of(self, value: Any) -> FlagClass:
        """The class belongs to the value: all steps together are exact, in groups they round."""
        return self.classes.get(value, self.flag_class)

    @property
    def class_text(self) -> str:
        """Its class, or those of its values."""
        return "/".join(dict.fromkeys((*self.classes.values(), self.flag_class)))

    def fits(self, spec: Any) -> bool:
        """Whether it means anything for that algorithm."""
        return not self.needs or bool(getattr(spec, self.needs))


def flags_of(cls: Any) -> tuple[Flag, ...]:
    """The flags among a class's fields, in their order."""
    found = ((one.name, declared(one)) for one in fields(cls))
    return tuple(
        Flag(name, it.flag_class, it.needs, it.stock, it.text, it.ours, it.classes)
        for name, it in found
        if it.flag_class
    )


def ranges_of(settings: Mapping[str, Field[Any]]) -> dict[str, tuple[float | None, float | None]]:
    """Key → least and most, of those that are bounded."""
    found = {key: declared(one) for key, one in settings.items()}
    return {key: (it.least, it.most) for key, it in found.items() if (it.least, it.most) != (None, None)}
