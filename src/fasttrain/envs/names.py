"""Python objects in a configuration: `module:Name` names one, `{call: "module:Name", …}` calls one.

Both forms mean the same in every argument of a configuration.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any

from fasttrain.envs.user_code import PYTHONS_FOLDERS, blame, look_up, make_importable
from fasttrain.errors import EnvSpecError
from fasttrain.spec.setting import did_you_mean

Supplies = Mapping[str, Callable[[], Any]]
NOTHING: Supplies = MappingProxyType({})
# "module:Name" in an argument. If the module does not exist, the argument remains text.
NAME = re.compile(r"\w+(\.\w+)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# Modules of Python's own library that `{call: …}` may use. None of them reads files or starts programs.
DATA_TYPES = ("collections", "datetime", "decimal", "fractions", "random", "types")
CLOSE, SHORTEST = 0.85, 5  # an unknown module name is a typo if it is this similar to a known name and this long


def callable_at(entry: str, option: str, folder: str | None = None, kind: Any = None, only: Any = None) -> Any:
    """The class or function that `entry` names, after a check that it may be called.

    Args:
        kind: the base class that a class must have. A function is accepted too.
        only: the base class that a class must have. Functions are refused.

    Raises:
        EnvSpecError: the object is of another kind, or belongs to Python's own library and is no plain data type.
    """
    target, base = look_up(entry, option, folder), only or kind
    is_class = isinstance(target, type)
    if not callable(target) or (only is not None and not is_class):
        raise EnvSpecError(f"{option}: expected a class{'' if only else ' or function'}, it is {target!r:.80}")
    if base is not None and is_class and not issubclass(target, base):
        raise EnvSpecError(f"{option} must be derived from {base.__module__}.{base.__qualname__}")
    has_module = isinstance(target, (type, FunctionType, BuiltinFunctionType))  # for instances use the name in `entry`
    top = str((has_module and target.__module__) or entry).partition(":")[0].partition(".")[0]
    if top not in DATA_TYPES and _is_pythons(top):
        raise EnvSpecError(
            f"{option} is a part of Python's own library, which a configuration cannot call; write a function of "
            "your own that calls it, and name that function"
        )
    return target


def resolve_argument(value: Any, option: str, folder: str | None = None, supplies: Supplies = NOTHING) -> Any:
    """Turn names and calls in an argument of a configuration into values, also inside lists and mappings.

    `"module:Name"` becomes the object of that name. `{call: "module:Name", size: 3}` becomes what the call returns.
    Any other value is copied.

    Text is a name if its module can be found, in `folder` or installed. The name must then exist in this module, except
    in Python's own library: its modules have the names of everyday words (`queue:first`).

    Args:
        supplies: functions by parameter name: if a callable has such a parameter, the function makes its value.

    Raises:
        EnvSpecError: a name does not exist, its module seems to be a typo, or the call failed.
    """
    if isinstance(value, str):
        return _object_or_text(value, option, folder) if NAME.fullmatch(value) else value
    if type(value) in (list, tuple):
        return type(value)(resolve_argument(one, f"{option}[{i}]", folder, supplies) for i, one in enumerate(value))
    if type(value) is not dict:  # `type`, because a Dict space is a mapping too
        return copy.deepcopy(value)
    target = value.get("call")
    if not isinstance(target, str) or not NAME.fullmatch(target):
        return arguments(value, f"{option}.", folder, supplies)
    maker = callable_at(target, f"{option}: {target}", folder)
    parts = arguments(
        {key: each for key, each in value.items() if key != "call"}, f"{option}.", folder, supplies, maker
    )
    try:
        return maker(**parts)
    except (Exception, SystemExit) as error:
        raise EnvSpecError(f"{option}: calling {target} with {parts!r:.200} failed: {blame(error)}") from error


def arguments(
    values: Mapping[Any, Any], prefix: str, folder: str | None = None, supplies: Supplies = NOTHING, maker: Any = None
) -> dict[Any, Any]:
    """Keyword arguments for `maker`: `values` after `resolve_argument`, and what the functions in `supplies` return.

    `supplies`: parameter name of `maker` → function. `prefix`: the place in the configuration, for messages.
    """
    resolved = {key: resolve_argument(value, f"{prefix}{key}", folder, supplies) for key, value in values.items()}
    parameters = inspect.signature(maker).parameters if maker is not None and supplies else ()
    return {name: make() for name, make in supplies.items() if name in parameters and name not in resolved} | resolved


def _object_or_text(text: str, option: str, folder: str | None) -> Any:
    module, option = text.partition(":")[0], f"{option}={text}"
    top, place = module.partition(".")[0], os.getcwd() if folder is None else folder
    make_importable(place)
    importlib.invalidate_caches()
    spec = None if top in sys.modules else find_spec(top)
    if spec is None and top not in sys.modules:
        known = {Path(file).stem for file in os.listdir(place)} | {name.partition(".")[0] for name in sys.modules}
        if len(top) >= SHORTEST and difflib.get_close_matches(top, known - sys.stdlib_module_names, cutoff=CLOSE):
            raise EnvSpecError(f"{option}: no module named {top!r}{did_you_mean(top, known)}")
        return text
    if spec is not None and spec.origin is None and module == top:  # only a folder, without __init__.py
        return text
    try:
        return look_up(text, option, folder)
    except EnvSpecError:
        names, path = dir(sys.modules.get(module)), text.partition(":")[2]
        if _is_pythons(top) and not difflib.get_close_matches(path, names, cutoff=CLOSE):
            return text
        raise


def _is_pythons(top: str) -> bool:
    """Whether this module belongs to Python's own library, and not to a user's file of the same name."""
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or (file.startswith(PYTHONS_FOLDERS) and "site-packages" not in file)
