"""Names in a configuration: what `module:Name` and `{call: "module:Name", …}` mean in an argument, everywhere alike,
and what is looked at before something that was named is called.
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

from fasttrain.envs.user_code import PYTHONS_FOLDERS, blame, findable, look_up
from fasttrain.errors import EnvSpecError
from fasttrain.spec.setting import did_you_mean

Supplies = Mapping[str, Callable[[], Any]]
NOTHING: Supplies = MappingProxyType({})
# "module:Name" in an argument; what else has this form and names no module stays text.
NAME = re.compile(r"\w+(\.\w+)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# Of Python's own library what `{call: …}` may call: values, nothing that reads files or starts programs.
DATA_TYPES = ("collections", "datetime", "decimal", "fractions", "random", "types")
CLOSE, SHORTEST = 0.85, 5  # a module's name of at least that length is a typo of one that is as similar


def callable_at(entry: str, option: str, folder: str | None = None, kind: Any = None, only: Any = None) -> Any:
    """The class or function that `entry` names, looked at before anybody calls it.

    Args:
        kind: what a class must be derived from; a function may come instead.
        only: the same, and a function will not do.

    Raises:
        EnvSpecError: it is neither, or a part of Python's own library that is no plain data type.
    """
    found, wanted = look_up(entry, option, folder), only or kind
    is_class = isinstance(found, type)
    if not callable(found) or (only is not None and not is_class):
        raise EnvSpecError(f"{option}: expected a class{'' if only else ' or function'}, it is {found!r:.80}")
    if wanted is not None and is_class and not issubclass(found, wanted):
        raise EnvSpecError(f"{option} must be derived from {wanted.__module__}.{wanted.__qualname__}")
    plain = isinstance(found, (type, FunctionType, BuiltinFunctionType))  # else its class tells where that is from
    home = str((plain and found.__module__) or entry).partition(":")[0].partition(".")[0]
    if home not in DATA_TYPES and _is_pythons(home):
        raise EnvSpecError(
            f"{option} is a part of Python's own library, which is not called from a configuration; write a "
            "function of yours that calls it, and name that"
        )
    return found


def resolved(value: Any, option: str, folder: str | None = None, supplies: Supplies = NOTHING) -> Any:
    """An argument as it is handed to what a configuration names, also inside lists and mappings: `"module:Name"` is
    what it names, `{call: "module:Name", size: 3}` what that returns, anything else a copy of itself.

    A text is a name where its module can be found, in `folder` or installed. Then it must lead to something, except in
    Python's own library, whose modules have the names of everyday words (`queue:first`).

    Args:
        supplies: what is made for a parameter of that name, wherever something is called that has it.

    Raises:
        EnvSpecError: a name leads nowhere, its module is a typo of one that is there, or the call failed.
    """
    if isinstance(value, str):
        return _named_thing(value, option, folder) if NAME.fullmatch(value) else value
    if type(value) in (list, tuple):
        return type(value)(resolved(one, f"{option}[{i}]", folder, supplies) for i, one in enumerate(value))
    if type(value) is not dict:  # a Dict space is a mapping too
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
    given: Mapping[Any, Any], prefix: str, folder: str | None = None, supplies: Supplies = NOTHING, taker: Any = None
) -> dict[Any, Any]:
    """Each of them `resolved`, and for a `taker` what `supplies` has beside them; `prefix` is where they stand."""
    named = {key: resolved(value, f"{prefix}{key}", folder, supplies) for key, value in given.items()}
    wanted = inspect.signature(taker).parameters if taker is not None and supplies else ()
    return {name: make() for name, make in supplies.items() if name in wanted and name not in named} | named


def _named_thing(text: str, option: str, folder: str | None) -> Any:
    module, option = text.partition(":")[0], f"{option}={text}"
    top, place = module.partition(".")[0], os.getcwd() if folder is None else folder
    findable(place)
    importlib.invalidate_caches()
    spec = None if top in sys.modules else find_spec(top)
    if spec is None and top not in sys.modules:
        known = {Path(file).stem for file in os.listdir(place)} | {name.partition(".")[0] for name in sys.modules}
        if len(top) >= SHORTEST and difflib.get_close_matches(top, known - sys.stdlib_module_names, cutoff=CLOSE):
            raise EnvSpecError(f"{option}: no module named {top!r}{did_you_mean(top, known)}")
        return text
    if spec is not None and spec.origin is None and module == top:  # a plain folder of that name
        return text
    try:
        return look_up(text, option, folder)
    except EnvSpecError:
        there, path = dir(sys.modules.get(module)), text.partition(":")[2]
        if _is_pythons(top) and not difflib.get_close_matches(path, there, cutoff=CLOSE):
            return text
        raise


def _is_pythons(top: str) -> bool:
    """Whether that module is a part of Python's own library, and no file of the user's that is called like one."""
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or (file.startswith(PYTHONS_FOLDERS) and "site-packages" not in file)
