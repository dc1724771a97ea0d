"""Plain values: what a configuration may contain, and how plan.json stores it without any change.

This module checks values whose type no setting declares, such as arguments of an env, a wrapper or a callback. So
eval, resume and export can build the same env as the training. The result of an env's own `get_state()` is stored in
the same form, and may have arrays too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np

from fasttrain.errors import ConfigError

EXACT = (bool, int, float, str, type(None))
MOST_BITS = 10_000  # maximum number of bits of an int, because Python reads at most 4,300 digits
WAYS_OUT = {
    "ndarray": "give a list (its tolist()), or name a function of a module that makes it",
    "Tensor": "give a list (its tolist()), or name a function of a module that makes it",
    "set": "give a list",
    "frozenset": "give a list",
    "bytes": "give text",
}


def plain(value: Any, key: str) -> Any:
    """Replace NumPy's numbers by Python's, and classes and functions by their import paths, also inside containers.

    Raises ConfigError: plan.json cannot store the value. The message names `key`.
    """
    value = import_path_or_number(value, key)
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{key}[{index}]") for index, item in enumerate(value))
    if isinstance(value, Mapping) and not hasattr(value, "__missing__"):
        return {plain(name, f"{key}, a key"): plain(item, f"{key}.{name}") for name, item in value.items()}
    if type(value) not in EXACT:
        raise _cannot_hold(key, value)
    if type(value) is int and value.bit_length() > MOST_BITS:
        raise ConfigError(f"{key}: a number of {value.bit_length():,} bits is too long for plan.json")
    if type(value) is str and value != value.encode("utf-8", "replace").decode("utf-8"):
        raise ConfigError(f"{key}={value!r:.60}: not valid as UTF-8, so that plan.json cannot store it")
    return value


def import_path_or_number(value: object, key: str) -> Any:
    """Replace a NumPy number by Python's, and a class or function by `module:Name`."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.shape == ()):
        return value.item()
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not callable(value) or not isinstance(name, str) or not isinstance(module, str):
        return value
    imported: object = sys.modules.get(module)
    for word in name.split("."):
        imported = getattr(imported, word, None)
    if imported is not value or module == "__main__":
        raise ConfigError(
            f"{key}: eval and resume cannot import {module}.{name}; define it at the top of a module of its own"
        )
    return f"{module}:{name}"


def _cannot_hold(key: str, value: object) -> ConfigError:
    kind = type(value)
    way_out = WAYS_OUT.get(kind.__name__) or "give its str()" * hasattr(value, "__fspath__")
    way_out = way_out or "give numbers, texts, lists and mappings, or name a function of a module that makes it"
    what = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ConfigError(f"{key}: plan.json cannot store it ({what}); eval and resume would build another env: {way_out}")


# --- In plan.json, a value that JSON cannot express is a mapping with one key that begins with `$`.

TUPLE, PAIRS, FLOAT, ARRAY = "$tuple", "$pairs", "$float", "$array"


def to_dict(value: object, hint: object = None) -> Any:
    """A copy of a configuration or of one setting that JSON can store. `from_dict` restores the values.

    Raises TypeError: a value in it is not plain.
    """
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        return {one.name: to_dict(getattr(value, one.name), hints[one.name]) for one in fields(value)}
    if isinstance(value, tuple):  # a list in the YAML: settings store lists as tuples
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping) and "tuple" in str(hint):
        return {name: _to_json([*items]) for name, items in value.items()}
    return _to_json(value)


def _to_json(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {ARRAY: [value.dtype.str, list(value.shape), value.reshape(-1).tolist()]}
    if type(value) is tuple:
        return {TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, EXACT):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} is no plain value")
    if all(type(name) is str and not name.startswith("$") for name in value):
        return {name: _to_json(item) for name, item in value.items()}
    return {PAIRS: [[_to_json(name), _to_json(item)] for name, item in value.items()]}


def from_dict(stored: object) -> Any:
    """Restore the values that `to_dict` stored. Raises ConfigError: `to_dict` did not store them."""
    try:
        return _from_json(stored)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"plan.json holds a value that fasttrain did not write ({error})") from error


def _from_json(stored: object) -> Any:
    if isinstance(stored, list):
        return [_from_json(item) for item in stored]
    if not isinstance(stored, Mapping):
        return stored
    if len(stored) == 1:
        if TUPLE in stored:
            return tuple(_from_json(item) for item in stored[TUPLE])
        if PAIRS in stored:
            return {_from_json(name): _from_json(item) for name, item in stored[PAIRS]}
        if FLOAT in stored:
            return float(stored[FLOAT])
        if ARRAY in stored:
            kind, shape, values = stored[ARRAY]
            return np.array(values, np.dtype(str(kind))).reshape(shape)
    return {name: _from_json(item) for name, item in stored.items()}
